"""Properties over random problems (hypothesis): the oracle, linearity, independence of rows, round trips."""

import cases
import numpy as np
import oracle_formats as formats
import pytest
import torch
from cases import FP4, FP8, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_quantize import KINDS, check

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

offsets = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(
    lambda counts: tuple(int(x) * 256 for x in np.cumsum(counts))
)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def problems(draw, op: str) -> Case:
    formats_of = [(ab, "e8m0", 32) for ab in FP8] + [("fp4", "e4m3", 16), ("uint8", "e8m0", 16), ("fp4", "e8m0", 32)]
    if op == "dglu":
        formats_of.append(("bf16", "e8m0", 16))
    ab, sf, vec = draw(st.sampled_from(formats_of))
    ends = draw(offsets)
    d = draw(st.sampled_from(["bf16", "fp16", "f32"] + (list(FP8) if ab in FP8 else [])))
    c = draw(st.sampled_from(["bf16", "fp16", "f32"] + (list(FP8) if ab != "bf16" else [])))
    options = {}
    if op == "dsrelu":
        options["c_role"] = draw(st.sampled_from(["grad_output", "preactivation"]))
        clamp = draw(st.sampled_from([None, 0.5, 4.0]))
        if clamp:
            options["tanh_clamp_scale"] = clamp
        n = draw(st.integers(1, 12)) * (16 if d in FP8 or c in FP8 else 8)
    else:
        n = draw(st.integers(1, 5)) * 32
        acts = ["dswiglu", "dgeglu"] + (["dsituglu"] if ab != "bf16" else [])
        options["act_func"] = draw(st.sampled_from(acts))
        if options["act_func"] == "dgeglu":
            options["glu_clamp_max"] = draw(st.floats(0.5, 10))
            options["glu_clamp_min"] = draw(st.floats(-10, 0))
            options["linear_offset"] = draw(st.sampled_from([None, 0.0, -0.5]))
            options["geglu_alpha"] = draw(st.floats(0.25, 3))
    weights = ["dense_k", "list_k", "ptrs_k"]
    if ab not in FP4 and n % 16 == 0:
        weights += ["dense_n", "list_n", "ptrs_n"]
    return Case(
        op,
        ends,
        ends[-1] + draw(st.sampled_from([0, 256])),
        n=n,
        k=draw(st.integers(1, 6)) * (32 if ab in FP4 else 16),
        ab=ab,
        sf=sf,
        vec=vec,
        c=c,
        d=d,
        weights=draw(st.sampled_from(weights)),
        sf_form=draw(st.sampled_from(["view", "physical", "flat"])),
        rank=draw(st.sampled_from([2, 3])),
        dbias=draw(st.booleans()),
        discrete_col_sfd=d in FP8 and draw(st.booleans()),
        norm=draw(st.floats(np.float32(1e-3), np.float32(1e3), width=32)),
        form=draw(st.sampled_from(["functional", "out"])),
        poison=draw(st.booleans()),
        seed=draw(seeds),
        options=options,
    )


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
@given(data=st.data())
@SETTINGS
def test_random_problems(op, data):
    case = data.draw(problems(op))
    if case.rows == 0:
        case = Case(op, m=0, offsets=case.offsets, n=case.n, k=64, ab="e4m3", d="bf16", form=case.form)
    cases.run(case)


@given(seed=seeds, factor=st.sampled_from([-2.0, 0.25, 0.5, 4.0]), op=st.sampled_from(["dsrelu", "dglu"]))
@SETTINGS
def test_d_is_linear_in_prob(seed, factor, op):
    """Powers of two scale D, dbias and amax exactly, and leave dprob alone."""
    case = Case(op, (256,), n=64, d="f32", dbias=True, seed=seed)
    built = cases.build(case)
    first = cases.call(built)[0]
    built.positional[-1].mul_(factor)
    second = cases.call(built)[0]
    assert torch.equal(second["d_row"], first["d_row"] * factor)
    assert torch.equal(second["dbias"], first["dbias"] * factor)
    assert torch.equal(second["dprob"], first["dprob"])


@given(seed=seeds, role=st.sampled_from(["grad_output", "preactivation"]), act=st.sampled_from(["dswiglu", "dgeglu"]))
@SETTINGS
def test_rows_are_independent(seed, role, act):
    """Permuting rows within an expert permutes D and dprob, to the bit."""
    for op, options in (("dsrelu", {"c_role": role}), ("dglu", {"act_func": act})):
        case = Case(op, (256,), n=64, d="bf16", sf_form="flat", seed=seed, options=options)
        built = cases.build(case)
        first = cases.call(built)[0]
        order = torch.from_numpy(np.random.default_rng(seed).permutation(256))
        moved = cases.build(case)
        for i in (0, 2, len(built.positional) - 1):
            moved.positional[i] = cases.raw(built.positional[i])[order].view(built.positional[i].dtype)
        places = torch.from_numpy(formats.scale_offsets(256, 2))
        flat = built.keywords["sfa"].view(torch.uint8)
        moved.keywords["sfa"] = torch.zeros_like(flat)
        moved.keywords["sfa"][places.flatten()] = flat[places[order].flatten()]
        moved.keywords["sfa"] = moved.keywords["sfa"].view(cases.DTYPES["e8m0"])
        second = cases.call(moved)[0]
        for name in ("d_row", "dprob"):
            assert torch.equal(cases.raw(second[name]), cases.raw(first[name])[order]), (op, name)
        assert torch.equal(second["amax"], first["amax"])


@given(
    seed=seeds,
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, 10),
    columns=st.integers(1, 12),
    exponents=st.tuples(st.integers(-120, 100), st.integers(0, 25)),
    norm=st.floats(np.float32(2.0**-20), np.float32(2.0**20), width=32),
    axis=st.sampled_from(["row", "col"]),
)
@SETTINGS
def test_quantizer(seed, kind, rows, columns, exponents, norm, axis):
    rng = np.random.default_rng(seed)
    shape = (rows * 16, columns * 16)
    low, spread = exponents
    x = rng.standard_normal(shape) * np.exp2(low + rng.integers(0, spread + 1, shape))
    x[rng.random(shape) < 0.1] = 0
    with np.errstate(over="ignore"):
        check(x.astype(np.float32), kind, norm, axis)


@given(seed=seeds, kind=st.sampled_from(["mxfp8", "mxfp8_e5m2", "mxfp4", "mxfp4_16"]))
@SETTINGS
def test_quantizing_twice_changes_nothing(seed, kind):
    """With power-of-two scales a quantised matrix is a fixed point of quantise and dequantise."""
    data_format, scale_format, block = KINDS[kind]
    dtype = cases.DTYPES["fp4" if data_format == "e2m1" else data_format]
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((32, 64)).astype(np.float32))
    quantize, dequantize = cases.operator("quantize"), cases.operator("dequantize")
    once = dequantize(*quantize(x, dtype, cases.DTYPES[scale_format], block), block)
    twice = dequantize(*quantize(once, dtype, cases.DTYPES[scale_format], block), block)
    assert torch.equal(once, twice)
