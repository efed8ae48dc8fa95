"""dglu and dglu_out against the oracle: every option pair, exact and random data; then single points of the contract."""

import itertools
from dataclasses import replace

import cases
import numpy as np
import oracle
import oracle_formats as formats
import pytest
import torch
from cases import FP4, Case, operator
from pairwise import pairwise

ACTIVATIONS = [
    {"act_func": "dswiglu"},
    {"act_func": "dgeglu"},
    {
        "act_func": "dgeglu",
        "geglu_alpha": 1.0,
        "linear_offset": 0.0,
        "glu_clamp_max": 5.05,  # not a BF16 number, nor an FP32 one
        "glu_clamp_min": -3.0,
    },
    {"act_func": "dsituglu"},
    {"act_func": "dsituglu", "situ_beta1": 0.7, "situ_beta2": 3.0},
    {"act_func": "dgeglu", "clamp_grad": "value"},
]

OPTIONS = {
    "operands": [(ab, sf, vec) for ab in FP4 for sf, vec in (("e4m3", 16), ("e8m0", 16), ("e8m0", 32))]
    + [("e4m3", "e8m0", 32), ("e5m2", "e8m0", 32), ("bf16", None, 16)],
    "offsets": [((256, 512), None), ((0, 256, 256, 768, 768), 1024), ((256,), None), ((512, 768), 1280)],
    "n": [32, 64, 96, 160, 288],
    "k": [32, 64, 96, 160, 544],  # beyond one and two slices of K of the CPU engine (256)
    "c": ["f32", "fp16", "bf16", "e4m3", "e5m2"],
    "d": ["bf16", "fp16", "f32", "e4m3", "e5m2"],
    "weights": ["dense_k", "dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"],
    "sf_form": ["view", "physical", "flat"],
    "rank": [2, 3],
    "dbias": [False, True],
    "discrete_col_sfd": [False, True],
    "norm": [0.01, 1.0, 3.0, 448.0],
    "form": ["functional", "out"],
    "poison": [False, True],
    "activation": ACTIVATIONS,
    "epilogue_op": [None, "identity", "relu", "srelu"],
    "schedule": [
        {},
        {"deterministic": True, "mma_tiler_mn": [128, 256]},
        {"vector_f32": True, "cluster_shape_mn": [2, 4]},
        {"use_dynamic_sched": True, "deterministic": False},
    ],
}


def allowed(row: dict) -> bool:
    ab, bf16 = row["operands"][0], row["operands"][0] == "bf16"
    if ab in FP4 and (row["weights"].endswith("_n") or row["d"] in cases.FP8):
        return False
    if row["schedule"].get("vector_f32") and row["c"] in cases.FP8:
        return False
    if bf16:
        if row["c"] in cases.FP8 or row["d"] in cases.FP8 or row["epilogue_op"] in ("relu", "srelu"):
            return False
        if row["activation"]["act_func"] == "dsituglu" or row["sf_form"] != "view":
            return False
    elif "clamp_grad" in row["activation"]:
        return False
    return row["d"] in cases.FP8 or not row["discrete_col_sfd"]


def case_of(row: dict, seed: int = 0) -> Case:
    row = dict(row)
    ab, sf, vec = row.pop("operands")
    offsets, m = row.pop("offsets")
    options = {**row.pop("activation"), **row.pop("schedule")}
    epilogue_op = row.pop("epilogue_op")
    if epilogue_op:
        options["epilogue_op"] = epilogue_op
    return Case("dglu", offsets, m, ab=ab, sf=sf or "e8m0", vec=vec, options=options, seed=seed, **row)


PAIRS = [case_of(row, seed) for seed, row in enumerate(pairwise(OPTIONS, allowed))]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_random(case):
    cases.run(case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_exact(case):
    """Every bit of D, scales, dbias and amax; the activations saturate or sit at zero, where FP32 is exact."""
    cases.run(cases.exact(case))


@pytest.mark.slow
@pytest.mark.parametrize("ab", OPTIONS["operands"], ids=str)
@pytest.mark.parametrize("d", OPTIONS["d"])
@pytest.mark.parametrize("weights", OPTIONS["weights"])
def test_full_product(ab, d, weights):
    for c, activation in itertools.product(OPTIONS["c"], ACTIVATIONS):
        row = {name: values[0] for name, values in OPTIONS.items()}
        row.update(operands=ab, c=c, d=d, weights=weights, activation=activation, n=96, k=96, dbias=True)
        if not allowed(row):
            continue
        for discrete, form in ((False, "out"), (d in cases.FP8, "functional")):
            case = case_of({**row, "discrete_col_sfd": discrete, "form": form})
            cases.run(case)
            cases.run(cases.exact(case))


# Sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [32, 96, 160, 288, 544])
@pytest.mark.parametrize("k", [16, 48, 144, 272])
def test_fp8_sizes(n, k):
    cases.run(cases.exact(Case("dglu", (256,), n=n, k=k, d="e4m3", dbias=True)))


@pytest.mark.parametrize("n", [32, 160])
@pytest.mark.parametrize("k", [32, 96, 224])
@pytest.mark.parametrize(("sf", "vec"), [("e4m3", 16), ("e8m0", 32)])
def test_fp4_sizes(n, k, sf, vec):
    cases.run(cases.exact(Case("dglu", (256,), n=n, k=k, ab="fp4", sf=sf, vec=vec, dbias=True)))


@pytest.mark.parametrize("n", [32, 96])
@pytest.mark.parametrize("k", [8, 24, 200, 264])
def test_bf16_sizes(n, k):
    cases.run(cases.exact(Case("dglu", (256,), n=n, k=k, ab="bf16", dbias=True)))


@pytest.mark.parametrize(
    "offsets", [(256,) * 3, (0, 0, 512), (512, 512, 512), (0, 256, 256, 512, 512), (1024,)], ids=str
)
def test_offsets(offsets):
    for ab, d in (("e4m3", "bf16"), ("e4m3", "e4m3"), ("bf16", "f32")):
        m = offsets[-1] + 256
        case = Case("dglu", offsets, m, ab=ab, d=d, dbias=True, poison=True, discrete_col_sfd=d == "e4m3")
        cases.run(case)


# Formulas, one decision each ----------------------------------------------------------------------------------


def outputs_of(built: cases.Built, **keywords) -> dict:
    values = operator("dglu")(*built.positional, **{**built.keywords, "d_dtype": torch.float32, **keywords})
    return dict(zip(cases.OUTPUTS, values, strict=True))


@pytest.mark.parametrize("ab", ["e4m3", "bf16"])
@pytest.mark.parametrize("act", ["dswiglu", "dgeglu"])
def test_alpha_is_squared(ab, act):
    """Doubling alpha quadruples D and dprob; its sign does not matter."""
    built = cases.build(Case("dglu", ab=ab, d="f32", options={"act_func": act}))
    built.positional[4].copy_(torch.tensor([0.75, -1.25]))
    first = outputs_of(built)
    built.positional[4].mul_(-2)
    second = outputs_of(built)
    assert torch.equal(first["d_row"] * 4, second["d_row"])
    assert torch.equal(first["dprob"] * 4, second["dprob"])
    assert first["d_row"].any()


@pytest.mark.parametrize(
    ("ab", "act", "used"),
    [
        ("bf16", "dswiglu", True),
        ("bf16", "dgeglu", True),
        ("e4m3", "dswiglu", True),
        ("e4m3", "dsituglu", True),
        ("e4m3", "dgeglu", False),
        ("fp4", "dgeglu", False),
        ("fp4", "dswiglu", True),
    ],
)
def test_where_beta_acts(ab, act, used):
    case = Case("dglu", ab=ab, d="f32", options={"act_func": act})
    built = cases.build(case)
    with_beta = outputs_of(built)
    built.positional[5].fill_(1.0)
    without = outputs_of(built)
    assert torch.equal(with_beta["d_row"], without["d_row"]) != used
    if not used:
        built.positional[5].fill_(torch.nan)
        assert torch.equal(outputs_of(built)["d_row"], without["d_row"])


def test_prob_is_in_d_and_not_in_dprob():
    built = cases.build(Case("dglu", d="f32", dbias=True))
    built.positional[6].fill_(1.0)
    one = outputs_of(built, generate_dbias=True)
    built.positional[6].fill_(-2.0)
    two = outputs_of(built, generate_dbias=True)
    built.positional[6].zero_()
    none = outputs_of(built, generate_dbias=True)
    assert torch.equal(one["d_row"] * -2, two["d_row"])
    assert torch.equal(one["dbias"] * -2, two["dbias"])
    assert torch.equal(one["dprob"], two["dprob"])
    assert torch.equal(one["dprob"], none["dprob"])
    assert not none["d_row"].any()
    assert one["dprob"].any()


def test_gate_comes_first():
    """A large gate and a zero up: dgate = 0 and dup = R p gate; swapped columns would show it."""
    case = cases.exact(Case("dglu", (256,), n=64, c="f32", d="f32"))
    built = cases.build(case)
    x = np.zeros((256, 128))
    x[:, oracle.gate_columns(64)] = 64.0
    beta = float(built.positional[5][0])
    built.positional[2].copy_(torch.from_numpy(x / beta).unsqueeze(-1))
    built.problem.c[:] = x / beta
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    d = outputs["d_row"][..., 0].reshape(256, 2, 2, 32)
    assert not d[:, :, 0].any()
    assert d[:, :, 1].any()


def test_amax_slots_are_gate_and_up():
    case = Case("dglu", (256,), n=64, c="f32", d="bf16")
    outputs = cases.run(case)
    d = outputs["d_row"][..., 0].float().reshape(256, 2, 2, 32).abs()
    for slot in (0, 1):
        assert abs(outputs["amax"][0, slot, 0] - d[:, :, slot].max()) <= 2.0**-8 * d.max()


@pytest.mark.parametrize("ab", ["e4m3", "bf16"])
def test_clamp_masks_at_the_bounds(ab):
    """Kept at equality, gone one ulp beyond; the gate has no lower clamp; bounds are compared as FP32."""
    top, bottom = np.float32(7.01), np.float32(-6.99)
    up = np.float32(np.inf)
    ups = [
        bottom,
        np.nextafter(bottom, -up),
        np.nextafter(bottom, up),
        top,
        np.nextafter(top, up),
        np.nextafter(top, -up),
    ]
    gates = [top, np.nextafter(top, up), np.nextafter(top, -up), -20.0, 0.5, 30.0]
    case = Case(
        "dglu",
        (256,),
        n=64,
        ab=ab,
        c="f32",
        d="f32",
        options={"act_func": "dgeglu", "glu_clamp_max": 7.01, "glu_clamp_min": -6.99},
    )
    built = cases.build(case)
    rng = np.random.default_rng(0)
    x = rng.choice(np.array(ups, np.float32), (256, 128))
    x[:, oracle.gate_columns(64)] = rng.choice(np.array(gates, np.float32), (256, 64))
    built.positional[5].fill_(1.0)
    built.positional[2].copy_(torch.from_numpy(x).unsqueeze(-1))
    built.problem.beta[:] = 1.0
    built.problem.c = x.astype(np.float64)
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    d = outputs["d_row"][..., 0].numpy()
    columns = oracle.gate_columns(64)
    live = np.repeat((built.problem.a != 0).any(1)[:, None], 64, 1) & (built.problem.prob != 0)[:, None]
    assert not d[:, columns][x[:, columns] > top].any()
    assert not d[:, columns + 32][(x[:, columns + 32] > top) | (x[:, columns + 32] < bottom)].any()
    assert d[:, columns + 32][live & (x[:, columns + 32] == top)].any()
    assert d[:, columns + 32][live & (x[:, columns + 32] == bottom)].any()
    assert d[:, columns][live & (x[:, columns] == top)].any()


def test_linear_offset_moves_gates_and_dprob_only():
    built = cases.build(Case("dglu", d="f32", options={"act_func": "dgeglu"}))
    default, one, zero = (outputs_of(built, **o) for o in ({}, {"linear_offset": 1.0}, {"linear_offset": 0.0}))
    assert torch.equal(default["d_row"], one["d_row"])
    blocks = [o["d_row"].reshape(512, -1, 2, 32) for o in (one, zero)]
    assert torch.equal(blocks[0][:, :, 1], blocks[1][:, :, 1])
    assert not torch.equal(blocks[0][:, :, 0], blocks[1][:, :, 0])
    assert not torch.equal(one["dprob"], zero["dprob"])


@pytest.mark.parametrize("beta1", [4.0, float(np.nextafter(np.float32(4), np.float32(5))), 0.5, 100.0])
def test_situ_beta1(beta1):
    """4.0 is no special case."""
    cases.run(Case("dglu", c="f32", d="f32", options={"act_func": "dsituglu", "situ_beta1": beta1}))


@pytest.mark.parametrize("act", ["dswiglu", "dgeglu", "dsituglu"])
def test_far_pre_activations(act):
    """Gates and ups from 1e-30 to 1e4: no overflow, no NaN, and small ones keep relative accuracy."""
    case = Case("dglu", (256,), n=64, c="f32", d="f32", options={"act_func": act})
    built = cases.build(case)
    rng = np.random.default_rng(0)
    x = (np.exp2(rng.uniform(-100, 13, (256, 128))) * rng.choice([-1, 1], (256, 128))).astype(np.float32)
    built.positional[2].copy_(torch.from_numpy(x).unsqueeze(-1))
    built.problem.c = x.astype(np.float64)
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)


@pytest.mark.parametrize("op", ["relu", "srelu"])
def test_epilogue_op_comes_before_everything_but_dprob(op):
    case = Case("dglu", (256,), d="f32", dbias=True, form="out", options={"epilogue_op": op})
    outputs = cases.run(case)
    assert (outputs["d_row"] >= 0).all()
    assert (outputs["d_row"] > 0).any()
    plain = cases.run(replace(case, options={}))
    assert torch.equal(outputs["dprob"], plain["dprob"])
    assert not torch.equal(outputs["dbias"], plain["dbias"])


def test_single_group_ignores_the_offset_value():
    case = Case("dglu", (256,), d="f32", dbias=True)
    built = cases.build(case)
    plain = outputs_of(built, generate_dbias=True)
    built.positional[3].zero_()
    single = outputs_of(built, generate_dbias=True, use_single_group_runtime_offsets=True)
    for name in ("d_row", "dprob", "dbias"):
        assert torch.equal(single[name], plain[name])
    assert plain["d_row"].any()


def test_bf16_has_no_scaled_outputs():
    built = cases.build(Case("dglu", ab="bf16"))
    outputs = operator("dglu")(*built.positional, **built.keywords)
    for name, output in zip(cases.OUTPUTS, outputs, strict=True):
        assert output.numel() == 0 or name in ("d_row", "dprob"), name


def test_list_equals_dense_equals_pointers():
    for ab, d in (("e4m3", "e4m3"), ("bf16", "bf16")):
        case = Case("dglu", (256, 256, 512), n=96, k=64, ab=ab, d=d, dbias=True)
        reference = cases.call(cases.build(case))[0]
        for weights in ("dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"):
            outputs = cases.call(cases.build(replace(case, weights=weights)))[0]
            for name in cases.OUTPUTS:
                assert torch.equal(cases.raw(outputs[name]), cases.raw(reference[name])), (weights, name)


def test_scales_never_mix_gate_and_up():
    """Row blocks are 32 columns, one gate block or one up block: a huge up leaves its gate's scale alone."""
    case = cases.exact(Case("dglu", (256,), n=64, c="f32", d="e4m3"))
    built = cases.build(case)
    x = np.zeros((256, 128))
    ups = oracle.gate_columns(64) + 32
    x[:, ups] = 1024.0  # gate 0: dgate = R p up / 2, dup = 0
    beta = float(built.positional[5][0])
    built.positional[2].copy_(torch.from_numpy(x / beta).unsqueeze(-1))
    built.problem.c[:] = x / beta
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    scales = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(256, 4)]
    assert not scales[:, 1::2].any()
    assert scales[:, 0::2].any()
