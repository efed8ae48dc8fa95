"""What the compiled libraries lean on. Importing must never fail for want of a GPU, a driver, nvcc or a newer torch."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import cudnn_grouped

FOLDER = Path(cudnn_grouped.__file__).parent
# Needed by each library beside its own core and the C and C++ runtimes.
ALLOWED = {
    "libcudnn_grouped.so": set(),
    "libcudnn_grouped_torch.so": {"libcudnn_grouped.so", "libtorch_cpu.so"},
    "libcudnn_grouped_cuda.so": {"libcudnn_grouped.so"},
    "libcudnn_grouped_jax.so": {"libcudnn_grouped.so"},
    "_C.*.so": {"libcudnn_grouped.so"},
}
RUNTIME = re.compile(r"(libstdc\+\+|libgcc_s|libm|libc|libdl|librt|libpthread|ld-linux[\w-]*)\.so\.\d")

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")


def read(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("pattern", ALLOWED)
def test_needs_only_what_it_should(pattern):
    libraries = list(FOLDER.glob(pattern))
    if not libraries and "cuda" in pattern:
        pytest.skip("built without the CUDA library")
    (library,) = libraries
    needed = re.findall(r"NEEDED.*\[(.*)\]", read("readelf", "-dW", library))
    assert {name for name in needed if not RUNTIME.fullmatch(name)} <= ALLOWED[pattern]


# Of the compiler's runtime: transactional clones, profiling, and what some toolchains leave to libstdc++.
RUNTIME_SYMBOLS = ("_ITM_", "__gmon", "_ZGT", "__cxa_")


def test_torch_library_uses_the_stable_abi_alone():
    """Only torch's C functions: its C++ names change between releases, and one torch build serves all from 2.11."""
    symbols = read("readelf", "--dyn-syms", "-W", FOLDER / "libcudnn_grouped_torch.so")
    undefined = re.findall(r"\bUND (\S+)", symbols)
    own = re.compile(r"_Z\w*13cudnn_grouped")
    foreign = [s for s in undefined if "@" not in s and not own.match(s) and not s.startswith(RUNTIME_SYMBOLS)]
    assert any(s.startswith("aoti_torch_") for s in foreign)
    assert not [s for s in foreign if not re.match(r"(aoti_)?torch_\w+$", s)]
