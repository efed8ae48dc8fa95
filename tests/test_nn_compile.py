"""An MoE block under torch.compile and torch.export: one graph for every number of tokens, and eager's bits."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.utils.checkpoint import checkpoint

from cudnn_grouped.nn import GroupedMLP, permute, unpermute

HIDDEN, FFN, EXPERTS, TOP_K = 64, 64, 4, 2
# Below, at and above multiples of the padding, up and down. Not 1, of which torch makes a constant.
TOKENS = (300, 2, 3, 127, 128, 129, 513, 64, 256, 1000)


class Experts(torch.nn.Module):
    """Everything after the router: permute, experts, unpermute."""

    def __init__(self, activation, recipe, bias, checkpointed=False):
        super().__init__()
        self.mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, activation, recipe, bias)
        self.checkpointed = checkpointed

    def forward(self, x, experts, prob):
        rows, row_prob, permutation = permute(x, experts, prob, EXPERTS)
        arguments = (rows, permutation.padded_offsets, row_prob)
        y = checkpoint(self.mlp, *arguments, use_reentrant=False) if self.checkpointed else self.mlp(*arguments)
        return unpermute(y, permutation)


class MoE(torch.nn.Module):
    def __init__(self, *options, **more):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts(*options, **more)

    def forward(self, x):
        prob, experts = self.router(x).softmax(-1).topk(TOP_K)
        return self.experts(x, experts, prob)


def tokens(count):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).requires_grad_()


def routed(count):
    """Tokens with an assignment and probabilities."""
    x = tokens(count)
    return x, x[:, :EXPERTS].argsort(1)[:, :TOP_K], x[:, :TOP_K].detach().sigmoid().requires_grad_()


def step(function, module, arguments):
    """y and the gradients of the arguments and the parameters."""
    y = function(*arguments)
    leaves = [*(x for x in arguments if x.requires_grad), *module.parameters()]
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view(y.shape))]


def check_same(module, compiled, arguments):
    for eager, other in zip(step(module, module, arguments), step(compiled, module, arguments), strict=True):
        assert eager.dtype == other.dtype and eager.stride() == other.stride()
        assert torch.equal(eager, other), f"{len(arguments[0])} tokens"


def compiled_once(module, backend, arguments_of, check=check_same):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for count in TOKENS:
        check(module, compiled, arguments_of(count))
    assert counter.frame_count == 1
    return compiled


CASES = [*(("swiglu", recipe, True) for recipe in ("bf16", "mxfp8", "nvfp4")), ("srelu", "mxfp8", False)]


@pytest.mark.parametrize(("activation", "recipe", "bias"), CASES)
def test_one_graph(activation, recipe, bias):
    compiled_once(MoE(activation, recipe, bias), "aot_eager", lambda count: (tokens(count),))


def test_one_graph_with_checkpoint():
    compiled_once(MoE("swiglu", "mxfp8", False, checkpointed=True), "aot_eager", lambda count: (tokens(count),))


def test_one_token_and_none():
    """Sizes that torch makes constants of: other graphs, the same results."""
    torch._dynamo.reset()
    module = MoE("swiglu", "nvfp4", True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (1, 0):
        check_same(module, compiled, (tokens(count),))


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "recipe", "bias"), CASES)
def test_inductor(activation, recipe, bias):
    """Eager's bits after the router, whose softmax Inductor computes in its own order; with it, still one graph."""
    compiled_once(Experts(activation, recipe, bias), "inductor", routed)
    compiled_once(
        MoE(activation, recipe, bias), "inductor", lambda count: (tokens(count),), lambda m, c, a: step(c, m, a)
    )


@pytest.mark.parametrize(("activation", "recipe", "bias"), CASES)
def test_export(activation, recipe, bias):
    """One program for any number of tokens."""
    module = MoE(activation, recipe, bias).requires_grad_(False)
    program = export(module, (tokens(20).detach(),), dynamic_shapes=({0: Dim("tokens", min=1)},))
    exported = program.module()
    for count in (1, *TOKENS):
        x = tokens(count).detach()
        assert torch.equal(exported(x), module(x)), f"{count} tokens"
    kinds = {str(node.target).split(".")[1] for node in program.graph.nodes if "cudnn_grouped" in str(node.target)}
    assert {"srelu" if activation == "srelu" else "glu", "mm"} <= kinds
