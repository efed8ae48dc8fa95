"""The simulator gives the results of kernels that CUTLASS's collective builder makes, which are right on hardware."""

import ctypes

import numpy as np
import pytest
import sm100_cases
from oracle_formats import BF16, E2M1, E4M3, decode_scale, pack_fp4, pack_scales
from sm100_simulator import Simulator

pytestmark = [pytest.mark.slow, sm100_cases.needs_nvcc]

SCHEDULES = ["immediate", *range(5)]


def simulator_for(schedule) -> Simulator:
    """CUTLASS's epilogues use what they load from tensor memory without a wait, which the assembler's tracking of
    registers makes right, and it initialises a barrier after the fence that should publish it."""
    options = {"sms": 4, "allow": ("unwaited_loads", "relaxed_release")}
    if schedule == "immediate":
        return Simulator(schedule="immediate", **options)
    return Simulator(schedule="adversarial", seed=schedule, **options)


@pytest.fixture(scope="module")
def library():
    """One library a source, compiled when first asked for: most of a minute each."""
    return sm100_cases.libraries()


class Operand:
    """Coarse values, so that sums are exact in FP32 in any order: codes, scales, and what they mean."""

    def __init__(self, rng, rows: int, depth: int, kind: str):
        data_format, scale_format, block = {"mxfp8": (E4M3, "e8m0", 32), "nvfp4": (E2M1, "e4m3", 16)}[kind]
        codes = data_format.encode(rng.integers(-2, 3, (rows, depth)))
        one = 127 if scale_format == "e8m0" else int(E4M3.encode(1.0))
        step = 1 if scale_format == "e8m0" else 8  # doubles the scale
        scales = (one + step * rng.integers(0, 2, (rows, depth // block))).astype(np.uint8)
        self.data = codes if data_format is E4M3 else pack_fp4(codes)
        self.scales = pack_scales(scales)
        self.value = data_format.decode(codes) * np.repeat(decode_scale(scales, scale_format), block, axis=1)


def pointers(arrays):
    return (ctypes.c_void_p * len(arrays))(*(array.pointer for array in arrays))


# Ragged M: whole tiles, a tile and a part, a part, nothing.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind, k", [("mxfp8", 384), ("nvfp4", 512)])
def test_grouped(library, kind, k, schedule):
    rows, n = [256, 300, 0, 129], 256
    rng = np.random.default_rng(3)
    simulator = simulator_for(schedule)
    a, b, c, expected = [], [], [], []
    for m in rows:
        # A group without rows still needs addresses.
        a.append(Operand(rng, max(m, 1), k, kind))
        b.append(Operand(rng, n, k, kind))
        c.append(rng.integers(-8, 9, (max(m, 1), n)).astype(np.float64))
        expected.append(BF16.round(a[-1].value @ b[-1].value.T + c[-1])[:m])
    d = [simulator.array(np.full((max(m, 1), n), 0xFFFF, np.uint16)) for m in rows]
    operands = [
        [simulator.array(x.data) for x in a],
        [simulator.array(x.data) for x in b],
        [simulator.array(x.scales) for x in a],
        [simulator.array(x.scales) for x in b],
        [simulator.array(BF16.encode(x)) for x in c],
        d,
    ]
    extents = (ctypes.c_int * len(rows))(*rows)
    function = f"run_grouped_{kind}"
    lists = [pointers(arrays) for arrays in operands]
    sm100_cases.run(simulator, library(f"cutlass_grouped_{kind}"), function, len(rows), extents, n, k, *lists, 4)
    mismatches = [int((BF16.decode(sm100_cases.read(x))[:m] != y).sum()) for x, y, m in zip(d, expected, rows)]
    assert mismatches == [0] * len(rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bf16(library, schedule):
    m, n, k = 520, 392, 200  # no multiples of the tile
    rng = np.random.default_rng(4)
    simulator = simulator_for(schedule)
    a, b, c = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((m, k), (n, k), (m, n)))
    d = simulator.array(np.full((m, n), 0xFFFF, np.uint16))
    operands = [simulator.array(BF16.encode(x)) for x in (a, b, c)]
    sm100_cases.run(simulator, library("cutlass_bf16"), "run_bf16", m, n, k, *operands, d, 4)
    assert (BF16.decode(sm100_cases.read(d)) != BF16.round(a @ b.T + c)).sum() == 0
