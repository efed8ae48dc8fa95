"""An MoE block under torch.compile and torch.export: one graph for every number of tokens, and eager's bits."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cudnn_grouped.nn import GroupedMLP, permute, unpermute

RECIPES = ("bf16", "mxfp8", "nvfp4")
HIDDEN, FFN, EXPERTS, TOP_K = 64, 64, 4, 2
# torch makes a graph of its own for one token. Around the 256-row padding and back again.
TOKENS = (2, 300, 3, 127, 128, 129, 513, 64, 256, 1000)


class MoE(torch.nn.Module):
    """Router, permute, experts, unpermute."""

    def __init__(self, activation, recipe, bias):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS)
        self.experts = GroupedMLP(EXPERTS, HIDDEN, FFN, activation, recipe, bias)

    def forward(self, x):
        prob, experts = self.router(x).softmax(-1).topk(TOP_K)
        rows, row_prob, permutation = permute(x, experts, prob, EXPERTS)
        return unpermute(self.experts(rows, permutation.padded_offsets, row_prob), permutation)


def block(activation, recipe, bias=False):
    torch.manual_seed(0)
    return MoE(activation, recipe, bias)


def tokens(count):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).requires_grad_()


def step(function, module, x):
    """y and the gradients of x and of the parameters."""
    y = function(x)
    leaves = [x, *module.parameters()]
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view(y.shape))]


def check_one_graph(module, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for count in TOKENS:
        x = tokens(count)
        for eager, other in zip(step(module, module, x), step(compiled, module, x), strict=True):
            assert eager.dtype == other.dtype and eager.stride() == other.stride()
            assert torch.equal(eager, other), f"{count} tokens"
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("activation", "recipe", "bias"),
    [("swiglu", "bf16", True), ("swiglu", "mxfp8", True), ("swiglu", "nvfp4", True), ("srelu", "mxfp8", False)],
)
def test_one_graph(activation, recipe, bias):
    check_one_graph(block(activation, recipe, bias), "aot_eager")
