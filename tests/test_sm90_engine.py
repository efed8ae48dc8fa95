"""The contract on the shipped Hopper engine, in the simulator: the tests of test_sm100_engine.py but those of what is
Blackwell's alone, and those of what Hopper has beside it: dequantised weights and the weight gradient."""

import cases
import cases_forward as forward
import gpu_device
import pytest
import simulated_engine as simulation
import sm100_cases
import test_dsrelu
import test_sm100_engine
import test_wgrad
import torch
from cases import Case, raw
from cases_forward import DactCase, WgradCase
from simulated_engine import simulated_engine
from sm100_simulator import SimulationError
from test_sm100_engine import moved, run  # noqa: F401 (a fixture)

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
test_sm100_engine.adopt_all(globals(), lambda case: True, (*test_sm100_engine.MODULES, test_wgrad))


# What it has beside Blackwell: boxes for a saved C, dequantised weights, the weight gradient --------------------------

ROWS = {"a_major": "rows", "b_major": "rows"}
BESIDE = [
    forward.Case("srelu", n=272, k=160),  # C is saved through boxes
    forward.Case("glu", n=576, k=160, bias="f32"),
    Case("dsrelu", dequantized=True, n=96, k=160, d="e4m3", dbias=True, weights="list_k"),
    Case("dglu", dequantized=True, n=288, ab="fp4", sf="e4m3", vec=16, weights="ptrs_k"),
    forward.Case("glu", dequantized=True, n=320, d="e5m2", bias="f32"),
    forward.Case("mm", dequantized=True, weights="list_k"),
    WgradCase((256, 768, 768), 1024, vec=16, m=144, n=272, **ROWS),
    WgradCase((0, 512, 768), 1024, vec=16, m=144, n=208, b_major="rows", d="f32", form="accumulate"),
    WgradCase((256, 768), ab="e4m3", m=144, n=208, **ROWS, poison=True),
    WgradCase((256, 768), ab="e5m2", m=80, n=400, a_major="rows", d="fp16", form="out"),
    WgradCase((512, 768), 1024, ab="fp4", sf="e4m3", vec=16, m=144, n=208, scales="a", form="accumulate"),
    WgradCase((512, 768), ab="fp4", vec=16, m=32, n=96, discrete=False, scales="none"),
]


@pytest.mark.parametrize(("schedule", "seed"), [("immediate", 1), ("adversarial", 1), ("adversarial", 2)])
@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_beside_what_blackwell_has(case, schedule, seed):
    with simulated_engine(schedule, seed):
        run(case)


@pytest.mark.parametrize("name", ["a", "sfa", "b", "sfb", "padded_offsets", "global_scale_a", "global_scale_b", "out"])
def test_a_range_of_a_weight_gradient_a_byte_too_short_is_found(name):
    with pytest.raises(SimulationError) as error, simulated_engine(shorten=name):
        run(WgradCase((256, 512), ab="e4m3", m=128, n=128))
    assert error.value.category == "out_of_bounds"


# K spans more than the ring of stages: the consumers' turns matter.
DEEP = [Case("dsrelu", n=528, k=448, d="e4m3", dbias=True), Case("dglu", n=416, k=448, dbias=True)]


@pytest.mark.parametrize("case", DEEP, ids=str)
def test_results_do_not_depend_on_the_number_of_blocks(case):
    built, results = cases.build(case), []
    for sms in (1, 2, 3, 7):
        with simulated_engine(sms=sms):
            results.append(cases.call(built)[0])
    for name, tensor in results[0].items():
        assert all(torch.equal(raw(tensor), raw(other[name])) for other in results[1:]), name


# More tiles of rows than a group has; where D is BF16, and in the weight gradient, every second group goes backwards.
TALL = [
    Case("dsrelu", offsets=(1792,), m=2048, n=400, k=64, dbias=True),
    Case("dglu", offsets=(1280,), m=1280, n=288, k=64, d="e4m3"),
    WgradCase((256,), 512, vec=16, m=1680, n=400, **ROWS),
]


@pytest.mark.parametrize("case", TALL, ids=str)
def test_groups_of_tiles(case):
    with simulated_engine():
        run(case)


# `finish` loads eight slots at once: here are more of dprob, and more of dbias a warp, in whole rounds and not.
SLOTS = [
    DactCase((256, 256, 4864), 5120, n=32, options={"act_func": "identity"}),
    DactCase((4096,), 4096, n=32, options={"act_func": "dsrelu"}),
    DactCase(n=1088, options={"act_func": "dsrelu"}),
    DactCase(n=576),
]


@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_more_slots_than_are_loaded_at_once(case):
    with simulated_engine():
        run(forward.exact(case))


# The last tile of a row of tiles has 64, 128 or 192 columns, or a part of them.
BF16 = {"k": 96, "ab": "bf16"}
PLAIN = {**BF16, "c": "f32", "d": "f32"}
FP8 = {"k": 96, "d": "e4m3"}
LAST = [
    *(Case("dglu", n=n, **BF16, weights=b) for n in (64, 128, 192, 256) for b in ("list_k", "list_n")),
    *(Case("dsrelu", n=n, **BF16, weights=b, dbias=True) for n in (72, 136, 200, 272) for b in ("dense_k", "dense_n")),
    *(forward.Case("glu", n=n, **BF16, weights=b) for n in (192, 256, 320) for b in ("dense_k", "dense_n")),
    *(Case("dsrelu", n=n, **PLAIN, weights=b, dbias=True) for n in (72, 136) for b in ("dense_k", "dense_n")),
    *(forward.Case("mm", n=n, **PLAIN, weights=b) for n, b in ((68, "list_k"), (132, "list_k"), (136, "list_n"))),
    *(Case("dsrelu", n=n, **FP8, dbias=True) for n in (48, 96, 112, 144, 160, 176, 192, 240)),
    *(Case("dsrelu", n=n, k=96, c="f32", d="e5m2", dbias=True) for n in (48, 176)),
    *(Case("dglu", n=n, **FP8, dbias=True) for n in (160, 192)),
    *(forward.Case(op, n=n, **FP8) for op, n in (("srelu", 112), ("srelu", 176), ("glu", 128), ("glu", 192))),
    *(WgradCase(m=144, n=n, a_major=a, b_major="rows") for n in (64, 136, 200, 264) for a in ("tokens", "rows")),
    *(WgradCase(m=144, n=n, a_major=a) for n in (65, 80, 129, 193) for a in ("tokens", "rows")),
]


@pytest.mark.parametrize("case", LAST, ids=str)
def test_columns_of_the_last_tile(case):
    with simulated_engine(sms=3):
        run(case)


# E4M3 D in tiles of 192 columns: squared ReLU, and gated activations where K is beyond 2048.
DEEP_GATED = {"offsets": (256,), "k": 2112, "d": "e4m3"}
WIDE = [
    *(Case("dsrelu", n=n, **FP8, dbias=n % 32 == 16) for n in (144, 160, 176, 192, 272, 304, 336, 384, 560)),
    *(Case("dsrelu", n=n, **FP8, norm=3.0, options={"c_role": "preactivation"}) for n in (176, 336)),
    Case("dsrelu", (0, 768, 768, 1536), 1792, n=1136, **FP8, discrete_col_sfd=True, poison=True),
    *(Case("dglu", n=n, **DEEP_GATED, dbias=dbias) for n in (160, 192, 288) for dbias in (False, True)),
    *(Case("dglu", n=320, **DEEP_GATED, dbias=b, options={"act_func": "dgeglu"}) for b in (False, True)),
    Case("dglu", n=544, **DEEP_GATED, weights="list_k", dbias=True, norm=3.0),
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_tiles(case):
    with simulated_engine("adversarial", sms=3) as simulator:
        run(case)
    assert any("QuantisedWide" in name for name in simulator.report())


def test_documented_slots_of_dprob_are_not_of_wide_tiles():
    with simulated_engine() as simulator:
        test_dsrelu.test_workspaces(320, 256, 1, "e4m3", False)
    assert not any("QuantisedWide" in name for name in simulator.report())


def test_wide_tiles_are_for_columns_that_fill_them():
    for case in (Case("dsrelu", n=240, **FP8), Case("dglu", n=192, **FP8), Case("dglu", n=256, **DEEP_GATED)):
        with simulated_engine() as simulator:
            run(case)
        assert not any("QuantisedWide" in name for name in simulator.report())
