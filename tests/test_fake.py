"""Fakes: opcheck on every operator, and one graph for many sizes under torch.compile."""

from dataclasses import replace

import cases
import pytest
import torch
from cases import DTYPES, Case, operator
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

SEVERAL = [
    Case("dsrelu", (256, 512), n=64),
    Case("dsrelu", (256, 512), n=80, d="e4m3", dbias=True, rank=2),
    Case("dsrelu", (256,), n=64, ab="fp4", sf="e4m3", vec=16, d="f32", weights="ptrs_k"),
    Case("dsrelu", (256, 512), n=64, ab="uint8", d="fp16", weights="list_k", dbias=True),
    Case("dglu", (256, 512), n=64, dbias=True),
    Case("dglu", (256, 512), n=96, d="e5m2", rank=2, weights="list_n"),
    Case("dglu", (256,), n=64, ab="bf16", vec=16, d="f32", dbias=True, weights="ptrs_n"),
    Case("dglu", (256,), n=64, ab="fp4", sf="e8m0", vec=16, options={"act_func": "dsituglu"}),
]


# torch's test_schema compares tensors by allclose, which knows no FP8 or FP4; check_schema is the same check on bits.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
COMPARABLE = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def tensors_in(tree) -> list:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def check_schema(op, positional, keywords) -> None:
    """Only arguments that the schema marks are written; no output shares memory with an input or another output."""
    arguments = {a.name: a for a in op._schema.arguments}
    given = {**dict(zip(arguments, positional, strict=False)), **keywords}
    before = {name: [bits(t).clone() for t in tensors_in(value)] for name, value in given.items()}
    outputs = tensors_in(op(*positional, **keywords))
    for name, value in given.items():
        alias = arguments[name].alias_info
        if alias is None or not alias.is_write:
            for tensor, copy in zip(tensors_in(value), before[name], strict=True):
                assert torch.equal(bits(tensor), copy), f"{name} was written"
    pointers = [t.untyped_storage().data_ptr() for t in outputs if t.numel()]
    assert len(set(pointers)) == len(pointers)
    assert not set(pointers) & {t.untyped_storage().data_ptr() for t in tensors_in(list(given.values()))}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.int32, torch.int64) else cases.raw(tensor)


def check_operator(op, positional, keywords) -> None:
    check_schema(op, positional, keywords)
    comparable = all(t.dtype in COMPARABLE for t in tensors_in((positional, keywords)))
    opcheck(op, positional, keywords, test_utils=(*WITHOUT_SCHEMA, *(("test_schema",) if comparable else ())))


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_opcheck(case):
    built = cases.build(case)
    keywords = {**built.keywords, "d_dtype": DTYPES[case.d], "generate_dbias": case.dbias}
    check_operator(operator(case.op), built.positional, keywords)


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_opcheck_out(case):
    built = cases.build(case)
    buffers = cases.output_buffers(case, cases.Guarded())
    for name in ("dprob", "dbias", "amax"):
        if name in buffers:
            buffers[name].zero_()
    check_operator(operator(f"{case.op}_out"), built.positional, {**built.keywords, **buffers})


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize(("dtype", "sf", "vec"), [("e4m3", "e8m0", 32), ("fp4", "e4m3", 16), ("fp4", "e8m0", 32)])
@pytest.mark.parametrize("shape", [(64, 96), (64, 96, 1), (64, 96, 3)], ids=str)
def test_opcheck_quantize(axis, dtype, sf, vec, shape):
    x = torch.randn(shape[2] if len(shape) == 3 else 1, *shape[:2]).permute(1, 2, 0)
    x = x if len(shape) == 3 else x[..., 0]
    arguments = (x, DTYPES[dtype], DTYPES[sf], vec)
    keywords = {"axis": axis, "norm_const": torch.tensor([2.0])}
    check_operator(operator("quantize"), arguments, keywords)
    data, scales = operator("quantize")(*arguments, **keywords)
    check_operator(operator("dequantize"), (data, scales, vec), keywords)


def test_opcheck_per_expert_columns():
    offsets = torch.tensor([256, 512], dtype=torch.int32)
    arguments = (torch.randn(512, 96), DTYPES["e4m3"], DTYPES["e8m0"], 32)
    check_operator(operator("quantize"), arguments, {"axis": "col", "padded_offsets": offsets})
    data, scales = operator("quantize")(*arguments, axis="col", padded_offsets=offsets)
    check_operator(operator("dequantize"), (data, scales, 32), {"axis": "col", "padded_offsets": offsets})


def test_opcheck_reduce_dbias():
    offsets = torch.tensor([256, 512], dtype=torch.int32)
    slots, dbias = torch.ones(4, 32, 1, dtype=torch.bfloat16), torch.zeros(2, 32, 1, dtype=torch.bfloat16)
    check_operator(operator("reduce_dbias"), (slots, offsets, dbias), {})


def test_schema_check_notices():
    """A functional schema whose kernel writes its input is caught."""
    library = torch.library.Library("cudnn_grouped_test", "FRAGMENT")
    library.define("bad(Tensor x) -> Tensor")
    library.impl("bad", lambda x: x.add_(1).clone(), "CPU")
    with pytest.raises(AssertionError, match="x was written"):
        check_schema(torch.ops.cudnn_grouped_test.bad.default, (torch.zeros(4),), {})


def metadata(tensors) -> list:
    return [(t.dtype, tuple(t.shape), t.stride() if t.numel() else None) for t in tensors]


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_fake_metadata(case):
    """Shape, stride and dtype of every output, the empty ones too, are those of the real call."""
    built = cases.build(case)
    keywords = {**built.keywords, "d_dtype": DTYPES[case.d], "generate_dbias": case.dbias}
    real = operator(case.op)(*built.positional, **keywords)
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (built.positional, keywords))
        assert metadata(operator(case.op)(*fake[0], **fake[1])) == metadata(real)


@pytest.mark.parametrize(("m", "n", "k", "experts"), [(524544, 4096, 32, 2), (98304, 3072, 7168, 384)])
def test_fake_of_large_problems(m, n, k, experts):
    """M 2N and L N K past 2^31, with no memory behind them."""
    with FakeTensorMode():
        a = torch.empty(m, k, 1, dtype=DTYPES["e4m3"])
        b = torch.empty(experts, n, k, dtype=DTYPES["e4m3"]).permute(1, 2, 0)
        scales = [torch.empty(r // 128 * (k // 128 or 1) * 512, dtype=DTYPES["e8m0"]) for r in (m, n * experts)]
        c = torch.empty(m, 2 * n, 1, dtype=torch.bfloat16)
        offsets, alpha = torch.empty(experts, dtype=torch.int32), torch.empty(experts)
        keywords = {"sfa": scales[0], "sfb": [scales[1]], "norm_const": torch.ones(1), "sf_vec_size": 32}
        outputs = operator("dglu")(
            a,
            [b],
            c,
            offsets,
            alpha,
            alpha,
            torch.empty(m, 1, 1),
            d_dtype=DTYPES["e4m3"],
            generate_dbias=True,
            **keywords,
        )
    assert outputs[0].shape == (m, 2 * n, 1)
    assert outputs[0].numel() > 2**29
    assert outputs[5].numel() == m * 2 * n // 32
    assert outputs[6].numel() == m * 2 * n // 32
    assert outputs[3].shape == (experts, 2 * n, 1)


# torch.compile ------------------------------------------------------------------------------------------------

COMPILED = [
    (Case("dsrelu", (256, 512), n=64, d="e4m3", dbias=True), (768, 1280, 2304)),
    (Case("dsrelu", (256, 512), n=64, ab="fp4", sf="e4m3", vec=16, rank=2), (768, 1280, 2304)),
    (Case("dglu", (256, 512), n=64, ab="bf16", vec=16, dbias=True), (768, 1280, 2304)),
    (Case("dglu", (256, 512), n=64, d="e5m2", weights="list_k"), (768, 1280, 2304)),
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("case", "sizes"), COMPILED, ids=str)
def test_one_graph_for_many_m(case, sizes, backend):
    """fullgraph and dynamic: no break, and one compilation serves every M; results are eager's bits."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def function(positional, keywords):
        outputs = operator(case.op)(*positional, d_dtype=DTYPES[case.d], generate_dbias=case.dbias, **keywords)
        return outputs[0], outputs[2] * 2, *outputs[3:]

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for m in sizes:
        built = cases.build(replace(case, m=m))
        got = compiled(built.positional, built.keywords)
        want = function(built.positional, built.keywords)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(cases.raw(a), cases.raw(b))
            assert a.stride() == b.stride()
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_quantize_compiles(backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def function(x):
        data, scales = operator("quantize")(x, DTYPES["e4m3"], DTYPES["e8m0"], 32)
        return operator("dequantize")(data, scales, 32)

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for rows in (352, 160, 608):
        x = torch.randn(rows, 96)
        assert torch.equal(compiled(x), function(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
def test_out_form_compiles(op):
    """The destination-passing form inside a graph: its writes are seen."""
    torch._dynamo.reset()
    case = Case(op, (256, 512), n=64, dbias=True)
    built = cases.build(case)

    def function(buffers):
        operator(f"{op}_out")(*built.positional, **built.keywords, **buffers)
        return buffers["d_row"].float().sum() + buffers["dprob"].sum()

    results = []
    for f in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        buffers = {name: t.zero_() for name, t in cases.output_buffers(case, cases.Guarded()).items()}
        results.append((f(buffers), buffers))
    assert torch.equal(results[0][0], results[1][0])
    for name, tensor in results[0][1].items():
        assert torch.equal(cases.raw(tensor), cases.raw(results[1][1][name])), name
