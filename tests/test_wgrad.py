"""wgrad and wgrad_out against the oracle: every option pair, exact and random data; then single points of the contract."""

import itertools
from dataclasses import replace

import cases
import cases_forward as forward
import numpy as np
import oracle_formats as formats
import pytest
import torch
from cases import FP4
from cases_forward import WgradCase
from compare import within
from pairwise import pairwise

OPTIONS = {
    "operands": [(ab, sf, vec) for ab in FP4 for sf, vec in (("e4m3", 16), ("e8m0", 16), ("e8m0", 32))]
    + [("e4m3", "e8m0", 32), ("e5m2", "e8m0", 32), ("bf16", "e8m0", 16)],
    "offsets": [((256, 512), None), ((0, 256, 256, 768, 768), 1024), ((256,), None), ((512, 768), 1024)],
    # Tails of every tile: 256 rows, 64 rows, 32 and 16 columns. 5 and 33 have no whole rows of 16 bytes.
    "m": [5, 16, 48, 144, 272],
    "n": [16, 33, 80, 272],
    "a_major": ["tokens", "rows"],
    "b_major": ["tokens", "rows"],
    "discrete": [True, False],
    "sf_form": ["view", "physical", "flat"],
    "scales": ["none", "a", "b", "both"],
    "d": ["bf16", "fp16", "f32"],
    "form": ["functional", "out", "accumulate"],
    "poison": [False, True],
}


def allowed(row: dict) -> bool:
    ab = row["operands"][0]
    rows = [row[side] for side, major in (("m", "a_major"), ("n", "b_major")) if row[major] == "rows"]
    if ab in FP4:
        return not rows
    return all(size % (8 if ab == "bf16" else 16) == 0 for size in rows)


def case_of(row: dict, seed: int = 0) -> WgradCase:
    row = dict(row)
    ab, sf, vec = row.pop("operands")
    offsets, tokens = row.pop("offsets")
    return WgradCase(offsets, tokens, ab=ab, sf=sf, vec=vec, seed=seed, **row)


PAIRS = [case_of(row, seed) for seed, row in enumerate(pairwise(OPTIONS, allowed))]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_random(case):
    forward.run_wgrad(case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_exact(case):
    """Every bit of the output."""
    forward.run_wgrad(replace(case, data="exact"))


@pytest.mark.slow
@pytest.mark.parametrize("operands", OPTIONS["operands"], ids=str)
@pytest.mark.parametrize("d", OPTIONS["d"])
@pytest.mark.parametrize("form", OPTIONS["form"])
def test_full_product(operands, d, form):
    names = ("a_major", "b_major", "discrete", "scales", "sf_form")
    for values in itertools.product(*[OPTIONS[name] for name in names]):
        row = {"operands": operands, "d": d, "form": form, **dict(zip(names, values, strict=True))}
        row.update(offsets=((256, 256, 768), 1024), m=144, n=80, poison=True)
        if allowed(row):
            forward.run_wgrad(case_of(row))
            forward.run_wgrad(replace(case_of(row), data="exact"))


@pytest.mark.parametrize("m", [1, 8, 64, 130, 256, 520])
@pytest.mark.parametrize("n", [1, 31, 40, 256, 260])
def test_sizes(m, n):
    forward.run_wgrad(WgradCase((256,), m=m, n=n, vec=16, data="exact"))
    forward.run_wgrad(WgradCase((256,), m=m, n=n, ab="fp4", vec=32, data="exact"))


@pytest.mark.parametrize("major", ["tokens", "rows"])
@pytest.mark.parametrize("size", [16, 32, 240, 528])
def test_fp8_sizes(major, size):
    case = WgradCase((512,), m=size, n=48, ab="e4m3", a_major=major, data="exact")
    forward.run_wgrad(case)
    forward.run_wgrad(replace(case, m=48, n=size, a_major="tokens", b_major=major))


@pytest.mark.parametrize("discrete", [True, False])
def test_many_experts(discrete):
    sizes = np.zeros(64, int)
    sizes[[0, 7, 8, 63]] = 256, 512, 256, 256
    case = WgradCase(tuple(np.cumsum(sizes).tolist()), 1536, m=16, n=16, ab="e4m3", discrete=discrete, poison=True)
    forward.run_wgrad(case)


# Single points ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ab", ["bf16", "e4m3", "fp4"])
def test_layouts_and_scale_forms_change_no_bit(ab):
    """Either contiguous dimension, either column form, dense or list output: the same numbers, the same bits."""
    case = WgradCase((256, 256, 768), ab=ab, vec=16 if ab == "bf16" else 32)
    reference, _ = forward.call_wgrad(forward.build_wgrad(case))
    others = [{"form": "out"}, {"discrete": False}, {"sf_form": "flat"}]
    if ab != "fp4":
        others += [{"a_major": "rows"}, {"b_major": "rows"}, {"a_major": "rows", "b_major": "rows"}]
    for change in others:
        out, _ = forward.call_wgrad(forward.build_wgrad(replace(case, **change)))
        for got, want in zip(out, reference, strict=True):
            assert torch.equal(cases.raw(got), cases.raw(want)), change


def ones(offsets, rows: int, value: float):
    """BF16 operands whose first token of each expert gives `value` everywhere, and whose others give 0."""
    a = torch.zeros(rows, offsets[-1], dtype=torch.bfloat16)
    b = torch.zeros(offsets[-1], 8, dtype=torch.bfloat16)
    for _, tokens in forward.spans(offsets):
        a[:, tokens.start], b[tokens.start] = value, 1.0
    return a, b, torch.tensor(offsets, dtype=torch.int32)


def test_accumulation_is_rounded_once():
    """0.75 + 256.5 is 257.25, which BF16 rounds to 258; 256.5 alone would be rounded to 256, and 256.75 to 256."""
    a, b, offsets = ones((256,), 16, 1.0)
    out = [torch.full((16, 8), 0.75, dtype=torch.bfloat16)]
    scale = torch.tensor([256.5])
    keywords = {"out": out, "accumulate": True, "global_scale_a": scale}
    cases.operator("wgrad_out")(a, b, offsets, **keywords)
    assert (out[0] == 258).all()
    assert (cases.operator("wgrad")(a, b, offsets, global_scale_a=scale) == 256).all()


def test_without_accumulate_the_old_value_is_not_read():
    a, b, offsets = ones((256, 256), 16, 2.0)
    out = [torch.full((16, 8), torch.nan) for _ in range(2)]
    cases.operator("wgrad_out")(a, b, offsets, out=out)
    assert (out[0] == 2).all()
    assert not out[1].any()


def test_an_expert_without_tokens_leaves_its_accumulator():
    """To the bit, a negative zero included; its global scales mean nothing."""
    a, b, offsets = ones((256, 256), 16, 2.0)
    out = [torch.full((16, 8), -0.0) for _ in range(2)]
    scale = torch.tensor([3.0, torch.nan])
    keywords = {"out": out, "accumulate": True, "global_scale_a": scale, "global_scale_b": scale}
    cases.operator("wgrad_out")(a, b, offsets, **keywords)
    assert (out[0] == 18).all()
    assert torch.equal(cases.raw(out[1]), cases.raw(torch.full((16, 8), -0.0)))


def test_global_scales_multiply_and_may_be_any_number():
    a, b, offsets = ones((256, 512, 768), 16, 2.0)
    scales = {"global_scale_a": torch.tensor([0.0, -3.0, 1.0]), "global_scale_b": torch.tensor([7.0, 0.5, -1.0])}
    out = cases.operator("wgrad")(a, b, offsets, d_dtype=torch.float32, **scales)
    assert out[:, 0, 0].tolist() == [0.0, -3.0, -2.0]


def test_the_global_scale_is_applied_before_rounding():
    """NVFP4: a product beyond FP16's range comes back into it."""
    a, b, offsets = ones((256,), 16, 1024.0)
    b *= 128
    out = cases.operator("wgrad")(a, b, offsets, d_dtype=torch.float16, global_scale_b=torch.tensor([2.0**-10]))
    assert (out == 128).all()


@pytest.mark.parametrize("ab", ["bf16", "e4m3", "fp4"])
@pytest.mark.parametrize("tokens", [0, 256])
def test_no_tokens_at_all(ab, tokens):
    case = WgradCase((0, 0, 0), tokens, ab=ab, vec=16 if ab == "bf16" else 32, poison=True)
    for form in ("functional", "out", "accumulate"):
        out = forward.run_wgrad(replace(case, form=form))
        assert form == "accumulate" or not any(t.any() for t in out)


@pytest.mark.parametrize("ab", ["bf16", "e4m3", "fp4"])
@pytest.mark.parametrize("discrete", [True, False])
def test_tokens_past_the_last_offset_are_not_read(ab, discrete):
    case = WgradCase((256, 512), 1024, ab=ab, vec=16 if ab == "bf16" else 32, discrete=discrete)
    clean, _ = forward.call_wgrad(forward.build_wgrad(case))
    dirty, _ = forward.call_wgrad(forward.build_wgrad(replace(case, poison=True)))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("ab", ["bf16", "e4m3", "fp4"])
@pytest.mark.parametrize("where", ["a", "b", "global_scale_a", "global_scale_b"])
def test_nan_of_one_expert_stays_there(ab, where):
    """NaN in one token of the second expert: in the first and the third no bit changes."""
    case = WgradCase((256, 512, 1024), ab=ab, vec=16 if ab == "bf16" else 32)
    built, clean = forward.build_wgrad(case), forward.call_wgrad(forward.build_wgrad(case))[0]
    if where.startswith("global"):
        built.arguments[where][1] = torch.nan
        wrong = (slice(None), slice(None))
    elif ab == "bf16":
        index = (3, 300) if where == "a" else (300, 3)
        built.arguments[where][index] = torch.nan
    else:  # a scale byte: E8M0's NaN, of row 3 and the second block of the expert, in its own tensor
        rows = case.m if where == "a" else case.n
        byte = formats.ceil_div(rows, 128) * 512 * 2 + formats.scale_offsets(rows, 8)[3, 1]
        flat = built.arguments[f"sf{where}"].permute(5, 2, 4, 0, 1, 3).view(torch.uint8).view(-1)
        flat[byte] = 0xFF
    if where in ("a", "b"):
        wrong = (3, slice(None)) if where == "a" else (slice(None), 3)
    out, _ = forward.call_wgrad(built)
    for g in (0, 2):
        assert torch.equal(cases.raw(out[g]), cases.raw(clean[g]))
    assert out[1][wrong].isnan().all()
    assert out[1].isnan().sum() == out[1][wrong].numel()


@pytest.mark.parametrize("ab", ["bf16", "e4m3"])
def test_equals_the_gradient_of_mm(ab):
    """D = X W^T by mm, so dW = dY^T X: wgrad of the transposed rows against FP64 autograd of the same numbers."""
    rng = np.random.default_rng(0)
    case = WgradCase((256, 768), ab=ab, m=32, n=64, scales="none", vec=16 if ab == "bf16" else 32, d="f32")
    built = forward.build_wgrad(case)
    dy, x = (torch.from_numpy(v) for v in (built.problem.a, built.problem.b))
    weights = torch.from_numpy(rng.standard_normal((2, 32, 64))).requires_grad_()
    loss = sum((dy[:, r] * (weights[g] @ x[:, r])).sum() for g, r in forward.spans(case.offsets))
    (gradient,) = torch.autograd.grad(loss, [weights])
    out, _ = forward.call_wgrad(built)
    for g, want in enumerate(built.expected()):
        np.testing.assert_allclose(want.value, gradient[g].numpy(), rtol=1e-12, atol=1e-12)
        within(f"out[{g}]", out[g].numpy(), gradient[g].numpy() - want.error, gradient[g].numpy() + want.error)


@pytest.mark.parametrize("vec", [16, 32])
def test_quantized_by_columns(vec):
    """What `quantize` writes by columns is what wgrad reads: both per-expert scale forms, FP8 and FP4."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([256, 768], dtype=torch.int32)
    x, dy = torch.randn(768, 48, generator=generator), torch.randn(768, 80, generator=generator)
    formats_of = {32: ("e4m3", "e8m0"), 16: ("fp4", "e4m3")}[vec]
    dtype, scale = (cases.DTYPES[name] for name in formats_of)
    quantize, dequantize = cases.operator("quantize"), cases.operator("dequantize")
    for discrete in (True, False):
        ends = offsets if discrete else None
        operands, values = [], []
        for t in (dy, x):
            data, scales = quantize(t, dtype, scale, vec, axis="col", padded_offsets=ends)
            values.append(dequantize(data, scales, vec, axis="col", padded_offsets=ends))
            # FP4 by columns comes transposed and packed along the rows already.
            operands += [data if vec == 16 else data.T, scales]
        a, sfa, b, sfb = operands
        out = cases.operator("wgrad")(
            a, b.T, offsets, sfa=sfa, sfb=sfb, sf_vec_size=vec, discrete_col_sfd=discrete, d_dtype=torch.float32
        )
        for g, tokens in forward.spans([256, 768]):
            da, db = (v[tokens].double() for v in values)
            terms = da.abs().T @ db.abs()
            tolerance = (tokens.stop - tokens.start) * 2.0**-24 * terms  # one rounding for each addition
            assert ((out[g] - da.T @ db).abs() <= tolerance).all()
