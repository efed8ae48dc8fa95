"""Problems of the simulator's test kernels: the small GEMM, and tiles of tcgen05.mma laid out from the definitions.

Of the simulator only its calls are known here.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import sm100_simulator
from oracle_formats import BF16, E4M3, Format, decode_e8m0, pack_fp4, pack_scales
from sm100_simulator import compile_kernels

KERNELS = Path(__file__).resolve().parent / "sm100_simulator" / "kernels"
E2M3 = Format("e2m3", 2, 3, 1, "none")
E3M2 = Format("e3m2", 3, 2, 3, "none")
BLOCK = 32
needs_nvcc = pytest.mark.skipif(
    sm100_simulator.nvcc() is None, reason="no nvcc: no toolkit, no wheels of the extra cuda-build"
)


def run(simulator, library, function: str, *arguments) -> None:
    """Calls a host function that returns a CUDA error."""
    status = simulator.call(library, function, *arguments)
    assert status == 0, f"{function}: CUDA error {status}"


def read(array) -> np.ndarray:
    """A copy of device memory."""
    return np.array(array.numpy())


# The small GEMM ---------------------------------------------------------------------------------------------------


@dataclass
class SmallGemm:
    """Operands so coarse that every sum is exact in FP32 whatever its order: results are compared for equality."""

    m: int = 512
    n: int = 384
    k: int = 256
    clusters: int = 2
    seed: int = 0
    inputs: dict = field(init=False)
    expected: dict = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)

        def operand(rows):
            codes = E4M3.encode(rng.integers(-2, 3, (rows, self.k)))
            scales = rng.integers(127, 129, (rows, self.k // BLOCK)).astype(np.uint8)
            return codes, scales, E4M3.decode(codes) * np.repeat(decode_e8m0(scales), BLOCK, axis=1)

        a, scale_a, value_a = operand(self.m)
        b, scale_b, value_b = operand(self.n)
        weight = rng.integers(-1, 2, self.n).astype(np.float32)
        out = value_a @ value_b.T
        assert (np.abs(out) @ np.abs(weight)).sum() < 2**24
        tiles = np.abs(out).reshape(self.m // 256, 256, self.n // 128, 128)
        self.inputs = {
            "a": a,
            "b": b,
            "scale_a": pack_scales(scale_a),
            "scale_b": pack_scales(scale_b),
            "weight": weight,
        }
        self.expected = {
            "out": BF16.round(out),
            "dot": out @ weight.astype(np.float64),
            "sum": (out @ weight.astype(np.float64)).sum(keepdims=True),
            "peak": tiles.max(axis=(1, 3)).ravel(),
        }

    def mismatches(self, simulator, library, function: str = "run_small_gemm") -> int:
        """Runs the kernel: how many results differ."""
        x = {name: simulator.array(value) for name, value in self.inputs.items()}
        # The output starts as NaN, so that what is not stored differs.
        out = simulator.array(np.full((self.m, self.n), 0xFFFF, np.uint16))
        dot = simulator.array(np.zeros(self.m, np.float32))
        total = simulator.array(np.zeros(1, np.float32))
        peak = simulator.array(np.zeros(self.expected["peak"].size, np.uint32))
        operands = (x["a"], x["b"], x["scale_a"], x["scale_b"], out, x["weight"], dot, total, peak)
        run(simulator, library, function, *operands, self.m, self.n, self.k, self.clusters)
        got = {"out": BF16.decode(read(out)), "dot": read(dot), "sum": read(total), "peak": read(peak).view(np.float32)}
        return sum(int((got[name] != self.expected[name]).sum()) for name in got)


# Tiles of tcgen05.mma ---------------------------------------------------------------------------------------------

SWIZZLES = {0: 0, 32: 6, 64: 4, 128: 2}  # span in bytes: field of the matrix descriptor
STEP_BYTES = 32  # of K, in every kind
IMAGE, SCALES = 32768, 4096  # bytes of the kernel's buffers


class Step(ctypes.Structure):
    """instructions.cu's."""

    _fields_ = [
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
        ("instruction", ctypes.c_uint32),
        ("scale_a", ctypes.c_int),
        ("scale_b", ctypes.c_int),
        ("accumulate", ctypes.c_int),
    ]


def swizzled(offsets: np.ndarray, span: int) -> np.ndarray:
    """16-byte units of `span` bytes, exchanged by the number of the row of 128 bytes within eight."""
    return offsets ^ ((offsets >> 7 & (span // 16 - 1)) << 4 if span else 0)


def matrix_descriptor(start: int, leading: int, stride: int, span: int) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | SWIZZLES[span] << 61


def k_major(data: np.ndarray, span: int) -> tuple[np.ndarray, list[int]]:
    """(rows, bytes along K) -> image of shared memory, descriptor of each step along K."""
    rows, depth = data.shape
    row, byte = np.arange(rows)[:, None], np.arange(depth)[None, :]
    steps = range(0, depth, STEP_BYTES)
    image = np.zeros(IMAGE, np.uint8)
    if span == 0:  # core matrices of 8 rows x 16 bytes
        leading, stride = rows // 8 * 128, 128
        image[byte // 16 * leading + row // 8 * stride + row % 8 * 16 + byte % 16] = data
        return image, [matrix_descriptor(b // 16 * leading, leading, stride, span) for b in steps]
    column = rows * span  # bytes of an atom's width of K
    image[swizzled(byte // span * column + row * span + byte % span, span)] = data
    return image, [matrix_descriptor(b // span * column + b % span, 16, 8 * span, span) for b in steps]


def mn_major(data: np.ndarray, span: int) -> tuple[np.ndarray, list[int]]:
    """(rows, K, bytes of an element) -> image of shared memory, descriptor of each step along K."""
    rows, depth, size = data.shape
    byte = (np.arange(rows)[:, None] * size + np.arange(size)[None, :])[:, None, :]
    k = np.arange(depth)[None, :, None]
    step = STEP_BYTES // size
    image = np.zeros(IMAGE, np.uint8)
    if span == 0:  # core matrices of 16 bytes of M or N x 8 of K
        leading, stride = rows * size // 16 * 128, 128
        image[k // 8 * leading + byte // 16 * stride + k % 8 * 16 + byte % 16] = data
        return image, [matrix_descriptor(i // 8 * leading, leading, stride, span) for i in range(0, depth, step)]
    stride = 8 * span  # atoms along K follow each other, then those along M or N
    leading = depth // 8 * stride
    image[swizzled(byte // span * leading + k // 8 * stride + k % 8 * span + byte % span, span)] = data
    return image, [matrix_descriptor(i // 8 * stride, leading, stride, span) for i in range(0, depth, step)]


def packed(codes: np.ndarray, bits: int, padded: bool) -> np.ndarray:
    """Codes along the last axis as bytes. `padded`: 16 elements narrower than a byte take 16 bytes all the same."""
    if bits == 16:
        return np.ascontiguousarray(codes.astype("<u2")).view(np.uint8)
    if bits == 8:
        return codes.astype(np.uint8)
    if not padded:
        return pack_fp4(codes)
    rows = codes.shape[0]
    stream = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    units = np.packbits(stream.reshape(rows, -1, 16 * bits), axis=-1, bitorder="little")
    return np.pad(units, ((0, 0), (0, 0), (0, 16 - 2 * bits))).reshape(rows, -1)


def scale_image(scales: np.ndarray) -> tuple[np.ndarray, int]:
    """(rows, blocks) -> atoms of 128 rows x 4 blocks, those of the same blocks together; how many rows of atoms."""
    rows = -(-scales.shape[0] // 128) * 128
    scales = np.pad(scales, ((0, rows - scales.shape[0]), (0, 0)))
    atoms = pack_scales(scales).reshape(rows // 128, -1, 512).transpose(1, 0, 2)
    image = np.zeros(SCALES, np.uint8)
    image[: atoms.size] = atoms.ravel()
    return image, rows // 128


def libraries(archs: str = "100a") -> Callable[[str], Path]:
    """Compiles kernels/NAME.cu when NAME is first asked for."""
    return functools.cache(lambda name: compile_kernels(KERNELS / f"{name}.cu", archs=archs))


def shipped_quantiser() -> Path:
    """csrc/cuda's quantiser and dequantiser behind C functions."""
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    sources = [KERNELS / "shipped_quantize.cu", csrc / "cuda" / "quantize.cu", csrc / "cuda" / "dequantize.cu"]
    return compile_kernels(sources, include=[csrc])


def shipped_tanh() -> Path:
    """csrc/core's tanh, of single values and of csrc/sm100's pairs, behind a C function."""
    return compile_kernels(KERNELS / "shipped_tanh.cu", include=[Path(__file__).resolve().parent.parent / "csrc"])
