"""The CUDA code compiles, and the compiled library is what was asked for. Needs nvcc, no GPU."""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import product_build
import pytest

import cudnn_grouped

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path(cudnn_grouped.__file__).parent / "libcudnn_grouped_cuda.so"


build = product_build.load()
NVCC = build.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc: no toolkit, no wheels of the extra cuda-build")
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="built without libcudnn_grouped_cuda.so")


def find_tool(name):
    """A tool of the toolkit, of the wheel nvidia-cuda-NAME, or of the PATH."""
    folders = [NVCC.parent] if NVCC else []
    folders += [bin for nvidia in build.package_folders("nvidia") for bin in sorted(nvidia.glob("cu*/bin"))]
    found = [folder / name for folder in folders if (folder / name).exists()] or [shutil.which(name)]
    if found[0] is None:
        pytest.skip(f"no {name}: neither in a toolkit nor as the wheel nvidia-cuda-{name}")
    return Path(found[0])


def cuobjdump(*options):
    environment = dict(os.environ)
    if "-sass" in options:  # needs nvdisasm, on the PATH
        environment["PATH"] = f"{find_tool('nvdisasm').parent}{os.pathsep}{environment.get('PATH', '')}"
    command = [find_tool("cuobjdump"), *options, LIBRARY]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


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
@pytest.mark.skipif(os.environ.get("CUDNN_GROUPED_BUILD_CUDA") == "0", reason="CUDNN_GROUPED_BUILD_CUDA=0")
def test_library_is_built():
    assert LIBRARY.exists(), "nvcc is here: the build should have made it"


@needs_library
def test_library_holds_the_architectures_asked_for():
    compiled = set(re.findall(r"\.(sm_\w+)\.cubin", cuobjdump("-lelf")))
    # cuobjdump names family code (100f) by its plain number.
    assert compiled == {"sm_" + arch.rstrip("f") for archs in compiled_archs().values() for arch in archs}


def resources():
    """(kernel, registers, stack, static shared memory, local memory) of every kernel, for each architecture."""
    usage = re.findall(r"Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", cuobjdump("-res-usage"))
    return [(kernel, *map(int, numbers)) for kernel, *numbers in usage]


@needs_library
def test_no_kernel_spills():
    usage = resources()
    assert usage or not {"sm90", "sm100"} & set(compiled_archs())
    # A spill counts as STACK, as does an array that the compiler could not keep in registers.
    assert [kernel for kernel, _, stack, _, local in usage if stack or local] == []


# Hopper ----------------------------------------------------------------------------------------------------------

needs_hopper = pytest.mark.skipif(
    not LIBRARY.exists() or "sm90" not in compiled_archs(), reason="built without code for compute capability 9.0"
)
WGMMA, TMA_LOAD, TMA_STORE = "HGMMA", "UTMALDG", "UTMASTG"  # their names in SASS
# Of the GEMM kernels, by a part of their mangled names: their epilogue's name, or their own.
INSTRUCTIONS = {
    "Staged": {WGMMA, TMA_LOAD, TMA_STORE},
    "Quantised": {WGMMA, TMA_LOAD, TMA_STORE},
    "QuantisedWide": {WGMMA, TMA_LOAD, TMA_STORE},
    "Direct": {WGMMA, TMA_LOAD},
    "weight_gradient_kernel": {WGMMA, TMA_LOAD},
}
LAUNCH_REGISTERS = 504 // 3  # of a thread of 384; setmaxnreg shares those of three warpgroups out
RESERVED_SHARED_BYTES = 1024  # of each block, by CUDA


def gemm_kind(kernel):
    """The key of INSTRUCTIONS, None of another kernel."""
    if not re.match(r"_ZN13cudnn_grouped4sm90.*\d(grouped_gemm|weight_gradient_kernel)", kernel):
        return None
    epilogue = re.search(r"12grouped_gemmINS0_\d+(\w+?)I", kernel)  # its template argument
    return epilogue[1] if epilogue else "weight_gradient_kernel"


@needs_hopper
def test_gemm_kernels_have_the_instructions_of_hopper():
    _, *parts = re.split(r"^\s*Function : (\S+)$", cuobjdump("-sass", "-arch", "sm_90a"), flags=re.MULTILINE)
    kernels = {name: code for name, code in zip(parts[::2], parts[1::2]) if gemm_kind(name)}
    assert {gemm_kind(name) for name in kernels} == set(INSTRUCTIONS)
    for name, code in kernels.items():
        found = {instruction for instruction in (WGMMA, TMA_LOAD, TMA_STORE) if f" {instruction}." in code}
        assert found == INSTRUCTIONS[gemm_kind(name)], name


@needs_hopper
def test_gemm_kernels_fit_a_multiprocessor():
    usage = [entry for entry in resources() if gemm_kind(entry[0])]
    assert {gemm_kind(entry[0]) for entry in usage} == set(INSTRUCTIONS)
    assert [kernel for kernel, registers, *_ in usage if registers > LAUNCH_REGISTERS] == []
    # All of their shared memory is dynamic. No cubin has its size: each kernel's is held to kSharedBytes as it compiles.
    assert [kernel for kernel, _, _, shared, _ in usage if shared > RESERVED_SHARED_BYTES] == []
    sources = {
        name: (ROOT / "csrc/sm90" / name).read_text() for name in ("mainloop.h", "grouped_gemm.h", "weight_gradient.cu")
    }
    most = int(re.search(r"kSharedBytes = (\d+);", sources.pop("mainloop.h"))[1])
    assert most + RESERVED_SHARED_BYTES <= 228 * 1024
    assert all("static_assert(kBytes <= kSharedBytes);" in text for text in sources.values())


# Blackwell -------------------------------------------------------------------------------------------------------

needs_blackwell = pytest.mark.skipif(
    not LIBRARY.exists() or "sm100" not in compiled_archs(), reason="built without code for compute capability 10.x"
)
MULTIPLY = {"UTCQMMA", "UTCOMMA", "UTCHMMA"}  # MXFP8, FP4, BF16
OF_THE_PAIR = MULTIPLY | {"UTCCP"}  # and the copy of scale factors: all in one of the two forms
MOVE = {"UTMALDG", "UTMASTG", "LDTM"}  # to and from shared memory, from tensor memory
EPILOGUE_THREADS, OTHER_THREADS = 256, 128


@cache
def blackwell_kernels():
    """[{GEMM kernel: its instructions of the tensor core, of TMA and of setmaxnreg}], one for each architecture."""
    every = []
    for arch in compiled_archs()["sm100"]:
        code = cuobjdump("-sass", "-arch", "sm_" + arch.rstrip("f"))
        _, *parts = re.split(r"^\s*Function : (\S+)$", code, flags=re.MULTILINE)
        kernels = {name: code for name, code in zip(parts[::2], parts[1::2]) if sms_of(name)}
        kept = r"\b(?:UTC[A-Z]+|UTMA[A-Z]+|LDTM|USETMAXREG)\b[^;]*"
        every.append({name: re.findall(kept, code) for name, code in kernels.items()})
    return every


def sms_of(kernel):
    """Of a tile of a GEMM kernel: 1 or 2, None of another kernel."""
    sms = re.match(r"_ZN13cudnn_grouped5sm10012grouped_gemmINS0_8Epilogue.*?ELb[01]ELi([12])E", kernel)
    return sms and int(sms[1])


@needs_blackwell
def test_gemm_kernels_have_the_instructions_of_blackwell():
    for kernels in blackwell_kernels():
        assert {sms_of(name) for name in kernels} == {1, 2}
        for name, code in kernels.items():
            forms = {}  # of an opcode: whether it is a pair's
            for instruction in code:
                opcode, *modifiers = instruction.split()[0].split(".")
                forms.setdefault(opcode, set()).add("2CTA" in modifiers)
            assert forms.keys() >= OF_THE_PAIR | MOVE, name
            pair = sms_of(name) == 2
            assert all(forms[opcode] == {pair} for opcode in OF_THE_PAIR), name
            # C is loaded for one SM in either.
            assert (True in forms["UTMALDG"]) == pair, name


@needs_blackwell
def test_blackwell_gemm_kernels_fit_a_multiprocessor():
    usage = [entry for entry in resources() if sms_of(entry[0])]
    assert [kernel for kernel, registers, *_ in usage if registers > LAUNCH_REGISTERS] == []
    assert [kernel for kernel, _, _, shared, _ in usage if shared > RESERVED_SHARED_BYTES] == []
    launch = {kernel: registers for kernel, registers, *_ in usage}
    for kernels in blackwell_kernels():
        assert kernels.keys() == launch.keys()
        for name, code in kernels.items():
            # setmaxnreg shares out what the block was launched with: an epilogue that asks for more waits for ever.
            (more,) = re.findall(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL \w+, (\w+)", "\n".join(code))
            (fewer,) = re.findall(r"USETMAXREG\.DEALLOC\.CTAPOOL (\w+)", "\n".join(code))
            shared_out = EPILOGUE_THREADS * int(more, 16) + OTHER_THREADS * int(fewer, 16)
            assert shared_out <= (EPILOGUE_THREADS + OTHER_THREADS) * launch[name], name
    # The host gives them as many stages as kSharedBytes has room for.
    engine, kernel, instantiate = (
        (ROOT / "csrc/sm100" / name).read_text() for name in ("engine.cu", "grouped_gemm.h", "instantiate.h")
    )
    assert int(re.search(r"kSharedBytes = (\d+);", kernel)[1]) + RESERVED_SHARED_BYTES <= 228 * 1024
    assert "o.stages = std::min((kSharedBytes - kStagesAt) / stage_bytes(o), int(Control::kMostStages));" in engine
    assert "dynamicSmemBytes = size_t(kStagesAt + p.operands.stages * stage_bytes(p.operands));" in instantiate
