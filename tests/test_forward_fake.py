"""Fakes and autograd registration of the forward operators, dact and the weight gradient: opcheck, and one graph."""

import autograd_reference as reference
import pytest
import torch
from autograd_reference import BF16, F16, F32, GLU, Case, K
from test_fake import check_operator, metadata
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.testing._internal.optests import aot_autograd_check
from torch.utils._pytree import tree_map_only

import cudnn_grouped

OPS = torch.ops.cudnn_grouped
E4M3 = torch.float8_e4m3fn
FORWARD = [
    Case("srelu"),
    Case("clamped_srelu", F32, weights="list_n", rank=3, d_dtype=F32),
    Case("srelu", c_dtype=None, alpha=False, prob=False),
    Case("srelu", BF16, scaled="mxfp8", d_dtype=E4M3, rank=3),
    Case("srelu", scaled="nvfp4", d_dtype=F16),
    *(Case(activation, F32, weights="list_k") for activation in GLU),
    Case("swiglu", weights="dense_n", c_dtype=F32),
    Case("swiglu", F32, scaled="mxfp8", d_dtype=E4M3),
    Case("geglu", scaled="mxfp4", rank=3),
    Case("mm"),
    Case("mm", F32, weights="list_n", rank=3, c_dtype=None),
    Case("mm", scaled="nvfp4", d_dtype=F32),
    Case("mm", F32, scaled="mxfp8", d_dtype=E4M3, c_dtype=None),
]


def detached(arguments):
    return tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)


def check_metadata(operator, positional, keywords):
    """Shape, stride and dtype of every output, the empty ones too, are those of the real call."""
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, (positional, keywords))
        fake = operator(*fake[0], **fake[1])
    real = operator(*positional, **keywords)
    assert metadata(torch.utils._pytree.tree_leaves(fake)) == metadata(torch.utils._pytree.tree_leaves(real))


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward(case):
    operator, positional, keywords = reference.arguments(reference.build(case))
    opcheck(operator, positional, keywords, test_utils=("test_autograd_registration", "test_faketensor"))
    positional, keywords = detached((positional, keywords))
    check_operator(operator, positional, keywords)
    check_metadata(operator, positional, keywords)


@pytest.mark.parametrize("case", [case for case in FORWARD if case.c_dtype or case.d_dtype != E4M3], ids=str)
def test_forward_gradients_are_traced(case):
    """opcheck's test_aot_dispatch_dynamic with gradients, of the outputs that have any: it adds up all, FP8 too."""
    operator, positional, keywords = reference.arguments(reference.build(case))

    def function(*positional, **keywords):
        positional, keywords = tree_map_only(torch.Tensor, torch.clone, (positional, keywords))
        return [x for x in operator(*positional, **keywords)[:2] if x.requires_grad]

    aot_autograd_check(function, positional, keywords, dynamic=True, check_gradients=True)


POINTERS = [("srelu", None), ("srelu", "mxfp8"), ("swiglu", None), ("swiglu", "nvfp4"), ("mm", "mxfp8")]


@pytest.mark.parametrize(("activation", "scaled"), POINTERS)
def test_forward_pointers(activation, scaled):
    inputs = reference.build(Case(activation, weights="list_k", scaled=scaled))
    operator, (a, b, *rest), keywords = detached(reference.arguments(inputs))
    sfa, sfb = keywords.pop("sfa", None), keywords.pop("sfb", None)
    experts, n = len(reference.EXPERTS), b[0].shape[0]
    if scaled:  # dense: an expert's data and scales are a part of the whole
        b = list(b[0].view(torch.uint8).unbind(-1))
        sfb = list(sfb[0].view(torch.uint8).unbind(-1))
    tables = [None if x is None else torch.tensor([t.data_ptr() for t in x]) for x in (b, sfb)]
    assert all(t is None or len(t) == experts for t in tables)
    keywords |= {"n": n, "b_dtype": a.dtype}
    positional = [a, [], *rest, sfa, None, None, *tables]
    check_operator(operator, positional, keywords)
    check_metadata(operator, positional, keywords)


@pytest.mark.parametrize("scaled", [None, "mxfp8", "nvfp4"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_forward_out(activation, scaled):
    d_dtype = E4M3 if scaled == "mxfp8" else BF16
    inputs = reference.build(Case(activation, F32, scaled=scaled, d_dtype=d_dtype))
    operator, positional, keywords = detached(reference.arguments(inputs))
    c, d, d_col, amax, sfd_row, sfd_col = operator(*positional, **keywords)
    outputs = {"d": d, "c": c, "d_col": d_col, "amax": amax, "sfd_row": sfd_row, "sfd_col": sfd_col}
    outputs = {name: torch.zeros_like(x) for name, x in outputs.items() if x.numel()}
    for name in ("d_dtype", "c_dtype", "generate_c"):
        keywords.pop(name)
    out = OPS.glu_out if activation == "swiglu" else OPS.srelu_out
    check_operator(out.default, positional, {**keywords, **outputs})


@pytest.mark.parametrize("act_func", ["dsrelu", "dswiglu", "dgeglu", "dsituglu", "identity"])
@pytest.mark.parametrize("rank", [2, 3])
def test_dact(act_func, rank):
    width = 2 if act_func.endswith("glu") else 1
    r, c, prob = torch.randn(512, 64), torch.randn(512, 64 * width), torch.rand(512)
    if rank == 3:
        r, c, prob = r.unsqueeze(-1), c.unsqueeze(-1), prob.view(-1, 1, 1)
    positional = (r.to(BF16), c.to(BF16), torch.tensor([256, 256], dtype=torch.int32))
    for more in ((), (prob,)):
        keywords = {"act_func": act_func, "generate_dbias": bool(more), "d_dtype": F32 if more else None}
        check_operator(OPS.dact.default, positional + more, keywords)
        check_metadata(OPS.dact.default, positional + more, keywords)
    positional = (positional[0], positional[1][:2].clone(), positional[2], prob)
    keywords |= {"generate_d": False, "c_per_expert": True}
    check_operator(OPS.dact.default, positional, keywords)
    check_metadata(OPS.dact.default, positional, keywords)


def weight_gradient_arguments(scaled):
    offsets = torch.tensor([256, 256, 512], dtype=torch.int32)
    a, b = torch.randn(512, 32).to(BF16), torch.randn(512, K).to(BF16)
    scale = torch.tensor([1.0, 2.0, 0.5])
    if scaled is None:
        return (a.t(), b, offsets), {"global_scale_a": scale, "d_dtype": F32}
    (a, sfa), (b, sfb) = (cudnn_grouped.quantize(x, scaled, axis="col", padded_offsets=offsets) for x in (a, b))
    vec = 16 if scaled == "nvfp4" else 32
    if scaled == "mxfp8":
        a = a.t()
    else:
        b = b.t()
    return (a, b, offsets), {"sfa": sfa, "sfb": sfb, "sf_vec_size": vec, "global_scale_b": scale}


@pytest.mark.parametrize("scaled", [None, "mxfp8", "nvfp4"])
def test_weight_gradient(scaled):
    positional, keywords = weight_gradient_arguments(scaled)
    check_operator(OPS.wgrad.default, positional, keywords)
    check_metadata(OPS.wgrad.default, positional, keywords)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("scaled", [None, "mxfp8", "nvfp4"])
def test_weight_gradient_out(scaled, accumulate):
    positional, keywords = weight_gradient_arguments(scaled)
    out = list(torch.ones(3, 32, K))
    keywords.pop("d_dtype", None)
    check_operator(OPS.wgrad_out.default, positional, {**keywords, "out": out, "accumulate": accumulate})


@pytest.mark.parametrize("activation", ["srelu", "swiglu", "mm"])
def test_one_graph_for_many_m(activation):
    """fullgraph and dynamic, forward and backward: no break, and one compilation serves every M, with eager's bits."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    n = 128 if activation == "swiglu" else 64
    weights = [torch.randn(n, K).to(BF16).requires_grad_() for _ in range(2)]

    def function(a, offsets, prob):
        operator = {"srelu": OPS.srelu, "swiglu": OPS.glu, "mm": OPS.mm}[activation]
        return operator(a, weights, offsets, None, prob)[1].float().square().sum()

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for m in (768, 1280, 2304):
        a, prob = torch.randn(m, K).to(BF16).requires_grad_(), torch.rand(m, requires_grad=True)
        offsets = torch.tensor([256, m - 256], dtype=torch.int32)
        leaves = (a, prob, *weights)
        results = [(y, *torch.autograd.grad(y, leaves)) for y in (f(a, offsets, prob) for f in (function, compiled))]
        for eager, other in zip(*results, strict=True):
            assert torch.equal(eager, other)
    assert counter.frame_count == 1
