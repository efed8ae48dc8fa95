"""GroupedMLP as a module: edges, what it saves and launches, state, and torch's tools around it."""

from collections import Counter

import pytest
import torch
from mlp_reference import ACTIVATIONS
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cudnn_grouped.nn import GroupedMLP, permute, unpermute

RECIPES = ("bf16", "mxfp8", "nvfp4")
HIDDEN, FFN, EXPERTS = 64, 96, 4


def inputs(rows=1024, offsets=(256, 256, 768, 1024), hidden=HIDDEN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=generator).bfloat16().requires_grad_()
    prob = torch.rand(rows, generator=generator).requires_grad_()
    dy = torch.randn(rows, hidden, generator=generator).bfloat16()
    return x, torch.tensor(offsets, dtype=torch.int32), prob, dy


def gradients(mlp, x, offsets, prob, dy):
    """y and its gradients with respect to x, prob and the parameters."""
    y = mlp(x, offsets, prob)
    return [y, *torch.autograd.grad(y, [x, prob, *mlp.parameters()], dy)]


def assert_same(results, others):
    for one, other in zip(results, others, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# Edges ---------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Experts between permute and unpermute."""

    def __init__(self, activation, recipe, bias=True):
        super().__init__()
        self.mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, activation, recipe, bias)

    def forward(self, x, experts, prob):
        rows, row_prob, permutation = permute(x, experts, prob, EXPERTS)
        return unpermute(self.mlp(rows, permutation.padded_offsets, row_prob), permutation)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_few_tokens(tokens, activation, recipe):
    """Shapes of all gradients, and zeros for an expert without tokens. The last expert has none, with one token only
    experts 0 and 2 have."""
    block = Block(activation, recipe)
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    prob = torch.rand(tokens, 2).requires_grad_()
    experts = torch.tensor([2, 0]).repeat(tokens, 1)
    experts[1::2] = torch.tensor([1, 2])
    y = block(x, experts, prob)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.square().sum().backward()
    used = set(experts.flatten().tolist())
    for parameter in block.parameters():
        assert parameter.grad.shape == parameter.shape
        assert {e for e in range(EXPERTS) if parameter.grad[e].any()} == used
    for leaf in (x, prob):
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any() or tokens == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [0, 256])
def test_no_expert_has_rows(recipe, rows):
    mlp = GroupedMLP(2, HIDDEN, FFN, "swiglu", recipe, bias=True)
    for result in gradients(mlp, *inputs(rows, (0, 0))):
        assert not result.any()


@pytest.mark.parametrize("zero", ["x", "prob", "dy", "fc1_weight", "fc2_weight"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros(recipe, zero):
    """A tensor of zeros has no largest value to scale by: results are zeros and numbers."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe)
    x, offsets, prob, dy = inputs()
    with torch.no_grad():
        {"x": x, "prob": prob, "dy": dy, **dict(mlp.named_parameters())}[zero].zero_()
    y, *results = gradients(mlp, x, offsets, prob, dy)
    assert not y.any() or zero == "dy"
    assert all(result.isfinite().all() for result in results)
    nonzero = {
        name for name, result in zip(("x", "prob", "fc1_weight", "fc2_weight"), results, strict=True) if result.any()
    }
    flows = {"x": set(), "prob": {"prob"}, "dy": set(), "fc1_weight": set(), "fc2_weight": {"fc2_weight"}}
    assert nonzero == flows[zero]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_rows_without_an_expert(activation, recipe):
    """NaN there changes no bit of anything; y and the gradients of these rows are zero."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, activation, recipe, bias=True)
    results = []
    for fill in (0.0, float("nan")):
        x, offsets, prob, dy = inputs(offsets=(256, 256, 512, 768))
        with torch.no_grad():
            for rows in (x, prob, dy):
                rows[768:] = fill
        results.append(gradients(mlp, x, offsets, prob, dy))
    assert_same(*results)
    for of_rows in results[1][:3]:
        assert not of_rows[768:].any() and of_rows[:768].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_separate(recipe):
    """Another expert's rows, probabilities and weights do not change an expert's results. NVFP4's factor is of the whole
    tensor: its largest value stays."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe, bias=True)
    x, offsets, prob, dy = inputs()
    with torch.no_grad():
        for tensor in (x, dy, mlp.fc1_weight, mlp.fc2_weight):
            tensor.view(-1)[-1] = 8.0  # in the last expert
    before = gradients(mlp, x, offsets, prob, dy)
    with torch.no_grad():
        for tensor in (x, prob, dy):
            tensor[256:768] *= -0.5
        for parameter in mlp.parameters():
            parameter[2] *= -0.5
    after = gradients(mlp, x, offsets, prob, dy)
    for one, other in zip(before, after, strict=True):
        of_rows = one.shape[0] > EXPERTS
        for kept in (slice(0, 256), slice(768, 1024)) if of_rows else (0, 3):
            assert torch.equal(one[kept], other[kept])
        changed = slice(256, 768) if of_rows else 2
        assert not torch.equal(one[changed], other[changed])


@pytest.mark.parametrize("recipe", RECIPES)
def test_input_forms(recipe):
    """x in FP32 and with other strides: the same numbers, y and dx in the dtype of x."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, recipe=recipe)
    x, offsets, prob, dy = inputs()
    expected = gradients(mlp, x, offsets, prob, dy)
    strided = x.detach().t().contiguous().t().requires_grad_()
    assert_same(gradients(mlp, strided, offsets, prob, dy.t().contiguous().t()), expected)
    single = gradients(mlp, x.detach().float().requires_grad_(), offsets, prob, dy.float())
    assert single[0].dtype == single[1].dtype == torch.float32
    assert_same([r.to(e.dtype) for r, e in zip(single, expected, strict=True)], expected)
    # a broadcast gradient has no memory of its own
    y = mlp(x, offsets, prob)
    assert_same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(mlp(x, offsets, prob), x, torch.ones_like(y)))


# What it launches and saves ------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts this package's operators; fails on operators that read a tensor's values on the host."""

    HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        assert not name.startswith(self.HOST_READS), f"{name} synchronises with the host"
        if namespace == "cudnn_grouped":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_fused_operators(activation, recipe, bias):
    """One fused GEMM each way, two plain ones, two weight gradients. Quantised: x and dy each by rows and by tokens, the
    weights each in both directions; a fused GEMM's own outputs are not quantised again in MXFP8. No host read."""
    block = Block(activation, recipe, bias)
    x, experts, prob = (
        torch.randn(100, HIDDEN, requires_grad=True),
        torch.zeros(100, 2, dtype=torch.int64),
        torch.rand(100, 2),
    )
    with Launches() as launches:
        block(x, experts, prob).sum().backward()
    fused = ("srelu", "dsrelu") if activation == "srelu" else ("glu", "dglu")
    quantize = {"bf16": 0, "mxfp8": 8, "nvfp4": 8}[recipe]
    expected = {**dict.fromkeys(fused, 1), "mm": 2, "wgrad": 2, "quantize": quantize, "dact": int(bias)}
    assert launches.counts == Counter({name: count for name, count in expected.items() if count})


def saved_bytes(function, parameters):
    """Bytes that autograd keeps, each storage once, without the parameters."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function().sum()
    own = {p.untyped_storage().data_ptr() for p in parameters}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def plain_layer(activation, x, w1, w2, prob):
    """One expert in plain torch; gates and ups are the halves of the first product."""
    c = x @ w1.T
    if activation == "srelu":
        hidden = F.relu(c).square()
    else:
        gate, up = c.chunk(2, dim=-1)
        hidden = F.silu(gate) * up
    return (hidden * prob[:, None]) @ w2.T


@pytest.mark.parametrize(("hidden", "ffn"), [(512, 512), (448, 128)], ids=["K = F = 512", "7168 : 2048"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu"])
def test_saved_bytes(activation, hidden, ffn):
    """MXFP8 keeps at most 60 % of plain torch BF16, and what the docstring says: C, and x and D with a scale per 32."""
    rows, width = 512, 1 if activation == "srelu" else 2
    x, offsets, prob, _ = inputs(rows, (256, 512), hidden)
    saved = {}
    for recipe in RECIPES:
        mlp = GroupedMLP(2, hidden, ffn, activation, recipe, dtype=torch.bfloat16)
        saved[recipe] = saved_bytes(lambda m=mlp: m(x, offsets, prob), mlp.parameters())
    weights = [torch.randn(n, k).bfloat16().requires_grad_() for n, k in ((ffn * width, hidden), (hidden, ffn))]
    low_prob = prob.detach().bfloat16().requires_grad_()
    plain = saved_bytes(lambda: plain_layer(activation, x, *weights, low_prob), weights)
    assert saved["mxfp8"] <= 0.6 * plain
    fixed = 4 * rows + 4 * 2  # prob and offsets
    assert saved["bf16"] == saved["nvfp4"] == rows * 2 * (hidden + width * ffn + ffn) + fixed
    scales = sum(-(-columns // 128) * 128 * rows // 32 for columns in (hidden, ffn))  # in whole atoms of 128 columns
    assert saved["mxfp8"] == rows * (hidden + ffn + 2 * width * ffn) + scales + fixed


def test_frozen_weights_save_less():
    """Without weight gradients neither x nor D is kept."""
    mlp = GroupedMLP(2, 128, 128, "swiglu", "mxfp8").requires_grad_(False)
    x, offsets, prob, dy = inputs(512, (256, 512), 128)
    assert saved_bytes(lambda: mlp(x, offsets, prob), mlp.parameters()) == 512 * (2 * 256 + 4) + 8
    frozen = torch.autograd.grad(mlp(x, offsets, prob), [x, prob], dy)
    assert_same(frozen, gradients(mlp.requires_grad_(True), x, offsets, prob, dy)[1:3])


@pytest.mark.parametrize("wanted", ["x", "prob", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_leaf(recipe, wanted):
    """One tensor alone has the same gradient as with all the others."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe, bias=True)
    x, offsets, prob, dy = inputs()
    names = ["x", "prob", *(name for name, _ in mlp.named_parameters())]
    expected = dict(zip(names, gradients(mlp, x, offsets, prob, dy)[1:], strict=True))[wanted]
    leaves = {"x": x, "prob": prob, **dict(mlp.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == wanted)
    mlp(x, offsets, prob).backward(dy)
    assert torch.equal(leaves[wanted].grad, expected)
    assert all(leaf.grad is None for name, leaf in leaves.items() if name != wanted)


# Torch's tools -------------------------------------------------------------------------------------------------


def test_state_dict():
    mlp, other = (GroupedMLP(EXPERTS, HIDDEN, FFN, "srelu", bias=True) for _ in range(2))
    assert list(mlp.state_dict()) == ["fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"]
    shapes = [tuple(p.shape) for p in mlp.parameters()]
    assert shapes == [(EXPERTS, FFN, HIDDEN), (EXPERTS, HIDDEN, FFN), (EXPERTS, FFN), (EXPERTS, HIDDEN)]
    assert not torch.equal(mlp.fc1_weight, other.fc1_weight)
    other.load_state_dict(mlp.state_dict())
    arguments = inputs()
    assert_same(gradients(mlp, *arguments), gradients(other, *arguments))
    assert [name for name, _ in GroupedMLP(2, 32, 32).named_parameters()] == ["fc1_weight", "fc2_weight"]


def test_meta_device():
    """Made without memory, then materialised and filled: the way of large models."""
    with torch.device("meta"):
        mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, bias=True)
    assert mlp(*(t.to("meta") for t in inputs()[:3])).shape == (1024, HIDDEN)
    mlp.to_empty(device="cpu").reset_parameters()
    for weight, bias in ((mlp.fc1_weight, mlp.fc1_bias), (mlp.fc2_weight, mlp.fc2_bias)):
        bound = weight.shape[-1] ** -0.5
        for tensor in (weight, bias):
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert abs(tensor.mean()) < 0.2 * bound


@pytest.mark.parametrize("recipe", RECIPES)
def test_functional_call(recipe):
    mlp, other = (GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe, bias=True) for _ in range(2))
    x, offsets, prob, dy = inputs()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in mlp.named_parameters()}
    y = torch.func.functional_call(other, parameters, (x, offsets, prob))
    results = [y, *torch.autograd.grad(y, [x, prob, *parameters.values()], dy)]
    assert_same(results, gradients(mlp, x, offsets, prob, dy))


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoint(recipe):
    """Recomputed in the backward: the same bits, and nothing but the inputs kept."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe, bias=True)
    x, offsets, prob, dy = inputs()
    expected = gradients(mlp, x, offsets, prob, dy)
    y = checkpoint(mlp, x, offsets, prob, use_reentrant=False)
    assert_same([y, *torch.autograd.grad(y, [x, prob, *mlp.parameters()], dy)], expected)


def test_no_second_derivatives():
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN)
    x, offsets, prob, dy = inputs()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(mlp(x, offsets, prob), x, dy, create_graph=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_float64_parameters(recipe):
    """Parameters keep their dtype; the operators have no float64, so they work in float32."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, recipe=recipe, bias=True)
    x, offsets, prob, dy = inputs()
    expected = gradients(mlp, x, offsets, prob, dy)
    results = gradients(mlp.double(), x, offsets, prob, dy)
    assert all(p.grad is None or p.grad.dtype == torch.float64 for p in mlp.parameters())
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.float(), other.float())


@pytest.mark.parametrize("recipe", RECIPES)
def test_bias_at_any_address(recipe):
    """As a part of a flat buffer of parameters is: aligned to its elements alone."""
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, "swiglu", recipe, bias=True)
    arguments = inputs()
    expected = gradients(mlp, *arguments)
    for name in ("fc1_bias", "fc2_bias"):
        bias = getattr(mlp, name).detach()
        room = torch.empty(bias.numel() + 1)
        assert room.data_ptr() % 8 == 0
        setattr(mlp, name, torch.nn.Parameter(room[1:].view(bias.shape).copy_(bias)))
    assert_same(gradients(mlp, *arguments), expected)


def test_prob_may_be_expanded():
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN)
    x, offsets, prob, _ = inputs()
    one = torch.ones(1).expand(prob.shape[0])
    assert torch.equal(mlp(x, offsets, one), mlp(x, offsets, one.contiguous()))


def test_autocast_and_no_grad():
    mlp = GroupedMLP(EXPERTS, HIDDEN, FFN, recipe="mxfp8")
    x, offsets, prob, _ = inputs()
    expected = mlp(x, offsets, prob)
    with torch.no_grad():
        assert torch.equal(mlp(x, offsets, prob), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mlp(x, offsets, prob), expected)


# Errors --------------------------------------------------------------------------------------------------------

CONSTRUCTION = [
    ({"activation": "relu"}, "activation: expected one of srelu, swiglu, geglu, clamped_swiglu, situglu, got 'relu'"),
    ({"recipe": "fp8"}, "recipe: expected one of bf16, mxfp8, nvfp4, got 'fp8'"),
    ({"num_experts": 0}, "num_experts: expected an int above 0, got 0"),
    ({"hidden_size": -32}, "hidden_size: expected an int above 0, got -32"),
    ({"ffn_size": 64.0}, "ffn_size: expected an int above 0, got 64.0"),
    ({"hidden_size": 48}, "hidden_size: expected a multiple of 32, got 48"),
    ({"ffn_size": 80}, "ffn_size: expected a multiple of 32, got 80"),
]


@pytest.mark.parametrize(("change", "message"), CONSTRUCTION)
def test_construction_errors(change, message):
    with pytest.raises(ValueError) as caught:
        GroupedMLP(**{"num_experts": 2, "hidden_size": 64, "ffn_size": 64, **change})
    assert str(caught.value) == message


CALL = [
    ({"x": torch.zeros(512, 32)}, r"x: expected shape \(M, 64\), got \(512, 32\)"),
    ({"x": torch.zeros(512, 64, 1)}, r"x: expected shape \(M, 64\), got \(512, 64, 1\)"),
    ({"x": torch.zeros(512, 64, dtype=torch.int64)}, "x: expected a floating-point dtype, got torch.int64"),
    ({"x": torch.zeros(500, 64), "prob": torch.zeros(500)}, "x: expected M a multiple of 256 .*got 500"),
    (
        {"padded_offsets": torch.tensor([512], dtype=torch.int32)},
        r"padded_offsets: expected int32 of shape \(2,\), got",
    ),
    ({"padded_offsets": torch.tensor([256, 512])}, "padded_offsets: expected int32 .*got torch.int64"),
    ({"prob": torch.zeros(256)}, r"prob: expected float32 of shape \(M,\), got .*\(256,\)"),
    ({"prob": torch.zeros(512, 1)}, r"prob: expected float32 of shape \(M,\), got .*\(512, 1\)"),
    ({"prob": torch.zeros(512, dtype=torch.int64)}, "prob: expected float32 .*got torch.int64"),
]


@pytest.mark.parametrize(("change", "message"), CALL)
def test_call_errors(change, message):
    arguments = {
        "x": torch.zeros(512, 64),
        "padded_offsets": torch.tensor([256, 512], dtype=torch.int32),
        "prob": torch.zeros(512),
    }
    mlp = GroupedMLP(2, 64, 32)
    mlp(**arguments)
    with pytest.raises(ValueError, match=message):
        mlp(**{**arguments, **change})


def test_representation():
    text = repr(GroupedMLP(2, 64, 32, "srelu", "mxfp8"))
    assert text == "GroupedMLP(2, 64, 32, activation='srelu', recipe='mxfp8')"
