"""No errors by compute-sanitizer in a small matrix of calls of all operators (gpu_sanitizer.py)."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu_device import DRY_RUN

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SCRIPT = Path(__file__).resolve().parent / "gpu_sanitizer.py"


def find_sanitizer():
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    nvidia = find_spec("nvidia")
    folders += [Path(folder) for folder in (nvidia.submodule_search_locations if nvidia else [])]
    found = [path for folder in folders for path in sorted(folder.glob("**/compute-sanitizer")) if path.is_file()]
    return shutil.which("compute-sanitizer") or next(iter(map(str, found)), None)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_no_errors(tool):
    # Each tensor is an allocation of its own, so that a byte beyond one is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sys.executable, str(SCRIPT)]
    if not DRY_RUN:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            pytest.skip("no compute-sanitizer: neither on the path nor in a toolkit nor as a wheel")
        # initcheck does not see what TMA stores write: it would call every output copied to the host uninitialised.
        # And it takes the store of tensormap.cp_fenceproxy, which is all that map_kernel writes, for a read.
        blind = ["--check-api-memory-access", "no", "--kernel-name-exclude", "kernel_substring=map_kernel"]
        options = blind if tool == "initcheck" else []
        command = [sanitizer, "--tool", tool, *options, "--error-exitcode", "9", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-8000:]
    assert re.search(r"^\d+ calls ran$", done.stdout, re.MULTILINE), text[-8000:]
    if not DRY_RUN:
        assert re.search(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", text), text[-8000:]
