"""The contract on the shipped Hopper engine, in the simulator: the tests of test_sm100_engine.py, without what is
Blackwell's, and with what Hopper has beside it, dequantised weights and the weight gradient."""

import cases_forward as forward
import gpu_device
import pytest
import simulated_engine as simulation
import sm100_cases
import test_sm100_engine
from cases import Case
from cases_forward import WgradCase
from simulated_engine import simulated_engine
from sm100_simulator import SimulationError
from test_sm100_engine import moved, run

pytestmark = sm100_cases.needs_nvcc


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    gpu_device.patch_bounds(monkeypatch)
    monkeypatch.setattr(simulation, "ENGINE", "sm90")


SHARED = (
    "test_takes_the_place_and_gives_it_back",
    "test_a_range_a_byte_too_short_is_found",
    "test_a_range_of_a_gemm_a_byte_too_short_is_found",
    "test_pairwise",
    "test_usual_calls_and_their_neighbours",
    "test_infinities_and_nans_as_on_the_cpu",
    "test_an_infinite_prob_is_no_nan_past_n",
    "test_tanh_and_its_slope_of_small_and_large",
    "test_offsets_that_nobody_checked",
    "test_addresses_that_nobody_checked",
    "test_every_schedule_gives_the_same_bits",
    "test_every_supported_row",
    "test_operands_at_16_bytes",
)
for name in SHARED:
    globals()[name] = getattr(test_sm100_engine, name)
test_sm100_engine.adopt_all(globals(), served=lambda case: True)
