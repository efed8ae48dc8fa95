"""dact, the backward epilogue on a given value, against the oracle; and what the forward operators ask of dsrelu and
dglu: a bias in the recomputed pre-activation, BF16 operands for every activation."""

import itertools
from dataclasses import replace

import cases
import cases_forward as forward
import numpy as np
import oracle_forward
import pytest
import torch
from cases import FP8
from cases_forward import DactCase
from pairwise import pairwise

ACTIVATIONS = [
    {"act_func": "dsrelu"},
    {"act_func": "dsrelu", "tanh_clamp_scale": 2.0},
    {"act_func": "dswiglu"},
    {"act_func": "dgeglu"},
    {"act_func": "dgeglu", "geglu_alpha": 1.0, "linear_offset": 0.0, "glu_clamp_max": 5.05, "glu_clamp_min": -3.0},
    {"act_func": "dsituglu"},
    {"act_func": "dsituglu", "situ_beta1": 0.7, "situ_beta2": 3.0},
    {"act_func": "identity"},
]
OPTIONS = {
    "options": ACTIVATIONS,
    "offsets": [((256, 512), None), ((0, 256, 256, 768, 768), 1024), ((256,), None), ((512, 768), 1280)],
    "n": [32, 96, 160, 288],
    "r": ["f32", "bf16", "fp16"],
    "c": ["f32", "fp16", "bf16", "e4m3", "e5m2"],
    "d": ["bf16", "fp16", "f32"],
    "r_rank": [2, 3],
    "rank": [2, 3],
    "dbias": [False, True],
    "generate_d": [True, False],
    "c_per_expert": [False, True],
    "prob": [True, False],
    "poison": [False, True],
}


def case_of(row: dict, seed: int = 0) -> DactCase:
    row = dict(row)
    offsets, m = row.pop("offsets")
    return DactCase(offsets, m, seed=seed, **row)


PAIRS = [case_of(row, seed) for seed, row in enumerate(pairwise(OPTIONS, lambda row: True))]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_random(case):
    forward.run_dact(case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_exact(case):
    """Every bit of D and of both sums."""
    forward.run_dact(forward.exact(case))


@pytest.mark.slow
@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("d", OPTIONS["d"])
def test_full_product(options, d):
    for r, c, dbias, prob in itertools.product(*[OPTIONS[name] for name in ("r", "c", "dbias", "prob")]):
        case = DactCase((256, 256, 512), 768, n=96, r=r, c=c, d=d, dbias=dbias, prob=prob, options=options)
        forward.run_dact(case)
        forward.run_dact(forward.exact(case))


@pytest.mark.parametrize("n", [16, 48, 80, 272, 528])
@pytest.mark.parametrize("act", ["dsrelu", "identity"])
def test_sizes(n, act):
    """Tails in N: these two take any whole 16 bytes."""
    forward.run_dact(forward.exact(DactCase(n=n, c="e4m3", options={"act_func": act})))


@pytest.mark.parametrize("n", [4, 20, 36, 132])
def test_sizes_of_fp32(n):
    forward.run_dact(forward.exact(DactCase(n=n, r="f32", c="f32", d="f32", options={"act_func": "dsrelu"})))


# Single points ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["dsrelu", "dswiglu", "dgeglu", "dsituglu"])
def test_is_the_epilogue_of_the_fused_operator(act):
    """dsrelu or dglu with unit weights: the GEMM's value is A itself. The same bits in D and in both sums."""
    case = DactCase((256, 768), 1024, n=64, r="bf16", c="bf16", rank=3, options={"act_func": act})
    outputs = forward.run_dact(case)
    built = forward.build_dact(case)
    given = built.arguments
    ones = torch.ones(2)
    weights = torch.eye(64, dtype=torch.bfloat16).expand(2, 64, 64).contiguous().permute(1, 2, 0)
    keywords = {"generate_dbias": True}
    head = (given["r"], [weights], given["c"], given["padded_offsets"], ones)
    if act == "dsrelu":
        got = cases.operator("dsrelu")(*head, given["prob"], c_role="preactivation", **keywords)
    else:
        got = cases.operator("dglu")(*head, ones, given["prob"], act_func=act, **keywords)
    for name, tensor in (("d", got[0]), ("dprob", got[2]), ("dbias", got[3])):
        assert torch.equal(cases.raw(outputs[name]), cases.raw(tensor)), name
        assert tensor.any()


def test_identity_sums_rows_and_columns():
    """D = prob r, dprob = sum over columns of r c, dbias = sum over rows of prob r."""
    r = torch.arange(512, dtype=torch.float32).remainder(5).view(512, 1).expand(512, 32).contiguous()
    c = torch.arange(32, dtype=torch.float32).view(1, 32).expand(512, 32).contiguous()
    prob = torch.tensor([0.5, 2.0]).repeat_interleave(256)
    offsets = torch.tensor([256, 512], dtype=torch.int32)
    keywords = {"act_func": "identity", "d_dtype": torch.float32, "generate_dbias": True}
    d, dprob, dbias = cases.operator("dact")(r, c, offsets, prob, **keywords)
    assert torch.equal(d, r * prob[:, None])
    assert torch.equal(dprob, r[:, 0] * 496)
    sums = torch.stack([r[:256].sum(0) * 0.5, r[256:].sum(0) * 2.0])
    assert torch.equal(dbias[..., 0], sums.to(torch.bfloat16))
    assert cases.operator("dact")(r, c, offsets, act_func="identity")[1].shape == (512, 1, 1)


def test_bias_of_an_expert():
    """A c of one row for each expert has the bits of that row repeated; without D the sums are the same."""
    generator = torch.Generator().manual_seed(0)
    r, c, prob = (torch.randn(*shape, generator=generator) for shape in ((768, 96), (3, 96), (768,)))
    offsets = torch.tensor([256, 256, 512], dtype=torch.int32)
    rows = c[torch.tensor([0, 2, 2]).repeat_interleave(256)]
    keywords = {"act_func": "identity", "generate_dbias": True}
    repeated = cases.operator("dact")(r, rows, offsets, prob, **keywords)
    for generate_d in (True, False):
        given = cases.operator("dact")(r, c, offsets, prob, **keywords, c_per_expert=True, generate_d=generate_d)
        for one, other in list(zip(given, repeated))[0 if generate_d else 1 :]:
            assert torch.equal(one, other)
        assert given[0].shape == ((768, 96) if generate_d else (0,))


@pytest.mark.parametrize("rows", [1, 3, 512])
def test_malformed_c_of_experts(rows):
    r, c, offsets = torch.zeros(512, 96), torch.zeros(rows, 96), torch.tensor([256, 512], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^c: expected shape \(L, N.*\) = \(2, 96.*, got shape"):
        cases.operator("dact")(r, c, offsets, act_func="identity", c_per_expert=True)


def test_prob_is_in_d_and_not_in_dprob():
    for options in ACTIVATIONS:
        built = forward.build_dact(DactCase(d="f32", options=options))
        built.arguments["prob"].fill_(1.0)
        one = forward.call_dact(built)
        built.arguments["prob"].fill_(-2.0)
        two = forward.call_dact(built)
        built.arguments["prob"] = None
        none = forward.call_dact(built)
        assert torch.equal(one["d"] * -2, two["d"])
        assert torch.equal(one["dbias"] * -2, two["dbias"])
        assert torch.equal(one["dprob"], two["dprob"])
        assert all(torch.equal(none[name].flatten(), one[name].flatten()) for name in one)
        assert one["d"].any()
        assert one["dprob"].any()


def test_dbias_is_rounded_once_and_before_d_is():
    """512 rows of 1 + 2^-8 and of 1: BF16 D would lose the fraction, and a running BF16 sum the last rows."""
    r = torch.ones(512, 32)
    r[::2] += 2.0**-8
    offsets = torch.tensor([512], dtype=torch.int32)
    d, _, dbias = cases.operator("dact")(r, r, offsets, act_func="identity", generate_dbias=True)
    assert (d == 1).all()
    assert (dbias == 512.0).all()  # 513 to BF16
    r[::2] += 2.0**-6
    _, _, dbias = cases.operator("dact")(r, r, offsets, act_func="identity", generate_dbias=True)
    assert (dbias == 516.0).all()  # 517: a tie, to even


@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
def test_experts_do_not_mix(options):
    """Experts without rows have a zero dbias; a NaN in one expert's row reaches that row and that expert's dbias alone."""
    case = DactCase((0, 256, 256, 512, 768), 1024, d="f32", poison=True, options=options)
    clean = forward.run_dact(case)
    assert not clean["dbias"][[0, 2]].any()
    assert not clean["d"][768:].any()
    assert not clean["dprob"][768:].any()
    built = forward.build_dact(case)
    built.arguments["r"][300] = torch.nan
    outputs = forward.call_dact(built)
    others = torch.arange(1024) != 300
    for name in ("d", "dprob"):
        assert torch.equal(outputs[name][others], clean[name][others]), name
    reached = outputs["d"][300].isnan()  # the masks of dgeglu keep it out
    assert reached.any()
    assert reached[clean["d"][300] != 0].all()
    assert outputs["dprob"][300].isnan()
    assert torch.equal(outputs["dbias"][[0, 1, 2, 4]], clean["dbias"][[0, 1, 2, 4]])
    assert torch.equal(outputs["dbias"][3, :, 0].isnan(), reached)


@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("m", [0, 256])
def test_no_rows_at_all(options, m):
    outputs = forward.run_dact(DactCase((0, 0), m, options=options))
    assert outputs["d"].shape[0] == m
    assert not outputs["dbias"].any()


def test_defaults():
    """dswiglu, BF16 D, no dbias."""
    built = forward.build_dact(DactCase())
    operator = cases.operator("dact")
    head = [built.arguments[name] for name in forward.DACT_TENSORS]
    d, dprob, dbias = operator(*head)
    assert d.dtype == torch.bfloat16
    assert torch.equal(d, operator(*head, act_func="dswiglu")[0])
    assert dbias.numel() == 0
    assert dprob.shape == (512,)


# dsrelu with a bias, and BF16 operands ------------------------------------------------------------------------


def with_bias(case: cases.Case, dtype: str):
    """(built, the oracle's expectation) with G = alpha * A @ B.T + bias."""
    built = cases.build(case)
    rng = np.random.default_rng(case.seed + 3000)
    shape = (case.experts, case.n)
    exact = case.data == "exact"
    values = rng.choice([-3.0, -0.5, 0.0, 1.0, 2.0], shape) if exact else rng.standard_normal(shape)
    codes, bias = cases.encode(values, dtype)
    built.keywords["bias"] = cases.tensor_of(codes, dtype)
    p = built.problem

    def value(ar, e, rows):
        accumulator, _ = oracle_forward.gemm(ar, p.a[rows], p.b[e])
        return oracle_forward.preactivation(ar, accumulator, p.alpha[e], bias[e])

    return built, oracle_forward.backward(p, value, exact)


BIAS_OPTIONS = {
    "operands": [("e4m3", "e8m0", 32), ("fp4", "e4m3", 16), ("bf16", "e8m0", 16)],
    "offsets": [((256, 512), None), ((0, 256, 256, 768, 768), 1024)],
    "n": [32, 80, 272],
    "c": ["f32", "bf16"],
    "d": ["bf16", "f32", "e4m3"],
    "weights": ["dense_k", "list_k", "ptrs_k"],
    "dbias": [False, True],
    "form": ["functional", "out"],
    "poison": [False, True],
    "options": [{}, {"tanh_clamp_scale": 2.0}],
    "bias": ["f32", "bf16", "fp16"],
}


def bias_case(row: dict, seed: int):
    row = dict(row)
    ab, sf, vec = row.pop("operands")
    offsets, m = row.pop("offsets")
    bias = row.pop("bias")
    return cases.Case("dsrelu", offsets, m, ab=ab, sf=sf, vec=vec, seed=seed, **row), bias


BIASED = [
    bias_case(row, seed)
    for seed, row in enumerate(pairwise(BIAS_OPTIONS, lambda row: row["operands"][0] == "e4m3" or row["d"] not in FP8))
]


@pytest.mark.parametrize(("case", "bias"), BIASED, ids=str)
@pytest.mark.parametrize("data", ["random", "exact"])
def test_dsrelu_with_bias(case, bias, data):
    built, want = with_bias(cases.exact(case) if data == "exact" else case, bias)
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts, want)


def test_bias_of_dsrelu_matters():
    case = cases.Case("dsrelu", d="f32")
    built, _ = with_bias(case, "f32")
    outputs, _ = cases.call(built)
    plain, _ = cases.call(cases.build(case))
    assert not torch.equal(outputs["d_row"], plain["d_row"])
    built.keywords["bias"].zero_()
    outputs, _ = cases.call(built)
    assert torch.equal(outputs["d_row"], plain["d_row"])
    assert torch.equal(outputs["dprob"], plain["dprob"])


@pytest.mark.parametrize(
    "bias",
    [torch.zeros(2, 64).double(), torch.zeros(3, 64), torch.zeros(64, 2), torch.zeros(64, 2).T, torch.zeros(128)],
)
def test_malformed_bias_of_dsrelu(bias):
    built = cases.build(cases.Case("dsrelu"))
    with pytest.raises(RuntimeError, match="^bias: expected .*, got "):
        cases.operator("dsrelu")(*built.positional, **built.keywords, bias=bias)


@pytest.mark.parametrize("options", [{}, {"tanh_clamp_scale": 2.0}, {"c_role": "preactivation"}], ids=str)
@pytest.mark.parametrize("d", ["bf16", "f32"])
@pytest.mark.parametrize("weights", ["dense_k", "dense_n", "list_n", "ptrs_k"])
def test_bf16_dsrelu(options, d, weights):
    case = cases.Case("dsrelu", (256, 768), m=1024, n=72, k=24, ab="bf16", vec=16, d=d, weights=weights, dbias=True)
    case = replace(case, options=options, poison=True)
    cases.run(case)
    cases.run(cases.exact(case))


@pytest.mark.parametrize("options", [{}, {"situ_beta1": 0.7, "situ_beta2": 3.0}], ids=str)
def test_bf16_dsituglu(options):
    options = {"act_func": "dsituglu", **options}
    case = cases.Case("dglu", (256, 768), m=1024, k=24, ab="bf16", vec=16, d="f32", dbias=True, options=options)
    cases.run(case)
    cases.run(cases.exact(case))
