"""What a GPU of SM90 computes in the kernels that the simulator runs too: records tests' expected values.

python record_sm90.py LIBRARY [FIXTURE]

LIBRARY: sm90_overlap.cu and sm90_memory.cu built with the CUDA runtime,
    nvcc -std=c++17 -O3 --expt-relaxed-constexpr -I<CUTLASS's headers> -gencode arch=compute_90a,code=sm_90a \
        -cudart static -Xcompiler -fPIC -shared sm90_overlap.cu sm90_memory.cu -o LIBRARY
FIXTURE: the .npz file, ../fixtures/sm90_overlap.npz if not given. Per subject: its buffers before and after.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "sm90_overlap.npz"
COUNT = 256  # words an instruction is applied to
SPECIAL = (0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x477FE000, 0x4B800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001)
SPECIAL_HALVES = (0, 1, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x3F80, 0x7F7F, 0x7F80, 0x7FC1)


@dataclass(frozen=True)
class Subject:
    """A host function of `source`: device buffers as `buffers` makes them, then `integers`."""

    source: str
    function: str
    buffers: Callable
    integers: tuple = ()
    kernel: str | None = None  # of OPERATIONs: three buffers of operands, then a row an instruction


def instructions(source: Path, kernel: str) -> list[str]:
    """The rows that a kernel of OPERATIONs writes."""
    body = source.read_text().split(f"void {kernel}(")[1].split("\n}\n")[0]
    return [line.split('"')[1] for line in body.splitlines() if line.strip().startswith("OPERATION(")]


def words(rng, special=SPECIAL) -> list[np.ndarray]:
    """Three operands: pairs of special values of either sign, numbers of moderate size, random bits."""
    signed = np.array([s | sign for s in special for sign in (0, 0x80000000)], np.uint32)
    x, y, z = (rng.integers(0, 2**32, COUNT, np.uint32) for _ in range(3))
    half = COUNT // 2
    x[:half], y[:half], z[:half] = rng.choice(signed, (3, half))
    moderate = rng.standard_normal((3, 64)) * np.exp2(rng.integers(-14, 14, (3, 64)))
    x[half : half + 64], y[half : half + 64], z[half : half + 64] = moderate.astype(np.float32).view(np.uint32)
    return [x, y, z]


def halves(rng) -> list[np.ndarray]:
    low, high = words(rng, SPECIAL_HALVES), words(rng, SPECIAL_HALVES)
    return [(a & 0x7FFF | a >> 16 & 0x8000) | (b & 0x7FFF | b >> 16 & 0x8000) << 16 for a, b in zip(low, high)]


def operation(kernel: str, operands: Callable) -> Subject:
    source = Path(__file__).with_name("sm90_overlap.cu")

    def buffers(rng):
        return [*operands(rng), np.zeros((len(instructions(source, kernel)), COUNT), np.uint32)]

    return Subject("sm90_overlap", f"run_{kernel}", buffers, (COUNT,), kernel)


def matrices(rng):
    return [rng.integers(0, 2**32, 128, np.uint32), np.zeros((32, 16), np.uint32)]


def atomics(rng):
    """Cells of the 12 atomics: a thread's own, then the common ones; those of floats start at zero."""
    own = rng.integers(0, 2**64, (12, 64), np.uint64)
    common = rng.integers(0, 2**64, 12, np.uint64)
    own[10:], common[10:] = 0, 0
    operands = rng.integers(0, 2**32, 128, np.uint32)
    # Compare-and-swap is on the first atomic's cells, after its addition: sixteen succeed.
    operands[64:80] = own[0, :16].astype(np.uint32) + operands[:16]
    return [np.concatenate([own.ravel(), common]), operands, np.zeros(13 * 128, np.uint32)]


def loads(_):
    """Every element is its own number, so that a wrong place shows."""
    narrow = np.arange(1, 24 * 56 + 1, dtype=np.uint16)
    wide = np.arange(1, 24 * 10 * 6 + 1, dtype=np.float32)
    return [narrow, wide, np.zeros((2, 18 * 512 + 256), np.uint32)]


def stores(rng):
    targets = rng.integers(0, 2**32, (8, 240), np.uint32)
    targets[7] = (rng.integers(-512, 512, 240) / 8).astype(np.float32).view(np.uint32)
    return [targets, rng.integers(0, 2**32, 128, np.uint32)]


def bulk(rng):
    return [rng.integers(0, 2**32, 192, np.uint32), rng.integers(0, 2**32, (2, 6, 64), np.uint32)]


SUBJECTS = {
    "integers": operation("integers", words),
    "floats": operation("floats", words),
    "halves": operation("halves", halves),
    "lanes": operation("lanes", words),
    "matrices": Subject("sm90_memory", "run_matrices", matrices),
    "atomics_shared": Subject("sm90_memory", "run_atomics", atomics, (1,)),
    "atomics_global": Subject("sm90_memory", "run_atomics", atomics, (0,)),
    "loads": Subject("sm90_memory", "run_loads", loads),
    "stores": Subject("sm90_memory", "run_stores", stores),
    "bulk": Subject("sm90_memory", "run_bulk", bulk),
}


def differences(name: str, recorded: dict, buffer: int, got: np.ndarray) -> list[str]:
    """The first twenty elements of a buffer that are not as recorded."""
    subject = SUBJECTS[name]
    x, y, z = (recorded.get(f"{name}.{i}.before") for i in range(3))
    expected = recorded.get(f"{name}.{buffer}.after", recorded[f"{name}.{buffer}.before"])
    bits = np.dtype(f"u{got.itemsize}")
    got, expected = got.view(bits), expected.view(bits)
    lines = []
    for at in map(tuple, np.argwhere(got != expected)[:20].tolist()):
        where = f"buffer {buffer}, {at}"
        if subject.kernel and buffer == 3:
            text = instructions(Path(__file__).with_name(f"{subject.source}.cu"), subject.kernel)[at[0]]
            where = f"{text} of {x[at[1]]:#x}, {y[at[1]]:#x}, {z[at[1]]:#x} (thread {at[1]})"
        lines.append(f"{where}: {got[at]:#x}, on a GPU {expected[at]:#x}")
    return lines


def record(library: ctypes.CDLL) -> dict[str, np.ndarray]:
    import torch

    recorded = {}
    for name, subject in SUBJECTS.items():
        before = subject.buffers(np.random.default_rng(len(name)))
        device = [torch.from_numpy(x.view(np.uint8).copy()).cuda() for x in before]
        torch.cuda.synchronize()
        status = getattr(library, subject.function)(
            *(ctypes.c_void_p(x.data_ptr()) for x in device), *(ctypes.c_int(i) for i in subject.integers)
        )
        torch.cuda.synchronize()
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")
        for i, (x, y) in enumerate(zip(before, device)):
            after = y.cpu().numpy().view(x.dtype).reshape(x.shape)
            recorded[f"{name}.{i}.before"] = x
            if not np.array_equal(x.view(np.uint8), after.view(np.uint8)):
                recorded[f"{name}.{i}.after"] = after
    return recorded


def main() -> None:
    fixture = Path(sys.argv[2]) if len(sys.argv) > 2 else FIXTURE
    fixture.parent.mkdir(exist_ok=True)
    np.savez_compressed(fixture, **record(ctypes.CDLL(sys.argv[1])))
    print(f"{fixture}: {fixture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
