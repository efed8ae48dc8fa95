"""The CUDA code compiles, and the compiled library is what was asked for. Needs nvcc, no GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cudnn_grouped

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(cudnn_grouped.__file__).parent / "libcudnn_grouped_cuda.so"


def load_setup():
    """setup.py as a module: it knows the compiler and the flags."""
    spec = importlib.util.spec_from_file_location("cudnn_grouped_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_setup()
NVCC = build.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc: no toolkit, no wheels of the extra cuda-build")
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="built without libcudnn_grouped_cuda.so")


def find_cuobjdump():
    folders = [NVCC.parent] if NVCC else []
    folders += [bin for nvidia in build.package_folders("nvidia") for bin in sorted(nvidia.glob("cu*/bin"))]
    found = [folder / "cuobjdump" for folder in folders if (folder / "cuobjdump").exists()]
    return next(iter(found), shutil.which("cuobjdump"))


def cuobjdump(*options):
    tool = find_cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: neither in a toolkit nor as the wheel nvidia-cuda-cuobjdump")
    return subprocess.run([tool, *options, LIBRARY], capture_output=True, text=True, check=True).stdout


def compiled_archs():
    """{engine folder: architectures}, as the build recorded them."""
    from cudnn_grouped._build_config import CUDA_ARCHS

    return CUDA_ARCHS


@needs_nvcc
@pytest.mark.parametrize("arch", ["90a", "100a"])
def test_core_compiles_as_device_code(arch, tmp_path):
    headers = [f"core/{header.name}" for header in sorted((ROOT / "csrc/core").glob("*.h"))]
    source = tmp_path / "core.cu"
    source.write_text("".join(f'#include "{name}"\n' for name in [*headers, "core_on_device.cu"]))
    flags = [*build.NVCC_FLAGS, *build.gencode([arch]), f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
    command = [NVCC, *flags, "-Werror", "all-warnings", "-cubin", source, "-o", tmp_path / "core.cubin"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_device_function_of_core_is_compiled():
    """A template or inline function that no kernel uses would escape the test above."""
    headers = "".join(h.read_text() for h in sorted((ROOT / "csrc/core").glob("*.h")))
    device = re.findall(r"^ *CG_HD [^(;]*?(\w+)\(", headers, re.MULTILINE)
    assert "encode_e4m3" in device
    text = headers + (ROOT / "tests/core_on_device.cu").read_text()
    unused = [name for name in device if len(re.findall(rf"\b{name}\b\s*[(<]", text)) < 2]
    assert not unused, f"use {unused} in tests/core_on_device.cu"


@needs_nvcc
@pytest.mark.skipif(not any(ROOT.glob("csrc/*/*.cu")), reason="no CUDA engine yet")
@pytest.mark.skipif(os.environ.get("CUDNN_GROUPED_BUILD_CUDA") == "0", reason="CUDNN_GROUPED_BUILD_CUDA=0")
def test_library_is_built():
    assert LIBRARY.exists(), "nvcc is here: the build should have made it"


@needs_library
def test_library_holds_the_architectures_asked_for():
    compiled = set(re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("-lelf")))
    # cuobjdump names family code (100f) by its plain number.
    assert compiled == {"sm_" + arch.rstrip("f") for archs in compiled_archs().values() for arch in archs}


@needs_library
def test_no_kernel_spills():
    usage = re.findall(r"Function (\S+):\n\s*REG:\d+ STACK:(\d+).* LOCAL:(\d+)", cuobjdump("-res-usage"))
    assert usage or not {"sm90", "sm100"} & set(compiled_archs())
    # A spill counts as STACK, as does an array that the compiler could not keep in registers.
    assert [kernel for kernel, stack, local in usage if int(stack) or int(local)] == []
