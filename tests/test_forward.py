"""srelu, glu and mm against the oracle: every option pair, exact and random data; then single points of the contract."""

import itertools
from dataclasses import replace

import cases
import cases_forward as forward
import numpy as np
import oracle
import oracle_formats as formats
import oracle_forward
import pytest
import torch
from cases import FP4, FP8
from cases_forward import Case
from pairwise import pairwise

SRELU = [{}, {"tanh_clamp_scale": 2.0}]
GLU = [
    {"act_func": "swiglu"},
    {"act_func": "geglu"},
    # Bounds that are neither BF16 nor FP32 numbers.
    {"act_func": "geglu", "geglu_alpha": 1.3, "linear_offset": -0.5, "glu_clamp_max": 5.05, "glu_clamp_min": -3.1},
    {"act_func": "geglu", "geglu_alpha": 1.0, "linear_offset": 0.0, "glu_clamp_max": 10.0, "glu_clamp_min": -10.0},
    {"act_func": "situglu"},
    {"act_func": "situglu", "situ_beta1": 0.7, "situ_beta2": 3.0},
]
ACTIVATIONS = {"srelu": SRELU, "glu": GLU, "mm": [{}]}

COMMON = {
    "operands": [(ab, sf, vec) for ab in FP4 for sf, vec in (("e4m3", 16), ("e8m0", 16), ("e8m0", 32))]
    + [("e4m3", "e8m0", 32), ("e5m2", "e8m0", 32), ("bf16", "e8m0", 16)],
    "offsets": [((256, 512), None), ((0, 256, 256, 512, 512), 768), ((256,), None), ((512, 768), 1024)],
    "k": [32, 64, 96, 160, 288],  # beyond a slice of K of the CPU engine (256)
    "c": ["f32", "fp16", "bf16", "e4m3", "e5m2"],
    "d": ["bf16", "fp16", "f32", "e4m3", "e5m2"],
    "weights": ["dense_k", "dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"],
    "sf_form": ["view", "physical", "flat"],
    "rank": [2, 3],
    "discrete_col_sfd": [False, True],
    "norm": [0.01, 1.0, 3.0, 448.0],
    "form": ["functional", "out"],
    "poison": [False, True],
    "bias": [None, "f32", "bf16", "fp16"],
    "prob": [True, False],
    "alpha": [True, False],
    "generate_c": [True, False],
    "schedule": [
        {},
        {"deterministic": True, "mma_tiler_mn": [128, 256]},
        {"vector_f32": True, "mma_tiler_mn": [256, 128], "cluster_shape_mn": [2, 4]},
        {"use_dynamic_sched": True, "deterministic": False, "mma_tiler_mn": [128, 128], "cluster_shape_mn": [2, 1]},
    ],
}
# 80 and 272: tails in N for blocks of 32 and tiles of 128 and 256. gate and up together: a multiple of 64.
COLUMNS = {"srelu": [32, 64, 80, 160, 272], "glu": [64, 128, 192, 320], "mm": [32, 64, 80, 160, 272]}


def options_of(op: str) -> dict:
    return {**COMMON, "op": [op], "n": COLUMNS[op], "activation": ACTIVATIONS[op]}


def allowed(row: dict) -> bool:
    ab, quantised = row["operands"][0], row["d"] in FP8
    if ab in FP4 and (row["weights"].endswith("_n") or quantised):
        return False
    if ab == "bf16" and (quantised or row["c"] in FP8 or row["sf_form"] != "view"):
        return False
    if row["schedule"].get("vector_f32") and row["c"] in FP8:
        return False
    # The scale options mean nothing without a quantised D: keep one value, so that pairs are not wasted.
    return quantised or not row["discrete_col_sfd"]


def case_of(row: dict, seed: int = 0) -> Case:
    row = dict(row)
    ab, sf, vec = row.pop("operands")
    offsets, m = row.pop("offsets")
    options = {**row.pop("activation"), **row.pop("schedule")}
    return Case(offsets=offsets, m=m, ab=ab, sf=sf, vec=vec, options=options, seed=seed, **row)


PAIRS = [
    case_of(row, seed) for op in ACTIVATIONS for seed, row in enumerate(pairwise(options_of(op), allowed, seed=len(op)))
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_random(case):
    forward.run(case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_exact(case):
    """Every bit of C, D, scales and amax; the gated activations saturate or sit at zero, where FP32 is exact."""
    forward.run(forward.exact(case))


@pytest.mark.slow
@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("operands", COMMON["operands"], ids=str)
@pytest.mark.parametrize("d", COMMON["d"])
@pytest.mark.parametrize("weights", COMMON["weights"])
def test_full_product(op, operands, d, weights):
    for c, bias, activation in itertools.product(COMMON["c"], (None, "bf16"), ACTIVATIONS[op]):
        row = {name: values[0] for name, values in options_of(op).items()}
        row.update(operands=operands, c=c, d=d, weights=weights, bias=bias, activation=activation, k=96)
        row["n"] = 192 if op == "glu" else 80
        if not allowed(row):
            continue
        for discrete, form, prob in ((False, "out", True), (d in FP8, "functional", False)):
            case = case_of({**row, "discrete_col_sfd": discrete, "form": form, "prob": prob})
            forward.run(case)
            forward.run(forward.exact(case))


# Sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["srelu", "mm"])
@pytest.mark.parametrize("n", [16, 48, 96, 128, 272])
@pytest.mark.parametrize("k", [16, 144, 544])
def test_fp8_sizes(op, n, k):
    """Partial last K and N blocks have their own scale."""
    forward.run(forward.exact(Case(op, (256,), n=n, k=k, d="e4m3", bias="bf16")))


@pytest.mark.parametrize("n", [64, 192, 576])
@pytest.mark.parametrize("k", [16, 144, 544])
def test_glu_fp8_sizes(n, k):
    forward.run(forward.exact(Case("glu", (256,), n=n, k=k, d="e4m3", bias="bf16")))


@pytest.mark.parametrize(("op", "n"), [("srelu", 8), ("srelu", 200), ("mm", 24), ("glu", 64), ("glu", 320)])
@pytest.mark.parametrize("k", [32, 96, 288])
@pytest.mark.parametrize(("sf", "vec"), [("e4m3", 16), ("e8m0", 32)])
def test_fp4_sizes(op, n, k, sf, vec):
    forward.run(forward.exact(Case(op, (256,), n=n, k=k, ab="fp4", sf=sf, vec=vec)))


@pytest.mark.parametrize(("op", "n"), [("srelu", 8), ("srelu", 136), ("mm", 24), ("glu", 64), ("glu", 320)])
@pytest.mark.parametrize("k", [8, 24, 264])
def test_bf16_sizes(op, n, k):
    forward.run(forward.exact(Case(op, (256,), n=n, k=k, ab="bf16", vec=16)))


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize("offsets", [(256,) * 3, (0, 0, 512), (0, 256, 256, 512, 512), (1024,)], ids=str)
def test_offsets(op, offsets):
    for ab, d in (("e4m3", "bf16"), ("e4m3", "e4m3"), ("bf16", "f32")):
        case = Case(op, offsets, m=offsets[-1] + 256, ab=ab, d=d, poison=True, discrete_col_sfd=d == "e4m3", bias="f32")
        forward.run(replace(case, vec=16) if ab == "bf16" else case)


def test_many_experts():
    """64 experts, most of them empty."""
    sizes = np.zeros(64, int)
    sizes[[0, 7, 8, 63]] = 256
    offsets = tuple(np.cumsum(sizes).tolist())
    for op in ACTIVATIONS:
        forward.run(Case(op, offsets, n=64, k=32, weights="ptrs_k", bias="bf16", poison=True))


# The contract, point by point ---------------------------------------------------------------------------------


def both(case: Case, change):
    """D, C of a call, and of the call with changed arguments."""
    results = []
    for apply in (lambda _: None, change):
        built = forward.build(case)
        built.arguments["alpha"] = torch.tensor([0.75, -1.25])
        apply(built.arguments)
        outputs, _ = forward.call(built)
        results.append((outputs["d"], outputs["c"]))
    return results


@pytest.mark.parametrize("ab", ["e4m3", "bf16"])
def test_alpha_is_applied_once(ab):
    """Not squared as in dglu: doubling it doubles C."""
    for op, power in (("srelu", 4), ("glu", None), ("mm", 2)):
        case = Case(op, ab=ab, vec=32 if ab == "e4m3" else 16, c="f32", d="f32")
        (d, c), (d2, c2) = both(case, lambda arguments: arguments["alpha"].mul_(2))
        assert torch.equal(c * 2, c2)
        assert c.any()
        if power:
            assert torch.equal(d * power, d2)


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_missing_alpha_and_prob_are_ones(op):
    case = Case(op, (256, 768), c="f32", d="e4m3", bias="f32")
    ones = forward.build(case)
    ones.arguments.update(alpha=torch.ones(2), prob=torch.ones(768))
    none = forward.build(replace(case, alpha=False, prob=False))
    outputs, _ = forward.call(none)
    same(outputs, forward.call(ones)[0])


def same(got: dict, want: dict) -> None:
    for name, tensor in want.items():
        assert torch.equal(cases.raw(got[name]), cases.raw(tensor)), name


@pytest.mark.parametrize("op", ["srelu", "glu", "mm"])
def test_prob_multiplies_d_and_not_c(op):
    case = Case(op, c="f32", d="f32")
    (d, c), (d2, c2) = both(case, lambda arguments: arguments["prob"].mul_(-2))
    assert torch.equal(d * -2, d2)
    assert torch.equal(c, c2)
    assert d.any()


def test_mm_with_a_bias_leaves_prob_to_the_bias():
    """D = C = alpha * acc + prob * bias: at prob 0 the plain product, and the bias alone where the product is 0."""
    case = Case("mm", c="f32", d="f32", bias="f32")
    built = forward.build(case)
    built.arguments["prob"].zero_()
    bare, _ = forward.call(forward.build(replace(case, bias=None, prob=False)))
    outputs, _ = forward.call(built)
    assert torch.equal(outputs["d"], bare["d"])
    built.arguments["prob"] = torch.full((512,), -0.5)
    built.arguments["alpha"].zero_()
    outputs, _ = forward.call(built)
    assert torch.equal(outputs["d"], outputs["c"])
    rows = built.arguments["bias"].repeat_interleave(256, dim=0)
    assert torch.equal(outputs["d"][..., 0], -0.5 * rows)


@pytest.mark.parametrize("op", ["srelu", "glu"])
def test_d_is_of_the_unrounded_preactivation(op):
    """D does not depend on C, nor on its dtype or presence."""
    case = Case(op, d="f32", c="f32")
    want = forward.run(case)["d"]
    for c in ("bf16", "fp16", "e4m3", "e5m2"):
        assert torch.equal(forward.run(replace(case, c=c))["d"], want)
    assert torch.equal(forward.run(replace(case, generate_c=False))["d"], want)
    assert torch.equal(forward.run(replace(case, generate_c=False, form="out"))["d"], want)
    if op == "srelu":
        outputs = forward.run(replace(case, c="bf16", prob=False))
        assert not torch.equal(outputs["d"], outputs["c"].float().relu() ** 2)


def test_amax_is_taken_before_rounding():
    """257 rounds to 256 in BF16."""
    built = forward.build(Case("mm", (256,), n=32, k=32, prob=False))
    a, b = np.zeros((256, 32)), np.ones((32, 32))
    a[:, 0] = 1
    built.arguments["a"].copy_(cases.tensor_of(formats.E4M3.encode(a), "e4m3").unsqueeze(-1))
    built.arguments["b"][0].copy_(cases.tensor_of(formats.E4M3.encode(b), "e4m3").unsqueeze(-1))
    for name in ("sfa", "sfb"):
        scales = built.arguments[name]
        (scales[0] if name == "sfb" else scales).view(torch.uint8).fill_(127)
    built.arguments["alpha"].fill_(257.0)
    outputs, _ = forward.call(built)
    assert outputs["amax"].item() == 257.0
    assert (outputs["d"] == 256.0).all()
    built.arguments["alpha"].fill_(-257.0)
    assert forward.call(built)[0]["amax"].item() == 257.0


def test_gate_comes_first():
    """The even blocks of 32 go through the sigmoid: a zero there makes D zero, a zero in an odd block makes only that."""
    for act in ("swiglu", "geglu", "situglu"):
        options = {"act_func": act, "linear_offset": 0.0}
        built = forward.build(Case("glu", (256,), n=128, d="f32", bias="f32", prob=False, options=options))
        built.arguments["alpha"].zero_()
        gates, ups = oracle_forward.column_blocks(128, 2)
        bias = torch.zeros(1, 128)
        bias[0, gates], bias[0, ups] = -100.0, 3.0
        built.arguments["bias"] = bias
        assert forward.call(built)[0]["d"].abs().max() < 1e-20, act  # sigmoid(-100) = e^-100
        bias[0, gates], bias[0, ups] = 3.0, -100.0
        assert forward.call(built)[0]["d"].abs().min() > 1, act


@pytest.mark.parametrize("act", ["swiglu", "geglu", "situglu"])
def test_far_preactivations(act):
    """From 2^-100 to 2^13, by way of the bias: no overflow, no NaN, and small ones keep relative accuracy."""
    case = Case("glu", (256, 512), n=128, c="f32", d="f32", bias="f32", options={"act_func": act})
    built = forward.build(case)
    rng = np.random.default_rng(0)
    x = (np.exp2(rng.uniform(-100, 13, (2, 128))) * rng.choice([-1, 1], (2, 128))).astype(np.float32)
    built.arguments["alpha"].zero_()
    built.arguments["bias"] = torch.from_numpy(x)
    built.problem.alpha = np.zeros(2)
    built.problem.bias = x.astype(np.float64)
    forward.check(built, *forward.call(built))


def test_soft_clamp_saturates():
    """Far above s, D = prob s^2."""
    case = Case("srelu", (256,), d="f32", bias="f32", prob=False, options={"tanh_clamp_scale": 0.5})
    built = forward.build(case)
    built.arguments["alpha"].zero_()
    built.arguments["bias"].fill_(512.0)
    assert (forward.call(built)[0]["d"] == 0.25).all()
    built.arguments["bias"].fill_(-512.0)
    assert not forward.call(built)[0]["d"].any()


def test_fp8_c_saturates():
    for c, largest in (("e4m3", 448.0), ("e5m2", 57344.0)):
        built = forward.build(Case("srelu", (256,), c=c, bias="f32"))
        built.arguments["alpha"].zero_()
        built.arguments["bias"].fill_(1e6)
        assert (cases.values_of(forward.call(built)[0]["c"]) == largest).all()


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_bf16_has_no_scaled_outputs(op):
    outputs = forward.run(Case(op, ab="bf16", vec=16))
    for name in ("d_col", "amax", "sfd_row", "sfd_col"):
        assert outputs[name].numel() == 0, name


@pytest.mark.parametrize("op", ACTIVATIONS)
@pytest.mark.parametrize(("ab", "d"), [("e4m3", "e4m3"), ("bf16", "bf16")])
def test_list_equals_dense_equals_pointers(op, ab, d):
    case = Case(op, (256, 256, 512), n=192, k=64, ab=ab, vec=32 if ab == "e4m3" else 16, d=d, bias="f32")
    reference = forward.call(forward.build(case))[0]
    for weights in ("dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"):
        same(forward.call(forward.build(replace(case, weights=weights)))[0], reference)


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_tile_n_changes_no_bit(op):
    case = Case(op, (256, 768), n=576 if op == "glu" else 272, d="e4m3", bias="f32")
    small = replace(case, options={"mma_tiler_mn": [256, 128]})
    same(forward.run(small), forward.run(case))


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_defaults(op):
    """C and D are BF16; C is given by srelu and glu, not by mm."""
    built = forward.build(Case(op))
    c, d, *_ = forward.invoke(op, built.arguments)
    assert c.dtype == d.dtype == torch.bfloat16
    assert (c.numel() > 0) == (op != "mm")
    bare = {"a", "b", "padded_offsets"} | built.arguments.keys() - set(forward.TENSORS)
    keywords = {k: v for k, v in built.arguments.items() if k in bare}
    assert forward.cases.operator(op)(**keywords)[1].shape == d.shape


def test_norm_const_without_scales_is_ignored():
    built = forward.build(Case("glu"))
    plain, _ = forward.call(built)
    built.arguments["norm_const"] = torch.tensor([0.01])
    same(forward.call(built)[0], plain)


def test_single_group_ignores_the_offset_value():
    built = forward.build(Case("glu", (256,), d="e4m3"))
    plain, _ = forward.call(built)
    built.arguments["padded_offsets"].zero_()
    built.arguments["use_single_group_runtime_offsets"] = True
    same(forward.call(built)[0], plain)


def test_amax_is_accumulated_onto():
    case = Case("srelu", (256, 512), form="out")
    built = forward.build(case)
    guarded = cases.Guarded()
    buffers = forward.output_buffers(case, guarded)
    buffers["amax"].copy_(torch.tensor([[1e30], [-torch.inf]]))
    forward.invoke("srelu_out", {**built.arguments, **buffers})
    assert buffers["amax"][0].item() == np.float32(1e30)
    assert (
        buffers["amax"][1].item() == forward.call(forward.build(replace(case, form="functional")))[0]["amax"][1].item()
    )


# Forward and backward agree: the forward oracle, run on torch float64 tensors and differentiated by autograd ------


class Differentiable:
    """The methods of oracle_forward.Arithmetic on float64 tensors. Gradients are 1 at a bound of clip."""

    @staticmethod
    def number(x):
        return torch.as_tensor(x, dtype=torch.float64)

    def mul(self, *factors):
        product = self.number(factors[0])
        for factor in factors[1:]:
            product = product * self.number(factor)
        return product

    def add(self, a, b):
        return self.number(a) + self.number(b)

    def logistic(self, x):
        return torch.sigmoid(x)

    def tanh(self, x, scale):
        return torch.tanh(x / self.number(scale)), None

    def clip(self, x, low, high):
        low, high = self.number(low), self.number(high)
        return torch.where(x < low, low, torch.where(x > high, high, x))


def pair(op: str, options: dict):
    """A forward problem and an upstream gradient."""
    rng = np.random.default_rng(0)
    m, n, k = 256, 128, 8
    p = oracle_forward.Problem(
        op,
        a=rng.standard_normal((m, k)),
        b=[rng.standard_normal((n, k))],
        offsets=[m],
        alpha=np.array([-1.5]),
        prob=oracle.f32(rng.uniform(-1, 1, m)),
        bias=rng.standard_normal((1, n)),
        **options,
    )
    return p, rng.standard_normal((m, n // p.width))


@pytest.mark.parametrize(
    ("op", "options"), [("srelu", o) for o in SRELU] + [("glu", o) for o in GLU], ids=lambda value: str(value)
)
def test_autograd_of_the_forward_oracle_is_the_backward_oracle(op, options):
    p, dy = pair(op, options)
    x = torch.from_numpy(p.a @ p.b[0].T * p.alpha[0] + p.bias).requires_grad_()
    prob = torch.from_numpy(p.prob).requires_grad_()
    blocks = [x[:, columns] for columns in oracle_forward.column_blocks(x.shape[1], p.width)]
    d = prob[:, None] * oracle_forward.activation(Differentiable(), blocks, p)
    np.testing.assert_allclose(oracle_forward.expected(p).d.value, d.detach().numpy(), rtol=1e-12, atol=1e-12)
    dx, dprob = torch.autograd.grad(d, [x, prob], torch.from_numpy(dy))

    act = {"c_role": "grad_output"} if op == "srelu" else {}
    options = {**options, **act, **({"act_func": "d" + options["act_func"]} if op == "glu" else {})}
    # srelu: G recomputed, C the upstream gradient. glu: the upstream gradient is the GEMM's value, C the saved x.
    value, c = (x.detach().numpy(), dy) if op == "srelu" else (dy, x.detach().numpy())
    backward = oracle.Problem(
        "dsrelu" if op == "srelu" else "dglu", p.a, p.b, c, p.offsets, p.alpha, None, p.prob, **options
    )
    got = oracle_forward.backward(backward, lambda ar, _, rows: ar.number(value[rows]))
    # Two float64 evaluations of the same formula, sums of at most 256 terms.
    for name, want in (("d", dx), ("dprob", dprob), ("dbias", dx.sum(0, keepdim=True))):
        want = want.numpy()
        np.testing.assert_allclose(getattr(got, name).value, want, rtol=1e-12, atol=1e-12 * np.abs(want).max())
    if op == "srelu":  # and the oracle of the backward operator, which has no bias, does the GEMM itself
        p.bias = None
        plain = oracle.expected(backward)
        x = p.a @ p.b[0].T * p.alpha[0]
        again = oracle_forward.backward(backward, lambda ar, _, rows: ar.number(x[rows]))
        np.testing.assert_allclose(again.d.value, plain.d.value, rtol=1e-12, atol=1e-12)


def test_mm_oracle():
    """By hand: both forms of prob and bias."""
    p, _ = pair("mm", {})
    product = p.a @ p.b[0].T * -1.5
    np.testing.assert_allclose(oracle_forward.expected(p).d.value, product + p.prob[:, None] * p.bias, rtol=1e-13)
    np.testing.assert_allclose(oracle_forward.expected(p).c.value, product + p.prob[:, None] * p.bias, rtol=1e-13)
    p.bias = None
    np.testing.assert_allclose(oracle_forward.expected(p).d.value, p.prob[:, None] * product, rtol=1e-13)
    np.testing.assert_allclose(oracle_forward.expected(p).c.value, product, rtol=1e-13)


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_bounds_are_tight(op):
    """The comparison may leave few elements more than one code."""
    want = forward.build(Case(op, c="bf16", n=128)).expected()
    for approx in (want.c, want.d):
        low, high = (forward.FORMATS["bf16"].round(end) for end in (approx.low, approx.high))
        assert np.mean(low == high) > 0.9
