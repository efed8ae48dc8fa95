"""srelu, glu, mm and their neighbours: nothing is read or written that should not be, no expert reaches another, and
the bits do not depend on the number of threads."""

from dataclasses import replace

import cases
import cases_forward as forward
import numpy as np
import oracle_formats as formats
import pytest
import torch
from cases import DTYPES
from cases_forward import Case, DactCase, WgradCase

OPERATORS = ("srelu", "glu", "mm")
# One case of each operand family and operator; quantised D, both column forms, tails in N and K.
SEVERAL = [
    Case("srelu", (256, 512), m=1024, n=80, k=96, d="e4m3", discrete_col_sfd=True, norm=3.0, bias="f32"),
    Case("srelu", (256, 512), m=1024, n=80, k=96, ab="fp4", sf="e4m3", vec=16, bias="bf16"),
    Case("glu", (256, 512), m=1024, n=192, k=96, d="e5m2", c="fp16", bias="fp16"),
    Case("glu", (256, 512), m=1024, n=192, k=96, ab="uint8", vec=16, d="f32", c="e4m3"),
    Case("glu", (256, 512), m=1024, n=192, k=96, ab="bf16", vec=16, bias="f32"),
    Case("mm", (256, 512), m=1024, n=80, k=96, d="e4m3", bias="f32"),
    Case("mm", (256, 512), m=1024, n=80, k=96, ab="bf16", vec=16, c="f32"),
]


def same(got: dict, want: dict) -> None:
    for name, tensor in want.items():
        assert torch.equal(cases.raw(got[name]), cases.raw(tensor)), name


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("weights", ["dense_k", "list_k", "ptrs_k"])
def test_nan_in_what_must_not_be_read(case, weights):
    """NaN in rows past the last offset and in padding scale bytes changes no bit of any output."""
    case = replace(case, weights=weights)
    clean, _ = forward.call(forward.build(case))
    built = forward.build(replace(case, poison=True))
    outputs, start = forward.call(built)
    same(outputs, clean)
    forward.check(built, outputs, start)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_nan_of_an_expert_without_rows(case):
    """NaN in its weights, its bias and its alpha."""
    case = replace(case, offsets=(256, 256, 512), weights="list_k", bias=case.bias or "f32")
    clean, _ = forward.call(forward.build(case))
    built = forward.build(replace(case, poison=True))
    if case.scaled:
        built.arguments["sfb"][1].view(torch.uint8).fill_(0xFF)
    else:
        built.arguments["b"][1].fill_(torch.nan)
    same(forward.call(built)[0], clean)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("generate_c", [True, False])
def test_guard_bands_and_poisoned_buffers(case, generate_c):
    """Buffers full of NaN bytes come back fully written (the tail as zeros), the bytes round them untouched."""
    case = replace(case, form="out", poison=True, generate_c=generate_c)
    forward.run(case)  # Guarded.check is in the call
    forward.run(forward.exact(case))


def tensors_of(arguments: dict) -> list:
    groups = [value if isinstance(value, list) else [value] for value in arguments.values()]
    return [t for group in groups for t in group if isinstance(t, torch.Tensor)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.int32, torch.int64) else cases.raw(tensor)


EVERY = [replace(case, form=form) for case in SEVERAL for form in ("functional", "out")]
EVERY += [WgradCase(ab="e4m3", form=form) for form in ("functional", "out", "accumulate")] + [DactCase()]


def prepare(case):
    """(arguments, the call: its outputs as a list)."""
    if isinstance(case, WgradCase):
        built = forward.build_wgrad(case)
        return built.arguments, lambda: forward.call_wgrad(built)[0]
    if isinstance(case, DactCase):
        built = forward.build_dact(case)
        return built.arguments, lambda: list(forward.call_dact(built).values())
    built = forward.build(case)
    return built.arguments, lambda: list(forward.call(built)[0].values())


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_inputs_are_not_modified(case):
    arguments, call = prepare(case)
    inputs = tensors_of(arguments)
    before = [t.clone() for t in inputs]
    call()
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(bits(tensor), bits(copy))


# An expert's NaN stays in the expert --------------------------------------------------------------------------


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("where", ["b", "alpha", "bias"])
def test_nan_of_one_expert_stays_there(case, where):
    case = replace(case, offsets=(256, 512, 768), weights="list_k", bias=case.bias or "f32")
    clean_built, built = forward.build(case), forward.build(case)
    for b in (clean_built, built):
        b.arguments["alpha"] = torch.tensor([1.0, 0.5, -1.0])
    clean, _ = forward.call(clean_built)
    if where != "b":
        built.arguments[where][1] = torch.nan
    elif case.scaled:
        built.arguments["sfb"][1].view(torch.uint8).fill_(0xFF)
    else:
        built.arguments["b"][1].fill_(torch.nan)
    outputs, _ = forward.call(built)
    others = torch.ones(1024, dtype=torch.bool)
    others[256:512] = False
    for name in ("c", "d", "d_col"):
        if clean[name].numel():
            assert torch.equal(cases.raw(outputs[name])[others], cases.raw(clean[name])[others]), name
            got = cases.values_of(outputs[name].reshape(1024, -1)[256:512])
            assert np.isnan(got).all(), name
    if case.amax:
        assert torch.equal(cases.raw(outputs["amax"])[[0, 2]], cases.raw(clean["amax"])[[0, 2]])
        assert outputs["amax"][1].isnan().all()
    if case.quantized:
        rows = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(1024, formats.ceil_div(case.columns, 32))]
        assert (rows[256:512] == 0xFF).all()
        assert (rows[:256] != 0xFF).all()
        assert (rows[512:] != 0xFF).all()
        places = formats.column_scale_offsets(1024, case.columns, case.offsets, case.discrete_col_sfd)
        columns = cases.scale_matrix(outputs["sfd_col"])
        assert (columns[places[:, 8:16]] == 0xFF).all()
        assert (columns[places[:, :8]] != 0xFF).all()


@pytest.mark.parametrize("op", OPERATORS)
def test_nan_row_and_nan_column(op):
    """A NaN in one row of A reaches that row; one in a row of B reaches that column of C, and its column of D."""
    built = forward.build(Case(op, (256,), n=128, k=64, c="f32", d="f32"))
    built.arguments["alpha"].fill_(1.0)
    built.arguments["a"].view(torch.uint8)[7, 3] = 0x7F
    built.arguments["b"][0].view(torch.uint8)[43, 50] = 0x7F  # of glu: up number 11
    outputs, _ = forward.call(built)
    for name, column in (("c", 43), ("d", 11 if op == "glu" else 43)):
        got = outputs[name][..., 0].isnan()
        want = torch.zeros_like(got)
        want[7] = True
        want[:, column] = True
        assert torch.equal(got, want), name


@pytest.mark.parametrize("op", OPERATORS)
def test_nan_in_prob(op):
    built = forward.build(Case(op, (256, 512), n=128))
    clean, _ = forward.call(built)
    built.arguments["prob"][300] = torch.nan
    outputs, _ = forward.call(built)
    assert torch.equal(outputs["c"], clean["c"])
    rows = torch.arange(512) != 300
    assert torch.equal(outputs["d"][rows], clean["d"][rows])
    assert outputs["d"][300].isnan().all()
    assert outputs["amax"][1].isnan()
    assert torch.equal(outputs["amax"][0], clean["amax"][0])


# Empty experts, empty problems --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("weights", ["list_k", "ptrs_k"])
def test_empty_experts_leave_the_others_alone(op, weights):
    """Offsets [0, 256, 256, 512, 512]: experts 1 and 3 give the bits they give by themselves."""
    case = Case(op, (0, 256, 256, 512, 512), n=128, weights=weights, bias="f32")
    built = forward.build(case)
    outputs, start = forward.call(built)
    forward.check(built, outputs, start)
    assert (outputs["amax"][[0, 2, 4]] == -torch.inf).all()
    alone = forward.build(replace(case, offsets=(256, 512)))
    both = [1, 3]
    for name in ("a", "sfa", "prob"):
        alone.arguments[name] = built.arguments[name]
    for name in ("alpha", "bias"):
        alone.arguments[name] = built.arguments[name][both].contiguous()
    for name in ("b", "sfb") if weights == "list_k" else ("b_ptrs", "sfb_ptrs"):
        given = built.arguments[name]
        alone.arguments[name] = [given[i] for i in both] if isinstance(given, list) else given[both].contiguous()
    few, _ = forward.call(alone)
    for name in ("c", "d"):
        assert torch.equal(cases.raw(few[name]), cases.raw(outputs[name]))
    assert torch.equal(few["amax"], outputs["amax"][both])


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("m", [0, 256])
@pytest.mark.parametrize(("ab", "d"), [("e4m3", "bf16"), ("e4m3", "e4m3"), ("fp4", "f32"), ("bf16", "bf16")])
@pytest.mark.parametrize("form", ["functional", "out"])
def test_no_rows_at_all(op, m, ab, d, form):
    case = Case(
        op, (0, 0, 0, 0), m=m, ab=ab, vec=16 if ab == "bf16" else 32, d=d, form=form, weights="ptrs_k", bias="f32"
    )
    outputs = forward.run(case)
    assert outputs["d"].shape[0] == outputs["c"].shape[0] == m
    if form == "functional" and outputs["amax"].numel():
        assert (outputs["amax"] == -torch.inf).all()


def test_no_rows_are_still_checked():
    built = forward.build(Case("srelu", (0,), m=0))
    built.arguments["alpha"] = built.arguments["alpha"].double()
    with pytest.raises(RuntimeError, match="^alpha: expected"):
        forward.call(built)


@pytest.mark.parametrize("op", OPERATORS)
def test_null_pointers_of_experts_with_rows_are_errors(op):
    for name in ("b_ptrs", "sfb_ptrs"):
        built = forward.build(Case(op, (256, 256, 512), weights="ptrs_k"))
        built.arguments[name][2] = 0
        with pytest.raises(RuntimeError, match=rf"^{name}\[2\]: expected"):
            forward.call(built)


@pytest.mark.parametrize("discrete", [False, True])
def test_output_tails_are_zero(discrete):
    """Asserted by hand, apart from the oracle: rows past the last offset, in every output that has rows."""
    case = Case(
        "glu", (256, 512), m=1024, n=192, d="e4m3", form="out", poison=True, discrete_col_sfd=discrete, bias="f32"
    )
    outputs, _ = forward.call(forward.build(case))
    for name in ("c", "d", "d_col"):
        assert not cases.raw(outputs[name])[512:].any(), name
        assert cases.raw(outputs[name])[:512].any(), name
    rows = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(1024, 3)]
    assert not rows[512:].any()
    assert rows[:512].any()
    flat = cases.scale_matrix(outputs["sfd_col"])
    if discrete:
        assert not flat[512 // 128 * 512 :].any()
    else:
        assert not flat[formats.scale_offsets(96, 32)][:, 16:].any()


@pytest.mark.parametrize("op", OPERATORS)
def test_a_zero_block_is_a_zero_scale(op):
    """32 rows with prob 0: their scale bytes are 0, and so is their D, for any norm_const."""
    for norm in (0.01, 448.0):
        built = forward.build(Case(op, d="e4m3", norm=norm, n=128))
        built.arguments["prob"][:32] = 0.0
        outputs, _ = forward.call(built)
        for name in ("d", "d_col"):
            assert not (outputs[name][:32].view(torch.uint8) & 0x7F).any()  # a zero keeps its sign
        columns = built.case.columns
        rows = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(512, columns // 32)]
        assert not rows[:32].any()
        assert rows[32:].any()
        assert not cases.scale_matrix(outputs["sfd_col"])[formats.scale_offsets(columns, 16)][:, 0].any()


# Threads ------------------------------------------------------------------------------------------------------

# Three N tiles and ragged experts, or an order that varies would not show.
RAGGED = (256, 256, 1024, 1280)
THREADED = [
    Case("srelu", RAGGED, n=528, k=96, d="e4m3", bias="f32", options={"tanh_clamp_scale": 2.0}),
    Case("glu", RAGGED, n=576, k=96, d="e4m3", discrete_col_sfd=True, options={"act_func": "situglu"}),
    Case("glu", RAGGED, n=576, k=96, ab="fp4", sf="e4m3", vec=16, options={"act_func": "geglu"}),
    Case("mm", RAGGED, n=528, k=288, ab="bf16", vec=16, bias="bf16"),
    WgradCase(RAGGED, m=272, n=528, ab="e4m3"),
    DactCase(RAGGED, n=528, d="f32", options={"act_func": "dsrelu"}),
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", THREADED, ids=str)
def test_threads_change_no_bit(case, threads):
    _, call = prepare(case)
    results = []
    for count in (1, 2, 2, 3, 1):
        threads(count)
        results.append([cases.raw(t.contiguous()).clone() for t in call()])
    assert any(t.any() for t in results[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_outputs_may_have_any_unit_stride():
    """Strides of dimensions of one element mean nothing."""
    case = Case("srelu", (256,), form="out")
    built = forward.build(case)
    buffers = forward.output_buffers(case, cases.Guarded())
    buffers["amax"].fill_(-torch.inf)
    for name in ("c", "d"):
        buffers[name] = buffers[name].as_strided((256, 64, 1), (64, 1, 7))
    forward.invoke("srelu_out", {**built.arguments, **buffers})
    want, _ = forward.call(forward.build(replace(case, form="functional")))
    assert torch.equal(buffers["d"], want["d"])
    assert torch.equal(buffers["c"], want["c"])
    assert buffers["d"].dtype == DTYPES["bf16"]
