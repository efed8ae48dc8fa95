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
# It calls its own functions, whatever CUDA runtime the process has besides.
LINK_FLAGS = ["-shared", f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs", "-Wl,-Bsymbolic"]


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
        _run([CXX, *LINK_FLAGS, *objects, "-o", folder / LIBRARY])

    return _once(BUILD / f"simulator-{_digest(LINK_FLAGS, *objects)}", make) / LIBRARY


INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^">]+)[">]', re.MULTILINE)


def _closure(text, folder, include, found):
    """Adds to `found`, path: content, every header that a text in `folder` includes, and what those include. Headers
    that are neither beside the includer nor under `include` are the toolkit's or CUTLASS's: they are pinned."""
    for name in INCLUDE.findall(text):
        paths = ((place / name.decode()).resolve() for place in (folder, *include))
        path = next((p for p in paths if p.is_file()), None)
        if path is not None and path not in found:
            found[path] = path.read_bytes()
            _closure(found[path], path.parent, include, found)
    return found


def compile_kernels(sources, *, defines=(), archs="100a", include=(), flags=(), link=(), text=None):
    """Compiles .cu files, host code and PTX, into a library that runs in the simulator, and returns its path.

    sources: a path or several; each is compiled again when it or a header behind its includes has changed.
    text: replaces the text of the only source (for planted bugs). archs: what the PTX is for. link: shared libraries.
    """
    sources = [Path(s) for s in ([sources] if isinstance(sources, (str, Path)) else sources)]
    options = [
        *product_build.load().NVCC_FLAGS,
        *NVCC_FLAGS,
        f"-gencode=arch=compute_{archs},code=compute_{archs}",
        *[f"-D{d}" for d in defines],
    ]
    options += [f"-I{path}" for path in include] + ["-isystem", cutlass_include(), *flags]

    def compile_one(source):
        content = source.read_bytes() if text is None else text.encode()
        headers = _closure(content, source.parent, [source.parent, *include], {})

        def make(folder):
            path = source
            if text is not None:
                path = folder / source.name
                path.write_text(text)
            _run([nvcc(), *options, f"-I{source.parent}", "-c", path, "-o", folder / "out.o"])

        name = f"{source.parent.name}-{source.stem}-{_digest(nvcc(), options, content, *headers.values())}"
        return _once(BUILD / name, make) / "out.o"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))

    def make(folder):
        # The CUDA runtime's symbols are the simulator's.
        _run([CXX, "-shared", *objects, *link, simulator_library(), "-o", folder / "kernels.so"])

    return _once(BUILD / f"{sources[0].stem}-{_digest(*objects, *link, simulator_library())}", make) / "kernels.so"
