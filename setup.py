"""Compiles the libraries of cudnn_grouped: writes a ninja file from the table of libraries below and runs it.

Environment:
  CUDNN_GROUPED_BUILD_CUDA=0|1  never build the CUDA library | fail without nvcc (default: built when nvcc is found)
  CUDNN_GROUPED_CUDA_ARCHS      compute capabilities to compile for, default "90a;100f"
  CUDA_HOME, CXX, MAX_JOBS      as usual
"""

import fcntl
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "cudnn_grouped"
# Fixed, because setuptools gives editable builds a new temporary folder each time and would compile everything again.
BUILD = Path("build/ninja")
CXX = os.environ.get("CXX", "c++")
CXX_FLAGS = (
    "-std=c++17 -O3 -fPIC -pthread -fvisibility=hidden -fvisibility-inlines-hidden -fno-math-errno -fno-trapping-math "
    "-Wall -Wextra -Werror=return-type"
).split()
NVCC_FLAGS = (
    "-std=c++17 -O3 --expt-relaxed-constexpr -Xcompiler -fPIC,-fvisibility=hidden -Xptxas --warn-on-spills"
).split()
LINK_FLAGS = "-shared -pthread -Wl,--as-needed -Wl,--exclude-libs,ALL -Wl,-rpath,$ORIGIN".split()
# The oldest torch that the stable-ABI library must load with: 2.11.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ull"


def package_folders(name):
    """Folders of an installed Python package, found without importing it (importing torch takes seconds)."""
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in spec.submodule_search_locations] if spec else []


def build_requirement(name):
    folders = package_folders(name)
    return folders[0] if folders else sys.exit(f"building {PACKAGE} needs {name}: see [build-system] in pyproject.toml")


def find_nvcc():
    """nvcc of CUDA_HOME, the PATH, the usual place, or the PyPI wheels of the extra cuda-build; None without one."""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin/nvcc"] if os.environ.get("CUDA_HOME") else []
    candidates += [Path(p) for p in [shutil.which("nvcc")] if p]
    candidates += [Path("/usr/local/cuda/bin/nvcc")]
    candidates += [nvcc for folder in package_folders("nvidia") for nvcc in sorted(folder.glob("cu*/bin/nvcc"))]
    return next((c for c in candidates if os.access(c, os.X_OK)), None)


def find_static_cudart(nvcc):
    """libcudart_static.a beside nvcc, which is asked for its root: the nvcc of the PATH may be a script."""
    report = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    root = Path(re.search(r"^#\$ TOP=(.+)$", report, re.MULTILINE)[1])
    folders = ("lib64", "lib", "targets/*/lib")  # toolkit, wheels, cross toolkit
    return next(library for folder in folders for library in root.glob(f"{folder}/libcudart_static.a"))


def find_cutlass():
    """CUTLASS headers: the submodule when checked out, else the wheel nvidia-cutlass."""
    wheel = [folder / "source/include" for folder in package_folders("cutlass_library")]
    return next((p for p in [Path("third_party/cutlass/include"), *wheel] if (p / "cutlass/cutlass.h").is_file()), None)


def cuda_archs():
    return [a.strip() for a in os.environ.get("CUDNN_GROUPED_CUDA_ARCHS", "90a;100f").split(";") if a.strip()]


def gencode(archs):
    return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]


def capabilities(archs):
    """Compute capabilities that code for these architectures runs on: 100f is the family of 100 and 103."""
    families = {"100f": ["100", "103"]}
    return [c for arch in archs for c in families.get(arch, [arch.rstrip("af")])]


def cuda_sources():
    """(source, architectures) of every .cu file. An engine's folder is compiled for its own generation only."""
    sources = []
    for folder, majors in (("cuda", None), ("sm90", ("9",)), ("sm100", ("10",))):
        archs = [a for a in cuda_archs() if majors is None or a.rstrip("af")[:-1] in majors]
        if archs:
            sources += [(source, archs) for source in sorted(Path("csrc", folder).glob("*.cu"))]
    return sources


def cuda_toolchain():
    """(nvcc, CUTLASS include folder), or None where the CUDA library is not to be built."""
    switch = os.environ.get("CUDNN_GROUPED_BUILD_CUDA", "")
    if switch == "0" or not cuda_sources():
        return None
    nvcc, cutlass = find_nvcc(), find_cutlass()
    if nvcc and cutlass:
        return nvcc, cutlass
    missing = "CUTLASS (git submodule third_party/cutlass, or nvidia-cutlass==4.2.0.0)" if nvcc else "nvcc"
    if switch == "1":
        sys.exit(f"CUDNN_GROUPED_BUILD_CUDA=1, but {missing} was not found")
    print(f"{PACKAGE}: no CUDA library, because {missing} was not found")
    return None


def find_xla_headers():
    """The typed FFI's headers, which jaxlib has (jax.ffi.include_dir()); None without jaxlib."""
    folders = [folder / "include" for folder in package_folders("jaxlib")]
    return next((p for p in folders if (p / "xla/ffi/api/ffi.h").is_file()), None)


class NinjaFile:
    """Collects objects and libraries, then writes build.ninja. Paths are relative to the repository."""

    def __init__(self):
        self.lines = ["ninja_required_version = 1.5", f"builddir = {BUILD}"]
        for rule, command in (
            ("compile", "$compiler -MMD -MF $out.d $flags -c $in -o $out"),
            ("link", "$compiler $in $flags -o $out"),
        ):
            self.lines += [f"rule {rule}", f"  command = {command}", f"  description = {rule} $out"]
            self.lines += ["  depfile = $out.d", "  deps = gcc"] if rule == "compile" else []

    def _build(self, rule, out, inputs, compiler, flags):
        paths = [str(p).replace("$", "$$").replace(" ", "$ ").replace(":", "$:") for p in [out, *inputs]]
        command = {"compiler": shlex.quote(str(compiler)), "flags": shlex.join(map(str, flags))}
        self.lines += [f"build {paths[0]}: {rule} {' '.join(paths[1:])}"]
        self.lines += [f"  {key} = {value.replace('$', '$$')}" for key, value in command.items()]
        return out

    def compile(self, source, flags, compiler=CXX, tag=""):
        out = BUILD / source.relative_to("csrc").with_suffix(f"{tag}.o")
        return self._build("compile", out, [source], compiler, flags)

    def link(self, name, inputs, flags=()):
        flags = [*LINK_FLAGS, f"-Wl,-soname,{name}", *flags]
        return self._build("link", BUILD / name, inputs, CXX, flags)

    def run(self):
        BUILD.mkdir(parents=True, exist_ok=True)
        path = BUILD / "build.ninja"
        jobs = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
        with open(BUILD / "lock", "w") as lock:  # ninja does not expect a second one in its folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            path.write_text("\n".join(self.lines) + "\n")
            if subprocess.call([sys.executable, "-m", "ninja", "-f", path, "-j", str(jobs)]):
                sys.exit(f"{PACKAGE}: compilation failed")


def write_ninja_file(version):
    """The table of libraries. Returns the ninja file, the libraries that it makes, and the build's facts."""
    ninja = NinjaFile()
    config = {"VERSION": version, "CUDA_ARCHS": {}}
    include = ["-Icsrc", f'-DCUDNN_GROUPED_VERSION="{version}"']
    cxx = [*CXX_FLAGS, *include]

    # The CPU engine's inner loops are compiled once per instruction set; the engine picks one at run time.
    kernels = Path("csrc/cpu/kernels.cc")
    sources = [s for folder in ("core", "cpu") for s in sorted(Path("csrc", folder).glob("*.cc")) if s != kernels]
    objects = [ninja.compile(s, cxx) for s in sources]
    isas = ("v2", "v3", "v4") if platform.machine() in ("x86_64", "AMD64") else ("base",)
    for isa in isas:  # oldest first: of an inline function emitted by several objects, the linker keeps the first
        march = [f"-march=x86-64-{isa}"] if isa != "base" else []
        flags = [*cxx, *march, f"-DCUDNN_GROUPED_ISA={isa}"]
        objects.append(ninja.compile(kernels, flags, tag=f".{isa}"))
    core = ninja.link("libcudnn_grouped.so", objects, ["-Wl,-z,defs"])

    torch = build_requirement("torch")
    flags = [*cxx, TORCH_TARGET, "-isystem", torch / "include"]
    objects = [ninja.compile(s, flags) for s in sorted(Path("csrc/bindings").glob("torch_*.cc"))]
    # -lstdc++ first: torch's libraries export some of its symbols too.
    torch_libs = ["-lstdc++", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    outputs = [core, ninja.link("libcudnn_grouped_torch.so", [*objects, core], [*torch_libs, "-Wl,-z,defs"])]

    pybind11 = build_requirement("pybind11")
    flags = [*cxx, "-isystem", pybind11 / "include", "-isystem", sysconfig.get_path("include")]
    python = ninja.compile(Path("csrc/bindings/python.cc"), flags)
    outputs.append(ninja.link("_C" + sysconfig.get_config_var("EXT_SUFFIX"), [python, core]))

    if headers := find_xla_headers():
        objects = [
            ninja.compile(s, [*cxx, "-isystem", headers]) for s in sorted(Path("csrc/bindings").glob("xla_*.cc"))
        ]
        outputs.append(ninja.link("libcudnn_grouped_jax.so", [*objects, core], ["-Wl,-z,defs"]))
    else:
        print(f"{PACKAGE}: no JAX library, because jaxlib was not found")

    if toolchain := cuda_toolchain():
        nvcc, cutlass = toolchain
        flags = [*NVCC_FLAGS, "-ccbin", CXX, *include, "-isystem", cutlass]
        sources = cuda_sources()
        if sm100 := next((archs for source, archs in sources if source.parent.name == "sm100"), None):
            listed = "\\,".join(capabilities(sm100))  # nvcc splits at a bare comma
            flags.append(f"-DCUDNN_GROUPED_SM100_CAPABILITIES={listed}")
        objects = [ninja.compile(s, [*flags, *gencode(archs)], nvcc, ".cu") for s, archs in sources]
        inputs = [*objects, core, find_static_cudart(nvcc)]
        outputs.append(ninja.link("libcudnn_grouped_cuda.so", inputs, ["-ldl", "-lrt", "-Wl,-z,defs"]))
        config["CUDA_ARCHS"] = {source.parent.name: archs for source, archs in cuda_sources()}
    return ninja, outputs, config


class NinjaBuild(build_ext):
    """build_ext that leaves the compiling to ninja and copies the libraries into the package."""

    def _folder(self):
        in_place = self.inplace or getattr(self, "editable_mode", False)
        return ROOT / PACKAGE if in_place else Path(self.build_lib) / PACKAGE

    def run(self):
        os.chdir(ROOT)
        ninja, outputs, config = write_ninja_file(self.distribution.get_version())
        ninja.run()
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob(f"lib{PACKAGE}*.so"), *folder.glob("_C.*.so")]:
            if old.name not in [o.name for o in outputs]:
                old.unlink()
        for library in outputs:
            copy = folder / library.name
            if not copy.exists() or copy.stat().st_mtime != library.stat().st_mtime:
                copy.unlink(missing_ok=True)  # a process that has the old one mapped keeps it
                shutil.copy2(library, copy)
        lines = [f"{name} = {value!r}" for name, value in config.items()]
        (folder / "_build_config.py").write_text("\n".join(["# Written by setup.py.", *lines, ""]))
        self._outputs = [str(folder / name) for name in [*(o.name for o in outputs), "_build_config.py"]]

    def get_outputs(self):
        return self._outputs if hasattr(self, "_outputs") else []

    def get_output_mapping(self):
        return {}


if __name__ == "__main__":
    setup(ext_modules=[Extension(f"{PACKAGE}._C", sources=[])], cmdclass={"build_ext": NinjaBuild})
