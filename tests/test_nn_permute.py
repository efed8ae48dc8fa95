"""permute and unpermute: where tokens go, both directions' gradients, nothing that depends on order or the host."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from cudnn_grouped.nn import GroupedMLP, permute, unpermute

CASES = [  # tokens, copies of each, experts
    (0, 2, 3),
    (1, 1, 1),
    (1, 2, 4),
    (255, 1, 2),
    (256, 1, 2),
    (257, 2, 3),
    (500, 8, 16),
    (40, 4, 64),
]


def assignment(tokens, slots, experts, seed=0):
    """Experts of each token, all different; the last expert gets none where there are enough others."""
    generator = torch.Generator().manual_seed(seed)
    usable = max(slots, experts - 1)
    return torch.rand(tokens, usable, generator=generator).argsort(1)[:, :slots]


def whole_numbers(*shape, seed=1):
    """Sums of them are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def expected(x, experts, prob, num_experts):
    """Rows, their probabilities and offsets, one token at a time."""
    rows, row_prob, offsets = [], [], []
    for expert in range(num_experts):
        for token, slot in (experts == expert).nonzero().tolist():
            rows.append(x[token])
            row_prob.append(prob[token, slot])
        while len(rows) % 256:
            rows.append(torch.zeros_like(x[0]))
            row_prob.append(torch.zeros(()))
        offsets.append(len(rows))
    total = (-(-experts.numel() // 256) + num_experts) * 256
    rows += [x.new_zeros(x.shape[1])] * (total - len(rows))
    row_prob += [torch.zeros(())] * (total - len(row_prob))
    return torch.stack(rows), torch.stack(row_prob), torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize(("tokens", "slots", "num_experts"), CASES)
def test_layout(tokens, slots, num_experts, dtype):
    x, experts, prob = whole_numbers(tokens, 5), assignment(tokens, slots, num_experts), torch.rand(tokens, slots)
    rows, row_prob, permutation = permute(x, experts.to(dtype), prob, num_experts)
    want_rows, want_prob, want_offsets = expected(x, experts, prob, num_experts)
    assert torch.equal(rows, want_rows) and torch.equal(row_prob, want_prob)
    assert torch.equal(permutation.padded_offsets, want_offsets) and permutation.padded_offsets.dtype == torch.int32
    assert permutation.row_of.shape == (tokens, slots)
    # Every copy has a row of its own, and the two maps are each other's inverse.
    copies = torch.arange(tokens * slots)
    assert torch.equal(permutation.copy_of_row[permutation.row_of.flatten()], copies)
    assert (permutation.copy_of_row < tokens * slots).sum() == tokens * slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("tokens", "slots", "num_experts"), CASES)
def test_round_trip(tokens, slots, num_experts, dtype):
    """A token's rows add up to the token, as often as it was copied."""
    x, experts = whole_numbers(tokens, 3).to(dtype), assignment(tokens, slots, num_experts)
    rows, _, permutation = permute(x, experts, torch.ones(tokens, slots), num_experts)
    assert rows.dtype == dtype
    assert torch.equal(unpermute(rows, permutation), slots * x)


def test_all_copies_in_one_expert():
    """Capacity holds in the worst case: every copy with one expert, or one copy with each of many."""
    x = whole_numbers(300, 4)
    rows, _, permutation = permute(x, torch.full((300, 2), 1), torch.ones(300, 2), 3)
    assert permutation.padded_offsets.tolist() == [0, 768, 768]
    assert torch.equal(rows[:600], x.repeat_interleave(2, 0)) and not rows[600:].any()
    assert torch.equal(unpermute(rows, permutation), 2 * x)
    _, _, permutation = permute(whole_numbers(3, 4), torch.tensor([[0], [1], [2]]), torch.ones(3, 1), 3)
    assert permutation.padded_offsets.tolist() == [256, 512, 768]


@pytest.mark.parametrize(("tokens", "slots", "num_experts"), CASES)
def test_gradients_are_transposes(tokens, slots, num_experts):
    """<P x, r> = <x, P' r> and <p, P' q>, <U r, y> = <r, U' y>: all exact in whole numbers."""
    x, prob = whole_numbers(tokens, 4).requires_grad_(), whole_numbers(tokens, slots, seed=2).requires_grad_()
    rows, row_prob, permutation = permute(x, assignment(tokens, slots, num_experts), prob, num_experts)
    r, q = whole_numbers(*rows.shape, seed=3), whole_numbers(*row_prob.shape, seed=4)
    dx, dprob = torch.autograd.grad([rows, row_prob], [x, prob], [r, q])
    assert (rows * r).sum() == (x * dx).sum() and (row_prob * q).sum() == (prob * dprob).sum()
    r, y = r.requires_grad_(), whole_numbers(tokens, 4, seed=5)
    out = unpermute(r, permutation)
    (dr,) = torch.autograd.grad(out, r, y)
    assert (out * y).sum() == (r * dr).sum()
    assert not dr[permutation.copy_of_row == tokens * slots].any()


def test_gradcheck():
    experts = assignment(7, 3, 4)
    x, prob = torch.randn(7, 2, dtype=torch.float64, requires_grad=True), torch.rand(7, 3, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, experts, prob, 4)[0], x)
    permutation = permute(x, experts, prob, 4)[2]
    rows = torch.randn(permutation.copy_of_row.shape[0], 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, permutation), rows)


def test_padding_gets_no_gradient_and_gives_none():
    """What stands in rows of padding never reaches a token."""
    x, experts = whole_numbers(10, 4).requires_grad_(), assignment(10, 2, 3)
    rows, row_prob, permutation = permute(x, experts, torch.rand(10, 2), 3)
    padding = permutation.copy_of_row == 20
    nan = torch.full_like(rows, float("nan"))
    out = unpermute(torch.where(padding[:, None], nan, rows), permutation)
    assert torch.equal(out, 2 * x)
    (dx,) = torch.autograd.grad(rows, x, torch.where(padding[:, None], nan, torch.ones_like(rows)))
    assert torch.equal(dx, torch.full_like(dx, 2.0))


def test_deterministic():
    """Bit for bit, under torch's deterministic mode: no order of additions is left to chance."""
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(3):
            x, prob = (
                torch.randn(600, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(),
                torch.ones(600, 8),
            )
            rows, row_prob, permutation = permute(x, assignment(600, 8, 9), prob, 9)
            y = unpermute(rows * row_prob[:, None], permutation)
            results.append((rows, y, torch.autograd.grad(y.square().sum(), x)[0]))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_no_host_synchronisation(recipe):
    """Fake tensors have no values: whatever reads one on the host fails. Forward and backward."""
    with FakeTensorMode():
        mlp = GroupedMLP(4, 64, 96, recipe=recipe, bias=True)
        x, prob = torch.randn(100, 64, requires_grad=True), torch.rand(100, 2, requires_grad=True)
        rows, row_prob, permutation = permute(x, torch.randint(0, 4, (100, 2)), prob, 4)
        y = unpermute(mlp(rows, permutation.padded_offsets, row_prob), permutation)
        y.sum().backward()
        assert y.shape == x.shape and x.grad.shape == x.shape and prob.grad.shape == prob.shape
        with pytest.raises(DataDependentOutputException):
            permutation.padded_offsets[-1].item()


ERRORS = [
    ({"x": torch.zeros(4, 8, 1)}, r"x: expected shape \(T, H\), got \(4, 8, 1\)"),
    ({"experts": torch.zeros(4, dtype=torch.int64)}, r"experts: expected shape \(T, k\) with T = 4, got \(4,\)"),
    ({"experts": torch.zeros(5, 2, dtype=torch.int64)}, r"experts: expected shape \(T, k\) with T = 4, got \(5, 2\)"),
    ({"experts": torch.zeros(4, 2)}, "experts: expected an integer dtype, got torch.float32"),
    ({"experts": torch.zeros(4, 2, dtype=torch.bool)}, "experts: expected an integer dtype, got torch.bool"),
    ({"prob": torch.zeros(4, 1)}, r"prob: expected the shape of experts, \(4, 2\), got \(4, 1\)"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors(change, message):
    arguments = {"x": torch.zeros(4, 8), "experts": torch.zeros(4, 2, dtype=torch.int64), "prob": torch.zeros(4, 2)}
    permute(**arguments, num_experts=3)
    with pytest.raises(ValueError, match=message):
        permute(**{**arguments, **change}, num_experts=3)


def test_errors_of_unpermute():
    rows, _, permutation = permute(torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2), 3)
    for wrong in (rows[:256], rows[None]):
        with pytest.raises(ValueError, match=rf"^rows: expected shape \(M, H\) with M = {len(rows)}, got \("):
            unpermute(wrong, permutation)
    with pytest.raises(ValueError, match="^permutation: expected what permute returned, got Tensor"):
        unpermute(rows, permutation.padded_offsets)
