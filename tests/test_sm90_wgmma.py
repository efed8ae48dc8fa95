"""wgmma in the simulator: its layouts against the definition, and the checks that stand around it."""

import numpy as np
import pytest
import sm100_cases
from oracle_formats import BF16
from sm100_simulator import SimulationError, Simulator, compile_kernels

pytestmark = sm100_cases.needs_nvcc

CAUGHT = {
    "no_proxy_fence": {"proxy"},
    "no_wait": {"in_flight"},
    "overwritten": {"in_flight"},
    "raced": {"race", "in_flight"},
    "left_behind": {"in_flight"},
    "not_initialised": {"uninitialised"},
    "part_of_a_warp": {"divergence", "deadlock"},
}
SCHEDULES = [("immediate", 1), ("adversarial", 1), ("adversarial", 2)]


@pytest.fixture(scope="module")
def library():
    return compile_kernels(sm100_cases.KERNELS / "wgmma.cu", archs="90a")


def product(library, name, schedule, seed):
    """The simulated accumulators as a matrix, and the exact product: small integers."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-8, 9, (64, 16)).astype(np.float64) for _ in range(2))
    simulator = Simulator(schedule, seed)
    operands = [simulator.array(BF16.encode(x).astype(np.uint16)) for x in (a, b)]
    out = simulator.array(np.zeros((128, 32), np.float32))
    assert simulator.call(library, name, *operands, out) == 0
    # PTX ISA, "Register Fragments and Shared Memory Matrix Layouts": D of wgmma .m64nNk16
    thread, i = np.meshgrid(np.arange(128), np.arange(32), indexing="ij")
    rows = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
    columns = i // 4 * 8 + thread % 4 * 2 + i % 2
    d = np.full((64, 64), np.nan)
    d[rows, columns] = out.numpy()
    return d, a @ b.T


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", ["k_k", "k_rows", "rows_k", "rows_rows"])
def test_product(library, name, schedule, seed):
    d, expected = product(library, name, schedule, seed)
    assert np.array_equal(d, 2 * expected)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", CAUGHT)
def test_caught(library, name, schedule, seed):
    with pytest.raises(SimulationError) as error:
        product(library, name, schedule, seed)
    assert error.value.category in CAUGHT[name]
