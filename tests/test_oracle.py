"""Tests of the oracle and of the comparison: autograd in float64, torch's casts where those are right, and an FP32
stand-in for the product whose planted mistakes must be caught."""

import dataclasses
import itertools

import cases
import numpy as np
import oracle
import oracle_formats as formats
import pytest
import torch
from cases import Case
from compare import round_to
from oracle_formats import FORMATS
from pairwise import pairwise

# Codecs against torch's casts. torch's casts to FP8 do not saturate and its cast to e8m0 rounds to nearest, so the
# comparison keeps to the finite range and leaves e8m0 out.


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16"])
def test_decode_matches_torch(name):
    form = FORMATS[name]
    codes = np.arange(1 << form.bits).astype(np.uint8 if form.bits == 8 else np.uint16)
    theirs = torch.from_numpy(codes).view(cases.DTYPES[name]).to(torch.float64).numpy()
    np.testing.assert_array_equal(form.decode(codes), theirs)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16"])
def test_encode_matches_torch(name):
    form = FORMATS[name]
    finite = form.decode(np.arange(1 << form.bits))
    finite = np.unique(finite[np.isfinite(finite)])
    ties = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, ties, [0.0, -0.0], np.random.default_rng(0).standard_normal(4000)]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = x[np.abs(x) <= form.max]
    integer = torch.uint8 if form.bits == 8 else torch.uint16
    theirs = torch.from_numpy(x).to(cases.DTYPES[name]).view(integer).numpy()
    np.testing.assert_array_equal(form.encode(x), theirs)


def test_e2m1_values():
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(formats.E2M1.decode(np.arange(16)), want + [-v for v in want])
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 100]
    np.testing.assert_array_equal(formats.E2M1.decode(formats.E2M1.encode(x)), [0, 1, 1, 2, 2, 4, 4, 6, 6])


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_fixed_points(name):
    form = FORMATS[name]
    codes = np.arange(1 << form.bits)
    values = form.decode(codes)
    np.testing.assert_array_equal(form.encode(values)[np.isfinite(values)], codes[np.isfinite(values)])
    assert form.encode(np.inf) == form.max_code


def test_e8m0_rounds_up():
    v = np.array([0, 2.0**-149, 2.0**-127, 2.0**-127 * 1.5, 2.0**-126, 1, 1 + 2.0**-23, 1 - 2.0**-24, 2.0**127])
    np.testing.assert_array_equal(formats.encode_e8m0_up(v), [0, 0, 0, 1, 1, 127, 128, 127, 254])
    np.testing.assert_array_equal(formats.encode_e8m0_up([2.0**127 * 1.5, np.inf, np.nan, -1]), [254, 254, 255, 0])


# Activations against autograd. The forward formulas stand here a second time, in torch and from the documents' text;
# torch.where keeps the gradient 1 at a clamp bound, which torch.clamp does not promise.


def interleaved(x):
    blocks = x.reshape(x.shape[0], -1, 2, 32)
    return blocks[:, :, 0].reshape(x.shape[0], -1), blocks[:, :, 1].reshape(x.shape[0], -1)


def swiglu(x, p):
    gate, up = interleaved(x)
    return up * gate * torch.sigmoid(gate)


def geglu(x, p):
    gate, up = interleaved(x)
    gate = torch.where(gate <= p.glu_clamp_max, gate, p.glu_clamp_max)
    up = torch.where(up <= p.glu_clamp_max, up, p.glu_clamp_max)
    up = torch.where(up >= p.glu_clamp_min, up, p.glu_clamp_min)
    offset = 1.0 if p.linear_offset is None else p.linear_offset
    return gate * torch.sigmoid(p.geglu_alpha * gate) * (up + offset)


def situglu(x, p):
    gate, up = interleaved(x)
    tanh_gate = p.situ_beta1 * torch.tanh(gate / p.situ_beta1) * torch.sigmoid(gate)
    return tanh_gate * p.situ_beta2 * torch.tanh(up / p.situ_beta2)


def srelu(x, p):
    y = torch.relu(x)
    if p.tanh_clamp_scale is not None:
        y = p.tanh_clamp_scale * torch.tanh(y / p.tanh_clamp_scale)
    return y * y


FORWARD = {"dswiglu": swiglu, "dgeglu": geglu, "dsituglu": situglu}
DSRELU_OPTIONS = [
    {"c_role": role, "tanh_clamp_scale": clamp} for role in ("grad_output", "preactivation") for clamp in (None, 2.0)
]
DGLU_OPTIONS = [
    {"act_func": "dswiglu"},
    {"act_func": "dgeglu"},
    {"act_func": "dgeglu", "linear_offset": 0.0, "geglu_alpha": 1.0, "glu_clamp_max": 10.0, "glu_clamp_min": -3.0},
    {"act_func": "dsituglu"},
    {"act_func": "dsituglu", "situ_beta1": 0.5, "situ_beta2": 2.0},
]


def problem(operation, options, rows=256, n=64, k=8, seed=0, **more):
    rng = np.random.default_rng(seed)
    width = 1 if operation == "dsrelu" else 2
    c = rng.standard_normal((rows, n * width)) * 5
    c.flat[:8] = [7.0, -7.0, 10.0, 0.0, -0.0, 9.0, -20.0, 20.0]  # bounds of the clamps, and a gate block's far ends
    return oracle.Problem(
        operation,
        a=rng.standard_normal((rows, k)),
        b=[rng.standard_normal((n, k))],
        c=c.astype(np.float32).astype(np.float64),
        offsets=[rows],
        alpha=np.array([-0.75]),
        beta=np.array([1.5]),
        prob=rng.uniform(-1, 1, rows).astype(np.float32).astype(np.float64),
        **options,
        **more,
    )


def autograd(p: oracle.Problem):
    """Gradients of sum(dy * prob * activation(x)) for the same numbers."""
    alpha = p.alpha[0] if p.operation == "dsrelu" else p.alpha[0] ** 2
    g, c = torch.from_numpy(p.a @ p.b[0].T * alpha), torch.from_numpy(p.c)
    prob = torch.from_numpy(p.prob).requires_grad_()
    if p.operation == "dsrelu":
        x, dy, forward = (g, c, srelu) if p.c_role == "grad_output" else (c, g, srelu)
    else:
        scale = p.beta[0] if p.act_func != "dgeglu" or not p.block_scaled else 1.0
        x, dy, forward = torch.from_numpy((c.numpy() * scale).astype(np.float32).astype(np.float64)), g, None
        forward = FORWARD[p.act_func]
    x = x.clone().requires_grad_()
    loss = (dy * prob[:, None] * forward(x, p)).sum()
    return [t.numpy() for t in torch.autograd.grad(loss, [x, prob])]


@pytest.mark.parametrize(
    ("operation", "options", "block_scaled"),
    [("dsrelu", o, True) for o in DSRELU_OPTIONS]
    + [("dglu", o, scaled) for o in DGLU_OPTIONS for scaled in (True, False)],
)
def test_gradients_equal_autograd(operation, options, block_scaled):
    p = problem(operation, options, block_scaled=block_scaled)
    want = oracle.expected(p)
    dx, dprob = autograd(p)
    # Both sides are float64; constants such as 1.702 are FP32 in the oracle, which is 2^-25 relative, carried through
    # an exponent of at most 1.702 * 20.
    exact_constants = options.get("geglu_alpha", 1.702) == 1.0 or options.get("act_func") != "dgeglu"
    tolerance = 1e-13 if exact_constants else 40 * 2.0**-24
    np.testing.assert_allclose(want.d.value, dx, rtol=tolerance, atol=tolerance * np.abs(dx).max())
    np.testing.assert_allclose(want.dprob.value, dprob, rtol=tolerance, atol=tolerance * np.abs(dprob).max())
    np.testing.assert_allclose(want.dbias.value[0], dx.sum(0), rtol=tolerance, atol=tolerance * np.abs(dx).sum(0).max())
    np.testing.assert_array_equal(np.argmax(np.abs(want.d.value)), np.argmax(np.abs(dx)))


def test_value_filter_is_mask_times_value():
    options = {"act_func": "dgeglu"}
    mask = oracle.expected(problem("dglu", options, block_scaled=False))
    value = oracle.expected(problem("dglu", options, block_scaled=False, clamp_grad="value"))
    p = problem("dglu", options)
    x = (p.c * p.beta[0]).astype(np.float32)
    np.testing.assert_allclose(value.d.value, mask.d.value * x, rtol=1e-14)
    np.testing.assert_array_equal(value.dprob.value, mask.dprob.value)


def test_epilogue_op():
    plain = oracle.expected(problem("dglu", {"act_func": "dswiglu"}))
    relu = oracle.expected(problem("dglu", {"act_func": "dswiglu"}, epilogue_op="relu"))
    square = oracle.expected(problem("dglu", {"act_func": "dswiglu"}, epilogue_op="srelu"))
    np.testing.assert_array_equal(relu.d.value, np.maximum(plain.d.value, 0))
    np.testing.assert_array_equal(square.d.value, np.maximum(plain.d.value, 0) ** 2)
    np.testing.assert_allclose(square.dbias.value, square.d.value.sum(0, keepdims=True))
    np.testing.assert_array_equal(square.dprob.value, plain.dprob.value)


# A stand-in for the product, in plain FP32 torch, and its mistakes.


def stand_in(built: cases.Built, mistake: str | None = None) -> dict:
    case, p = built.case, built.problem
    rows, columns = case.rows, case.columns
    single = torch.float32
    d = torch.zeros((rows, columns), dtype=single)
    dprob = torch.zeros(rows, dtype=single)
    dbias = torch.zeros((case.experts, columns), dtype=single)
    amax = torch.full((case.experts, case.width), -torch.inf, dtype=single)
    for e, (start, end) in enumerate(p.experts):
        if end <= start:
            continue
        a, b = torch.from_numpy(p.a[start:end]).to(single), torch.from_numpy(p.b[e]).to(single)
        if mistake == "dropped K block":
            a, b = a[:, :-16], b[:, :-16]
        g = a @ b.T * float(np.float32(p.alpha[e]))
        if case.op == "dglu" and mistake != "alpha once":
            g = g * float(np.float32(p.alpha[e]))
        c = torch.from_numpy(p.c[start:end]).to(single)
        if case.op == "dglu" and (p.act_func != "dgeglu" or not p.block_scaled):
            c = c * float(p.beta[e])
        prob = torch.from_numpy(p.prob[start:end]).to(single)
        x, dy = (g, c) if case.op == "dsrelu" and p.c_role == "grad_output" else (c, g)
        # FP32 for the GEMM and the sums; the activation in float64, because autograd of tanh cancels in 1 - t^2.
        x, dy = x.double().requires_grad_(), dy.double()
        forward = srelu if case.op == "dsrelu" else FORWARD[p.act_func]
        values = forward(x, p)
        (gradient,) = torch.autograd.grad((dy * prob[:, None] * values).sum(), [x])
        gradient = gradient.to(single)
        terms = (dy * values).detach().to(single)
        dprob[start:end] = terms.sum(1) * (1.0 if mistake != "prob in dprob" else prob)
        if mistake == "gate and up swapped":
            gradient = gradient.reshape(end - start, -1, 2, 32).flip(2).reshape(end - start, -1)
        d[start:end] = gradient
        dbias[e] = gradient.sum(0)
        halves = [gradient] if case.op == "dsrelu" else interleaved(gradient)
        amax[e] = torch.stack([h.abs().max() for h in halves])
    if mistake == "dbias of rounded D":
        for e, (start, end) in enumerate(p.experts):
            dbias[e] = d[start:end].to(torch.bfloat16).float().sum(0)
    empty = torch.empty(0)
    outputs = dict.fromkeys(cases.OUTPUTS, empty)
    outputs["dprob"] = dprob.view(-1, 1, 1)
    outputs["dbias"] = dbias.to(torch.bfloat16).unsqueeze(-1) if case.dbias else empty.to(torch.bfloat16)
    for name in ("sfd_row", "sfd_col"):
        outputs[name] = torch.empty(0, dtype=cases.DTYPES[case.sf])
    outputs["d_row"] = outputs["d_col"] = torch.empty(0, dtype=cases.DTYPES[case.d])
    if not case.quantized:
        outputs["d_row"] = d.to(cases.DTYPES[case.d]).unsqueeze(-1)
        if case.scaled and case.d != "f32":
            outputs["amax"] = amax.view(*amax.shape, 1) if case.width == 2 else amax
        return outputs
    data_format = FORMATS[case.d]
    norm = case.norm * (2 if mistake == "norm twice" else 1)
    for name, matrix in (("row", d.numpy()), ("col", d.numpy().T)):
        codes, scales = formats.quantize(matrix, data_format, case.sf, 32, norm)
        if mistake == "scale rounded down":
            scales = np.maximum(scales, 1) - 1
        if mistake == f"{name} scale off by one":
            scales = scales.copy()
            scales[5, 1] += 1
        offsets = formats.scale_offsets(*scales.shape)
        if name == "col":
            codes = codes.T
            discrete = case.discrete_col_sfd != (mistake == "column form")
            offsets = formats.column_scale_offsets(case.rows, case.columns, case.offsets, discrete)
        flat = np.zeros(formats.scale_bytes(*scales.shape), np.uint8)
        flat[offsets[offsets >= 0]] = scales[offsets >= 0]
        physical = (1, -(-scales.shape[0] // 128), -(-scales.shape[1] // 4), 32, 4, 4)
        outputs[f"sfd_{name}"] = cases.tensor_of(flat, case.sf).view(physical).permute(3, 4, 1, 5, 2, 0)
        outputs[f"d_{name}"] = cases.tensor_of(codes, case.d).unsqueeze(-1)
    return outputs


def no_start(case):
    return cases.Starts(np.zeros(case.rows), np.zeros((case.experts, case.columns)), np.array(-np.inf))


STAND_IN_CASES = [
    Case("dsrelu", (256, 256, 768), m=1024, n=80, k=96, dbias=True),
    Case("dsrelu", (256, 768), n=160, k=96, d="e4m3", norm=3.0, discrete_col_sfd=True, options=DSRELU_OPTIONS[3]),
    Case("dglu", (256, 512), n=96, k=96, ab="fp4", sf="e4m3", vec=16, d="f32", dbias=True),
    Case("dglu", (512, 768), n=96, k=96, d="e5m2", dbias=True, options={"act_func": "dgeglu"}),
    Case("dglu", (512, 768), n=96, k=96, ab="bf16", d="fp16", options={"act_func": "dgeglu"}),
    Case("dglu", (256,), n=32, k=32, ab="e5m2", c="fp16", options={"act_func": "dsituglu"}),
    Case("dsrelu", (256, 768), n=160, k=96, d="e4m3", norm=3.0, discrete_col_sfd=True, options=DSRELU_OPTIONS[2]),
]


@pytest.mark.parametrize("case", STAND_IN_CASES, ids=str)
@pytest.mark.parametrize("data", ["random", "exact"])
def test_stand_in_passes(case, data):
    case = cases.exact(case) if data == "exact" else case
    built = cases.build(case)
    outputs = stand_in(built)
    cases.check(built, outputs, no_start(case))


MISTAKES = {
    "dropped K block": (0, 2),
    "alpha once": (2, 3, 4),
    "prob in dprob": (0, 2),
    "gate and up swapped": (2, 3),
    "norm twice": (6,),
    "scale rounded down": (6, 3),
    "row scale off by one": (6,),
    "col scale off by one": (3,),
    "column form": (6,),
    "dbias of rounded D": (0,),
}


@pytest.mark.parametrize(("mistake", "index"), [(m, i) for m, where in MISTAKES.items() for i in where])
@pytest.mark.parametrize("data", ["random", "exact"])
def test_mistakes_are_caught(mistake, index, data):
    case = STAND_IN_CASES[index]
    if mistake == "dbias of rounded D":
        case = dataclasses.replace(case, c="f32")
        if data == "exact":
            pytest.skip("exact data rounds to BF16 without loss")
    case = cases.exact(case) if data == "exact" else case
    built = cases.build(case)
    outputs = stand_in(built, mistake)
    with pytest.raises(AssertionError, match="outside|padding"):
        cases.check(built, outputs, no_start(case))


@pytest.mark.parametrize("case", STAND_IN_CASES[:4], ids=str)
def test_bounds_are_tight(case):
    """The comparison may leave few elements more than one code."""
    want = cases.build(case).expected()
    name = "bf16" if case.quantized else case.d
    low, high = (round_to(name, x) for x in (want.d.low, want.d.high))
    assert np.mean(low == high) > (0.0 if name == "f32" else 0.95)
    # K additions, and sum|terms| is a few times the sum: sqrt(K) for independent terms.
    size = np.maximum(np.abs(want.d.value), 1e-3 * np.abs(want.d.value).max())
    assert np.median(want.d.error / size) < 2 * np.sqrt(case.k) * case.k * oracle.U


def test_pairwise_covers_every_allowed_pair():
    options = {"a": [1, 2, 3], "b": list("xyz"), "c": [True, False], "d": [0, 1, 2, 3]}

    def allowed(row):
        return not (row["a"] == 1 and row["b"] == "x") and (row["c"] or row["d"] != 3)

    rows = pairwise(options, allowed)
    possible = [dict(zip(options, v, strict=True)) for v in itertools.product(*options.values())]
    possible = [row for row in possible if allowed(row)]
    assert all(row in possible for row in rows)
    assert len(rows) < len(possible) / 2

    def pairs(some):
        return {pair for row in some for pair in itertools.combinations(sorted(row.items()), 2)}

    assert pairs(rows) == pairs(possible)
