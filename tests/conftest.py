"""Importing the package registers the operators; the fixture core_probe is the core headers behind C functions; tests
marked gpu are skipped where no engine serves their device."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import gpu_device
import pytest

import cudnn_grouped

ROOT = Path(__file__).resolve().parent.parent

# tests/mutants.py runs the suite against a patched copy of the package: make sure that it is the one imported.
EXPECTED_AT = os.environ.get("CUDNN_GROUPED_EXPECTED_AT")
if EXPECTED_AT and not Path(cudnn_grouped.__file__).is_relative_to(EXPECTED_AT):
    raise ImportError(f"expected cudnn_grouped from {EXPECTED_AT}, got {cudnn_grouped.__file__}")


@pytest.fixture(scope="session")
def core_probe(tmp_path_factory):
    """csrc/core's number formats and layout behind C functions (tests/core_probe.cc)."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("core_probe") / "core_probe.so"
    source = ROOT / "tests" / "core_probe.cc"
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc' / 'core'}", source, "-o", library]
    subprocess.run([str(part) for part in command], check=True)
    probe = ctypes.CDLL(str(library))
    for name in ("probe_scale_offset", "probe_scale_bytes", "probe_column_base"):
        getattr(probe, name).restype = ctypes.c_int64
    return probe


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (why := gpu_device.why_not()):
        pytest.skip(why)


@pytest.fixture
def operators_on_device(monkeypatch):
    """The cases' operators run on the device of the GPU tests, with its bounds in the oracle."""
    gpu_device.patch_operators(monkeypatch)
    gpu_device.patch_bounds(monkeypatch)
