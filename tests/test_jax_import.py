"""What importing does and does not do, and what the library of XLA handlers leans on."""

import re
import shutil
import subprocess
import sys

import jax_values  # noqa: F401  skips where JAX is not installed
import pytest

from cudnn_grouped import library


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_does_not_import_jax():
    assert (
        run_python("import sys, cudnn_grouped; print('jax' in sys.modules, 'jaxlib' in sys.modules)") == "False False"
    )


def test_importing_the_jax_layer_starts_no_backend():
    """Neither torch's CUDA context nor a JAX backend, which would take the GPU's memory and fix JAX's settings."""
    code = (
        "import cudnn_grouped.jax, torch, jax\n"
        "from jax._src import xla_bridge\n"
        "print(torch.cuda.is_initialized(), xla_bridge.backends_are_initialized())"
    )
    assert run_python(code) == "False False"


def test_names_are_resolved_lazily():
    code = (
        "import sys, cudnn_grouped\n"
        "entry = cudnn_grouped.grouped_gemm_dsrelu_jax_sm100\n"
        "print('jax' in sys.modules, entry is sys.modules['cudnn_grouped.jax'].grouped_gemm_dsrelu_jax_sm100)"
    )
    assert run_python(code) == "True True"


def test_without_jax_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "import cudnn_grouped\n"
        "try: import cudnn_grouped.jax\n"
        "except ImportError as error: print(error)"
    )
    assert re.search(r"^cudnn_grouped\.jax needs JAX: pip install 'cudnn_grouped\[jax\]' \(", run_python(code))


def test_an_old_jax_is_refused():
    code = (
        "import jax; jax.__version__, jax.__version_info__ = '0.9.2', (0, 9, 2)\n"
        "import cudnn_grouped\n"
        "try: import cudnn_grouped.jax\n"
        "except ImportError as error: print(error)"
    )
    assert run_python(code).startswith("cudnn_grouped.jax needs JAX 0.10 or later, got 0.9.2")


@pytest.mark.parametrize("order", ["torch jax cudnn_grouped", "jax cudnn_grouped torch", "cudnn_grouped torch jax"])
def test_any_order_of_imports_and_a_clean_exit(order):
    """Python may end while calls are in flight."""
    code = "".join(f"import {name}\n" for name in order.split()) + (
        "import jax.numpy as jnp\n"
        "from cudnn_grouped.jax import operator\n"
        "x, offsets = jnp.ones((512, 64), jnp.bfloat16), jnp.array([256, 512], jnp.int32)\n"
        "run = jax.jit(lambda x: operator('wgrad', a=x, b=x, padded_offsets=offsets)['out'])\n"
        "print(float(run(x).sum()))\n"
        "for _ in range(50): run(x)"
    )
    assert run_python(code) == str(2.0 * 64 * 64 * 256)


@pytest.mark.parametrize("broken", [False, True])
def test_without_the_library_the_error_says_how_to_build(tmp_path, broken):
    """Built without jaxlib there is none; the package itself works."""
    wrong = tmp_path / "libcudnn_grouped_jax.so"
    if broken:
        wrong.write_bytes(b"no library")
    code = (
        "import pathlib, cudnn_grouped.library as library\n"
        f"library.JAX_LIBRARY = pathlib.Path({str(wrong)!r})\n"
        "import cudnn_grouped\n"
        f"assert ('grouped_gemm_dsrelu_jax_sm100' in dir(cudnn_grouped)) == {broken}\n"
        "try: cudnn_grouped.grouped_gemm_dsrelu_jax_sm100\n"
        "except ImportError as error: print(error)"
    )
    text = run_python(code)
    expected = "does not load" if broken else "is not built in .* jaxlib is installed: `make venv`"
    assert re.search(rf"^cudnn_grouped\.jax: libcudnn_grouped_jax\.so {expected}", text), text


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_library_knows_neither_torch_nor_python():
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library.JAX_LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    undefined = re.findall(r"\bUND (\S+)", symbols)
    assert undefined and not [s for s in undefined if re.search(r"torch|aten|c10|Py[A-Z_]|pybind|cuda[A-Z]", s)]
    defined = re.findall(r"\b(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+ (\S+)", symbols)
    own = [s for s in defined if not s.startswith("_ZN") and not s.startswith("_ZT") and not s.startswith("_ZZN")]
    assert sorted(own) == ["cudnn_grouped_xla_cpu", "cudnn_grouped_xla_cuda"]
