"""Peak memory of GroupedMLP's forward and backward: at most that of the same layer of torch operations."""

import gc
import itertools
import time
import weakref

import gpu_device
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cudnn_grouped.nn import GroupedMLP

# (experts, rows, hidden, ffn, activation, bias): of Qwen3-30B and GPT-OSS. hidden, ffn and rows over 8 leave the ratios
# between a layer's tensors as they are.
SHAPES = {"qwen30": (16, 65536, 2048, 768, "swiglu", False), "gptoss": (16, 32768, 2880, 2880, "geglu", True)}
BLOCK = 256  # rows of one expert
CHUNK = 32


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operators made and that are alive, and their peak. What an operator frees before it
    returns is not seen."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self.known:
                    self.known.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, count):
        self.live -= count


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


def by_chunks(function, outputs, *tensors):
    """function of the tensors' chunks of rows, into outputs: with next to no memory beside them, as a fused kernel."""
    for rows in zip(*(t.split(CHUNK) for t in (*outputs, *tensors)), strict=True):
        for output, value in zip(rows, function(*rows[len(outputs) :]), strict=False):
            output.copy_(value)


class Activated(torch.autograd.Function):
    """prob * function(gate, up), gate and up the halves of c + bias."""

    @staticmethod
    def value(function, c, bias, prob):
        return function(*(c.float() + bias).chunk(2, dim=1)) * prob[:, None]

    @staticmethod
    def forward(ctx, function, c, bias, prob, experts):
        ctx.function = function
        ctx.save_for_backward(c, bias, prob, experts)
        d = c.new_empty(c.shape[0], c.shape[1] // 2)
        blocks = experts.repeat_interleave(BLOCK)
        by_chunks(lambda c, prob, e: (Activated.value(function, c, bias[e[0]], prob),), (d,), c, prob, blocks)
        return d

    @staticmethod
    def backward(ctx, dd):
        c, bias, prob, experts = ctx.saved_tensors
        dc, dprob, dbias = torch.empty_like(c), torch.empty_like(prob), torch.zeros_like(bias)

        def gradients(dd, c, prob, experts):
            with torch.enable_grad():
                leaves = [t.detach().float().requires_grad_() for t in (c, bias[experts[0]], prob)]
                results = torch.autograd.grad(Activated.value(ctx.function, *leaves), leaves, dd.float())
            dbias[experts[0]] += results[1].to(dbias.dtype)
            return results[0], results[2]

        by_chunks(gradients, (dc, dprob), dd, c, prob, experts.repeat_interleave(BLOCK))
        return None, dc, dbias, dprob, None


class Biased(torch.autograd.Function):
    """y + prob * bias; the gradient of y is that of the sum itself."""

    @staticmethod
    def forward(ctx, y, bias, prob, experts):
        ctx.save_for_backward(bias, prob, experts)
        out = torch.empty_like(y)
        blocks = experts.repeat_interleave(BLOCK)
        by_chunks(lambda y, p, e: (y + p[:, None] * bias[e[0]],), (out,), y, prob, blocks)
        return out

    @staticmethod
    def backward(ctx, dy):
        bias, prob, experts = ctx.saved_tensors
        dprob, dbias = torch.empty_like(prob), torch.zeros_like(bias)

        def gradients(dy, prob, experts):
            dbias[experts[0]] += (prob[:, None] * dy).sum(0).to(dbias.dtype)
            return ((dy.float() * bias[experts[0]]).sum(1),)

        by_chunks(gradients, (dprob,), dy, prob, experts.repeat_interleave(BLOCK))
        return dy, dbias, dprob, None


def composition(function, w1, w2, b1=None, b2=None):
    """The layer as torch operations: grouped_mm and its autograd, and activations that keep no other tensors than a
    fused kernel would."""

    def layer(x, ends, prob):
        blocks = torch.arange(x.shape[0] // BLOCK, device=x.device, dtype=torch.int32) * BLOCK
        experts = torch.searchsorted(ends, blocks, right=True)
        c = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        bias = c.new_zeros(w1.shape[:2]) if b1 is None else b1
        d = Activated.apply(function, c, bias, prob, experts)
        y = F.grouped_mm(d, w2.transpose(1, 2), offs=ends)
        return y if b2 is None else Biased.apply(y, b2, prob, experts)

    return layer


def setting(name, scale, device, recipe="bf16"):
    """The layer, a composition with its parameters, their inputs, and the gradient of y."""
    experts, rows, hidden, ffn, activation, bias = SHAPES[name]
    rows, hidden, ffn = (size // scale // 32 * 32 for size in (rows, hidden, ffn))
    rows = rows // (experts * BLOCK) * experts * BLOCK
    options = {"device": device, "dtype": torch.bfloat16}
    layer = GroupedMLP(experts, hidden, ffn, activation, recipe, bias, **options)
    x, dy = (torch.randn(rows, hidden, **options) for _ in range(2))
    prob = torch.rand(rows, device=device).requires_grad_()
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)
    function = {"swiglu": swiglu, "geglu": geglu}[activation]
    return layer, composition(function, *layer.parameters()), (x.requires_grad_(), ends, prob), dy


def step(module, parameters, inputs, dy, **options):
    """y and the gradients of x, prob and the parameters."""
    y = module(*inputs)
    return (y, *torch.autograd.grad(y, (inputs[0], inputs[2], *parameters), dy, **options))


def settled_bytes(device):
    """Bytes in use, once the threads of the last backward have let go of its tensors."""
    torch.cuda.synchronize(device)
    gc.collect()
    last, now = -1, torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    while now != last:
        time.sleep(0.05)
        last, now = now, torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    return now


def peak_of(call, device):
    """Bytes at the peak above what was there before. On a GPU with the operators' workspaces; as asked for, not in the
    allocator's blocks."""
    if torch.device(device).type == "cuda":
        before = settled_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
    with LiveBytes() as memory:
        call()
    return memory.peak


def check_peak(name, scale, device):
    layer, other, inputs, dy = setting(name, scale, device)
    parameters = list(layer.parameters())
    step(layer, parameters, inputs, dy)  # what libraries keep from a first call is no part of a step
    step(other, parameters, inputs, dy)
    ours, theirs = (peak_of(lambda m=m: step(m, parameters, inputs, dy), device) for m in (layer, other))
    assert ours <= theirs, f"{ours} bytes, the composition {theirs}"


@pytest.mark.parametrize("name", SHAPES)
def test_peak(name):
    check_peak(name, 8, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_peak_on_gpu(name):
    """At a quarter of the sizes, with workspaces."""
    check_peak(name, 4, gpu_device.DEVICE)


def profiled_peak(call):
    """As LiveBytes, with what operators free before they return; a compiled graph runs without dispatch modes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(live)


@pytest.mark.parametrize("name", SHAPES)
def test_compiled_peak(name):
    """A compiled graph frees as early as the eager backward does."""
    torch._dynamo.reset()
    layer, _, inputs, dy = setting(name, 8, "cpu")
    modules = layer, torch.compile(layer, backend="aot_eager", fullgraph=True)
    calls = [lambda m=module: step(m, list(layer.parameters()), inputs, dy) for module in modules]
    for call in calls:
        call()
    eager, compiled = map(profiled_peak, calls)
    assert 0 < compiled <= eager


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_kept_graph(recipe):
    """Freeing early is for a graph that is not kept: one that is gives the same gradients again, and then no more."""
    layer, _, inputs, dy = setting("gptoss", 32, "cpu", recipe)
    leaves = (inputs[0], inputs[2], *layer.parameters())
    expected = step(layer, list(layer.parameters()), inputs, dy)[1:]
    y = layer(*inputs)
    for kept in (True, True, False):
        gradients = torch.autograd.grad(y, leaves, dy, retain_graph=kept)
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, leaves, dy)
