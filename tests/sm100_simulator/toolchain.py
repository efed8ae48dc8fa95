"""Compiles the simulator, and kernels for it. Everything is kept under build/sm100_simulator, by a hash of what went in."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import product_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "sm100_simulator"
CXX = os.environ.get("CXX") or shutil.which("g++") or "c++"
# No contraction and no fast math: an instruction rounds where the instruction set says.
CXX_FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wall", "-fPIC"]
# After the product's: host functions that Python finds, and embedded PTX that is not compressed.
NVCC_FLAGS = ["-Xcompiler", "-fvisibility=default", "--no-compress"]
LIBRARY = "libsm100_simulator.so"


@cache
def nvcc():
    """nvcc, found as setup.py finds it; None without one."""
    return product_build.load().find_nvcc()


@cache
def cutlass_include():
    path = product_build.load().find_cutlass()
    return path if path is None or path.is_absolute() else ROOT / path


@cache
def cuda_include():
    report = subprocess.run([nvcc(), "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    line = next(line for line in report.splitlines() if line.startswith("#$ INCLUDES="))
    return re.findall(r'-I([^"\s]+)', line)[0]


def _run(command):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _digest(*parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _once(folder, make):
    """Runs `make` in a new folder unless an earlier run finished there. One process at a time."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "done").touch()
    return folder


@cache
def simulator_library():
    """The path of the compiled simulator."""
    headers = [path.read_bytes() for path in sorted(HERE.glob("*.h"))]
    flags = [CXX, *CXX_FLAGS, f"-I{cuda_include()}"]

    def compile_one(source):
        def make(folder):
            _run([*flags, "-c", source, "-o", folder / "out.o"])

        return _once(BUILD / f"{source.stem}-{_digest(flags, source.read_bytes(), *headers)}", make) / "out.o"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sorted(HERE.glob("*.cc"))))

    def make(folder):
        _run([CXX, "-shared", f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs", *objects, "-o", folder / LIBRARY])

    return _once(BUILD / f"simulator-{_digest(*objects)}", make) / LIBRARY


def compile_kernels(sources, *, defines=(), archs="100a", include=(), flags=(), text=None):
    """Compiles .cu files, host code and PTX, into a library that runs in the simulator, and returns its path.

    sources: a path or several. text: replaces the text of the only source (for planted bugs). archs: what the PTX is for.
    """
    sources = [Path(s) for s in ([sources] if isinstance(sources, (str, Path)) else sources)]
    options = [
        *product_build.load().NVCC_FLAGS,
        *NVCC_FLAGS,
        f"-gencode=arch=compute_{archs},code=compute_{archs}",
        *[f"-D{d}" for d in defines],
    ]
    options += [f"-I{path}" for path in include] + ["-isystem", cutlass_include(), *flags]
    beside = sorted(p for s in sources for pattern in ("*.h", "*.cuh") for p in s.parent.glob(pattern))
    content = [text.encode()] if text is not None else [s.read_bytes() for s in sources]
    content += [p.read_bytes() for p in beside]

    def make(folder):
        objects = []
        for source in sources:
            path = source
            if text is not None:
                path = folder / source.name
                path.write_text(text)
            objects.append(folder / f"{source.stem}.o")
            _run([nvcc(), *options, f"-I{source.parent}", "-c", path, "-o", objects[-1]])
        # The CUDA runtime's symbols stay open: the simulator, loaded first, has them.
        _run([CXX, "-shared", *objects, "-o", folder / "kernels.so"])

    name = f"{sources[0].stem}-{_digest(nvcc(), options, *content)}"
    return _once(BUILD / name, make) / "kernels.so"
