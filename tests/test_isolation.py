"""Nothing is read that should not be, nothing written that should not be."""

from dataclasses import replace

import cases
import numpy as np
import oracle_formats as formats
import pytest
import torch
from cases import DTYPES, Case, operator

# One case of each operand family and operator; quantised D, both column forms, dbias.
SEVERAL = [
    Case("dsrelu", (256, 512), m=1024, n=80, k=96, d="e4m3", dbias=True, discrete_col_sfd=True, norm=3.0),
    Case("dsrelu", (256, 512), m=1024, n=80, k=96, ab="fp4", sf="e4m3", vec=16, dbias=True),
    Case("dglu", (256, 512), m=1024, n=96, k=96, d="e5m2", dbias=True),
    Case("dglu", (256, 512), m=1024, n=96, k=96, ab="uint8", sf="e8m0", vec=16, d="f32", dbias=True),
    Case("dglu", (256, 512), m=1024, n=96, k=96, ab="bf16", vec=16, dbias=True),
]


def same(got: dict, want: dict) -> None:
    for name, tensor in want.items():
        assert torch.equal(cases.raw(got[name]), cases.raw(tensor)), name


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("weights", ["dense_k", "list_k", "ptrs_k"])
def test_nan_in_what_must_not_be_read(case, weights):
    """NaN in rows past the last offset and in padding scale bytes changes no bit of any output."""
    case = replace(case, weights=weights)
    clean = cases.call(cases.build(case))[0]
    built = cases.build(replace(case, poison=True))
    outputs, starts = cases.call(built)
    same(outputs, clean)
    cases.check(built, outputs, starts)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_guard_bands_and_poisoned_buffers(case, deterministic):
    """Buffers full of NaN bytes come back fully written (the tail as zeros), the bytes round them untouched."""
    case = replace(case, form="out", poison=True, options={"deterministic": deterministic})
    cases.run(case)  # Guarded.check is in the call
    cases.run(cases.exact(case))


def test_guards_notice():
    guarded = cases.Guarded()
    tensor = guarded.tensor((4, 4), torch.float32)
    guarded.check()
    tensor.as_strided((1,), (1,), tensor.storage_offset() + 16).zero_()
    with pytest.raises(AssertionError, match="outside output 0"):
        guarded.check()


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("form", ["functional", "out"])
def test_inputs_are_not_modified(case, form):
    built = cases.build(replace(case, form=form))
    inputs = [t for t in built.positional if isinstance(t, torch.Tensor)]
    inputs += [t for t in built.keywords.values() if isinstance(t, torch.Tensor)]
    inputs += [
        t for group in (built.positional, built.keywords.values()) for g in group if isinstance(g, list) for t in g
    ]
    inputs = [t for t in inputs if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in inputs]
    cases.call(built)
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(bits(tensor), bits(copy))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.int32, torch.int64) else cases.raw(tensor)


# An expert's NaN stays in the expert --------------------------------------------------------------------------


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("where", ["b", "alpha"])
def test_nan_of_one_expert_stays_there(case, where):
    case = replace(
        case, offsets=(256, 512, 768), weights="list_k", options={"c_role": "preactivation"} if case.width == 1 else {}
    )
    clean_built, built = cases.build(case), cases.build(case)
    for b in (clean_built, built):
        b.positional[4].copy_(torch.tensor([1.0, 0.5, -1.0]))
    clean = cases.call(clean_built)[0]
    if where == "alpha":
        built.positional[4][1] = torch.nan
    elif case.scaled:
        built.keywords["sfb"][1].view(torch.uint8).fill_(0xFF)
    else:
        built.positional[1][1].fill_(torch.nan)
    outputs = cases.call(built)[0]
    other = torch.ones(1024, dtype=torch.bool)
    other[256:512] = False
    for name in ("d_row", "d_col", "dprob"):
        if clean[name].numel():
            assert torch.equal(cases.raw(outputs[name])[other], cases.raw(clean[name])[other]), name
    for name in ("dbias", "amax"):
        if clean[name].numel():
            assert torch.equal(cases.raw(outputs[name])[[0, 2]], cases.raw(clean[name])[[0, 2]]), name
    # prob is zero in some rows and relu(C) in some columns; 0 * NaN is NaN, so all of the expert is NaN.
    d = outputs["d_row"].reshape(1024, -1)
    assert np.isnan(cases.values_of(d[256:512])).all()
    assert outputs["dprob"].flatten()[256:512].isnan().all()
    assert outputs["dbias"][1].isnan().all()
    if outputs["amax"].numel():
        assert outputs["amax"][1].isnan().all()
    if case.quantized:
        rows = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(1024, formats.ceil_div(case.columns, 32))]
        assert (rows[256:512] == 0xFF).all()
        places = formats.column_scale_offsets(1024, case.columns, case.offsets, case.discrete_col_sfd)
        columns = cases.scale_matrix(outputs["sfd_col"])
        assert (columns[places[:, 8:16]] == 0xFF).all()
        assert (columns[places[:, :8]] != 0xFF).all()


def test_nan_row_and_nan_column():
    """A NaN in one row of A reaches that row; a NaN in one row of B reaches that column."""
    case = Case("dsrelu", (256,), n=64, k=64, d="f32", dbias=True, options={"c_role": "preactivation"})
    built = cases.build(case)
    built.positional[4].fill_(1.0)
    built.positional[0].view(torch.uint8)[7, 3] = 0x7F
    built.positional[1][0].view(torch.uint8)[11, 50] = 0x7F
    outputs = cases.call(built)[0]
    d = outputs["d_row"][..., 0].isnan()
    want = torch.zeros(256, 64, dtype=torch.bool)
    want[7] = True
    want[:, 11] = True
    assert torch.equal(d, want)
    assert outputs["dbias"][0, :, 0].isnan().all()  # row 7 is in every column
    assert outputs["dprob"].isnan().all()


@pytest.mark.parametrize(
    ("op", "options"),
    [("dsrelu", {"c_role": r, **s}) for r in ("grad_output", "preactivation") for s in ({}, {"tanh_clamp_scale": 2.0})]
    + [("dglu", {"act_func": act}) for act in ("dswiglu", "dgeglu", "dsituglu")],
)
@pytest.mark.parametrize("column", [3, 40])
def test_nan_in_c(op, options, column):
    """A NaN of C reaches its row's dprob and the gradients that it feeds, and nothing else."""
    case = Case(op, (256,), n=64, d="f32", options=options)
    built = cases.build(case)
    clean = cases.call(built)[0]
    built.positional[2] = built.positional[2].clone()
    built.positional[2][9, column] = torch.nan
    outputs = cases.call(built)[0]
    gate = column // 64 * 64 + column % 32
    fed = [column] if op == "dsrelu" else [gate, gate + 32]
    want = clean["d_row"].isnan()
    want[9, fed] = True
    assert outputs["d_row"][9, fed[0]].isnan()  # dup does not see up, but dgate sees both
    assert not (outputs["d_row"].isnan() & ~want).any()
    assert outputs["dprob"].isnan().flatten().nonzero().flatten().tolist() == [9]
    same = ~want[..., 0]
    assert torch.equal(outputs["d_row"][..., 0][same], clean["d_row"][..., 0][same])


@pytest.mark.parametrize("byte", [0x00, 0xFE])
def test_extreme_scales(byte):
    """2^-127 is a number, and so is 2^127."""
    case = Case("dsrelu", (256,), n=32, k=32, c="f32", d="f32", options={"c_role": "preactivation"})
    built = cases.build(cases.exact(case))
    built.positional[4].fill_(1.0)
    built.keywords["sfa"].view(torch.uint8).fill_(127)
    built.keywords["sfb"][0].view(torch.uint8).fill_(127)
    one = cases.call(built)[0]
    built.keywords["sfa"].view(torch.uint8).fill_(byte)
    # 2^127 * G would overflow FP32 for |G| > 1: bring it back with alpha, and 2^-127 the other way.
    built.keywords["sfb"][0].view(torch.uint8).fill_(127 - 20 if byte else 127 + 20)
    outputs = cases.call(built)[0]
    want = one["d_row"].double() * 2.0 ** (107 if byte else -107)
    assert torch.equal(outputs["d_row"].double(), want)
    assert want.any()


# Empty experts, empty problems --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
@pytest.mark.parametrize("weights", ["list_k", "ptrs_k"])
def test_empty_experts_leave_the_others_alone(op, weights):
    """Offsets [0, 256, 256, 512, 512]: experts 1 and 3 give the bits they give by themselves."""
    case = Case(op, (0, 256, 256, 512, 512), n=64, k=64, d="bf16", dbias=True, weights=weights)
    built = cases.build(case)
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    assert not outputs["dbias"][[0, 2, 4]].any()
    assert (outputs["amax"][[0, 2, 4]] == -torch.inf).all()
    alone = Case(op, (256, 512), n=64, k=64, d="bf16", dbias=True, weights=weights)
    other = cases.build(alone)
    both = [1, 3]
    other.positional[0], other.positional[2] = built.positional[0], built.positional[2]
    other.positional[4] = built.positional[4][both].contiguous()
    if op == "dglu":
        other.positional[5] = built.positional[5][both].contiguous()
    other.positional[-1] = built.positional[-1]
    other.keywords["sfa"] = built.keywords["sfa"]
    if weights == "list_k":
        other.positional[1] = [built.positional[1][i] for i in both]
        other.keywords["sfb"] = [built.keywords["sfb"][i] for i in both]
    else:
        for name in ("b_ptrs", "sfb_ptrs"):
            other.keywords[name] = built.keywords[name][both].contiguous()
    few = cases.call(other)[0]
    for name in ("d_row", "dprob"):
        assert torch.equal(cases.raw(few[name]), cases.raw(outputs[name]))
    for name in ("dbias", "amax"):
        assert torch.equal(cases.raw(few[name]), cases.raw(outputs[name][both]))


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
@pytest.mark.parametrize("m", [0, 256])
@pytest.mark.parametrize(("ab", "d"), [("e4m3", "bf16"), ("e4m3", "e4m3"), ("fp4", "f32"), ("bf16", "bf16")])
@pytest.mark.parametrize("form", ["functional", "out"])
def test_no_rows_at_all(op, m, ab, d, form):
    if op == "dsrelu" and ab == "bf16":
        return
    case = Case(op, (0, 0, 0, 0), m=m, n=64, k=64, ab=ab, d=d, dbias=True, form=form, weights="ptrs_k")
    built = cases.build(case)
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    assert outputs["d_row"].shape[0] == m
    if form == "functional" and outputs["amax"].numel():
        assert (outputs["amax"] == -torch.inf).all()


def test_no_rows_are_still_checked():
    built = cases.build(Case("dsrelu", (0,), m=0))
    built.positional[4] = built.positional[4].double()
    with pytest.raises(RuntimeError, match="^alpha: expected"):
        cases.call(built)


def test_null_pointers_of_experts_with_rows_are_errors():
    for name in ("b_ptrs", "sfb_ptrs"):
        built = cases.build(Case("dsrelu", (256, 256, 512), weights="ptrs_k"))
        built.keywords[name][2] = 0
        with pytest.raises(RuntimeError, match=rf"^{name}\[2\]: expected"):
            cases.call(built)


def test_output_tails_are_zero():
    """Asserted by hand, apart from the oracle: rows past the last offset, in every output that has rows."""
    for discrete in (False, True):
        case = Case("dglu", (256, 512), m=1024, n=96, d="e4m3", form="out", poison=True, discrete_col_sfd=discrete)
        outputs = cases.call(cases.build(case))[0]
        for name in ("d_row", "d_col", "dprob"):
            assert not cases.raw(outputs[name])[512:].any(), name
            assert cases.raw(outputs[name])[:512].any(), name
        rows = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(1024, 6)]
        assert not rows[512:].any()
        flat = cases.scale_matrix(outputs["sfd_col"])
        if discrete:
            assert not flat[512 // 128 * 2 * 512 :].any()
        else:
            assert not flat[formats.scale_offsets(192, 32)][:, 16:].any()


def test_outputs_may_have_any_unit_stride():
    """Strides of dimensions of one element mean nothing."""
    case = Case("dsrelu", (256,), form="out", dbias=True)
    built = cases.build(case)
    buffers = cases.output_buffers(case, cases.Guarded())
    for name in ("dprob", "dbias", "amax"):
        buffers[name].zero_()
    buffers["d_row"] = buffers["d_row"].as_strided((256, 64, 1), (64, 1, 7))
    buffers["dprob"] = buffers["dprob"].as_strided((256, 1, 1), (1, 99, 5))
    operator("dsrelu_out")(*built.positional, **built.keywords, **buffers)
    assert torch.equal(buffers["d_row"], cases.call(cases.build(replace(case, form="functional")))[0]["d_row"])


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_optional_outputs_may_be_left_out(case):
    """Without dbias, amax and (16- and 32-bit D) d_col the other outputs are the same bits."""
    case = replace(case, form="out")
    built = cases.build(case)
    everything = cases.call(built)[0]
    buffers = cases.output_buffers(replace(case, dbias=False), cases.Guarded())
    buffers.pop("amax", None)
    if not case.quantized:
        buffers.pop("d_col", None)
    rng = np.random.default_rng(case.seed + 1)  # the start values of cases.call
    buffers["dprob"].copy_(torch.from_numpy(rng.integers(-4, 5, case.rows) * 0.5).view(buffers["dprob"].shape))
    operator(f"{case.op}_out")(*built.positional, **built.keywords, **buffers)
    for name, tensor in buffers.items():
        assert torch.equal(cases.raw(tensor), cases.raw(everything[name])), name


def test_d_col_may_be_d_row_where_it_is_its_copy():
    case = Case("dsrelu", (256,), m=512, form="out")
    built = cases.build(case)
    buffers = cases.output_buffers(case, cases.Guarded())
    buffers["d_col"] = buffers["d_row"]
    operator("dsrelu_out")(*built.positional, **built.keywords, **buffers)
    want = cases.call(cases.build(replace(case, form="functional")))[0]["d_row"]
    assert torch.equal(buffers["d_row"], want)


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
def test_trailing_dimensions_may_be_mixed(op):
    """D follows the rank of c, dprob that of prob, a has its own."""
    case = Case(op, (256, 512), n=64, d="e4m3")
    built = cases.build(case)
    want = cases.call(built)[0]
    for a, c, prob in ((2, 3, 1), (3, 2, 3), (2, 2, 3), (3, 3, 1)):
        mixed = cases.build(case)
        if a == 2:
            mixed.positional[0] = mixed.positional[0].squeeze(-1)
        if c == 2:
            mixed.positional[2] = mixed.positional[2].squeeze(-1)
        if prob == 1:
            mixed.positional[-1] = mixed.positional[-1].flatten()
        got = cases.call(mixed)[0]
        for name in ("d_row", "d_col"):
            assert got[name].shape == (512, case.columns, 1)[:c]
            assert torch.equal(cases.raw(got[name]).flatten(), cases.raw(want[name]).flatten())
        assert got["dprob"].shape == (512, 1, 1)[:prob]
        assert torch.equal(got["dprob"].flatten(), want["dprob"].flatten())


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    """M N > 2^31: the last rows are what they are alone. 7 GB."""
    m, n, k = 524544, 4096, 16
    generator = torch.Generator().manual_seed(0)

    def codes(*shape):
        return torch.randint(0x20, 0x48, shape, generator=generator, dtype=torch.uint8)

    a, b = codes(m, k).view(DTYPES["e4m3"]), codes(1, n, k).permute(1, 2, 0).view(DTYPES["e4m3"])
    c = codes(1024, n).repeat(m // 1024 + 1, 1)[:m].view(DTYPES["e4m3"])
    sfa = torch.full((m // 128 * 512,), 127, dtype=torch.uint8).view(DTYPES["e8m0"])
    sfb = torch.full((n // 128 * 512,), 127, dtype=torch.uint8).view(DTYPES["e8m0"])
    prob = torch.rand(m, generator=generator)

    def run(rows):
        offsets = torch.tensor([len(prob[rows])], dtype=torch.int32)
        atoms = sfa[: len(prob[rows]) // 128 * 512]
        keywords = {"sfa": atoms, "sfb": [sfb], "sf_vec_size": 32, "d_dtype": DTYPES["e4m3"]}
        keywords["norm_const"] = torch.ones(1)
        return operator("dsrelu")(a[rows], [b], c[rows], offsets, torch.ones(1), prob[rows], **keywords)

    whole, last = run(slice(0, m)), run(slice(m - 256, m))
    assert whole[0].numel() > 2**31
    for i in (0, 1, 2):
        assert torch.equal(cases.raw(whole[i][-256:]), cases.raw(last[i]))
    for i in (0, 1, 2):
        assert cases.raw(last[i]).any()


def test_quantize_leaves_its_input_alone():
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    for dtype, sf, vec in (("e4m3", "e8m0", 32), ("fp4", "e4m3", 16)):
        for axis in ("row", "col"):
            data, scales = operator("quantize")(x, DTYPES[dtype], DTYPES[sf], vec, axis=axis)
            operator("dequantize")(data, scales, vec, axis=axis)
    assert torch.equal(x, before)
