"""GroupedMLP's numbers: against its pipeline in FP64 (mlp_reference.py), and against a layer in plain torch BF16."""

import mlp_reference as reference
import pytest
import torch
from activation_reference import activate

from cudnn_grouped.nn import GroupedMLP

RECIPES = ("bf16", "mxfp8", "nvfp4")
OFFSETS, ROWS = (256, 256, 768), 1024  # an expert without rows, and rows without an expert
HIDDEN, FFN = 96, 160  # K blocks that do not fill an atom of scales


def build(activation, recipe, bias, dtype=torch.float32, seed=7):
    """A module with O(1) values on both sides of every clamp, and its inputs; NaN in the rows without an expert."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    mlp = GroupedMLP(len(OFFSETS), HIDDEN, FFN, activation, recipe, bias, dtype=dtype)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            scale = 4 * HIDDEN**-0.5 if name == "fc1_weight" else FFN**-0.5 if name == "fc2_weight" else 1.0
            parameter.copy_(scale * normal(*parameter.shape))
    x, dy, prob = normal(ROWS, HIDDEN), normal(ROWS, HIDDEN), normal(ROWS)
    for rows in (x, dy, prob):
        rows[OFFSETS[-1] :] = float("nan")
    return (
        mlp,
        x.bfloat16().requires_grad_(),
        torch.tensor(OFFSETS, dtype=torch.int32),
        prob.requires_grad_(),
        dy.bfloat16(),
    )


def run(mlp, x, offsets, prob, dy):
    """y and every gradient, by name."""
    y = mlp(x, offsets, prob)
    leaves = {"x": x, "prob": prob, **dict(mlp.named_parameters())}
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_pipeline(activation, recipe, bias):
    mlp, *inputs = build(activation, recipe, bias)
    x, _, prob, dy = inputs
    got, want = run(mlp, *inputs), reference.expected(mlp, x, OFFSETS, prob, dy)
    assert got.keys() == want.keys()
    for name, (bounded, dtype) in want.items():
        reference.check(name, got[name], bounded, dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_parameters(recipe):
    """Their gradients are rounded to their dtype."""
    mlp, *inputs = build("swiglu", recipe, True, torch.bfloat16)
    x, _, prob, dy = inputs
    got, want = run(mlp, *inputs), reference.expected(mlp, x, OFFSETS, prob, dy)
    for name, (bounded, dtype) in want.items():
        reference.check(name, got[name], bounded, dtype)


def plain(mlp, x, prob, dy, dtype):
    """The same layer in plain torch of a dtype, expert by expert: y and its gradients."""
    name, parameters = reference.ACTIVATIONS[mlp.config.activation]
    leaves = {"x": x, "prob": prob, **dict(mlp.named_parameters())}
    leaves = {k: v.detach().to(dtype).requires_grad_() for k, v in leaves.items()}
    y = x.new_zeros(ROWS, HIDDEN, dtype=dtype)
    for expert, (start, end) in enumerate(zip([0, *OFFSETS[:-1]], OFFSETS, strict=True)):
        rows = slice(start, end)
        w1, w2, b1, b2 = (leaves[f"fc{i}_{what}"][expert] for what in ("weight", "bias") for i in (1, 2))
        p = leaves["prob"][rows, None]
        hidden = p * activate(name, leaves["x"][rows] @ w1.T + b1, parameters)
        y = y.index_put((torch.arange(start, end),), hidden @ w2.T + p * b2)
    owned = torch.where(torch.arange(ROWS)[:, None] < OFFSETS[-1], dy.to(dtype), 0)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), owned), strict=True))}


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_as_exact_as_plain_torch(activation):
    """The true function and its true gradients: at most twice the error of plain torch in BF16, against FP64."""
    mlp, *inputs = build(activation, "bf16", True)
    with torch.no_grad():
        for parameter in mlp.parameters():  # the same numbers in all three
            parameter.copy_(parameter.bfloat16())
        inputs[2].copy_(inputs[2].bfloat16())
    x, _, prob, dy = inputs
    got, naive, want = (
        run(mlp, *inputs),
        plain(mlp, x, prob, dy, torch.bfloat16),
        plain(mlp, x, prob, dy, torch.float64),
    )
    for name, exact in want.items():
        error, allowed = ((torch.linalg.norm(r[name].double() - exact)) for r in (got, naive))
        assert error <= 2 * allowed, f"{name}: {error:.3g}, plain torch {allowed:.3g}"
