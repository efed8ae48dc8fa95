"""Tokens to padded expert rows and back, without a host synchronisation.

Both ways are gathers, forward and backward, so that nothing depends on the order of atomic additions.
"""

from typing import NamedTuple

import torch

ALIGNMENT = 256  # an expert's rows


class Permutation(NamedTuple):
    """Where tokens went. M is fixed by the number of tokens: their rows, and room to pad every expert.

    row_of (T, k) int64: the row of each of a token's k copies. copy_of_row (M,) int64: the copy (token * k + slot) in a
    row, T * k for a row of padding. padded_offsets (L,) int32: cumulative expert ends, multiples of 256.
    """

    row_of: torch.Tensor
    copy_of_row: torch.Tensor
    padded_offsets: torch.Tensor


class _Spread(torch.autograd.Function):
    """rows[m] = x[copy_of_row[m] // k], zero for padding; the gradient of x sums its copies' rows."""

    @staticmethod
    def forward(ctx, x, row_of, copy_of_row):
        ctx.save_for_backward(row_of, copy_of_row)
        return _spread(x, row_of, copy_of_row)

    @staticmethod
    def backward(ctx, rows):
        row_of, _ = ctx.saved_tensors
        return _collect(rows, row_of), None, None


class _Collect(torch.autograd.Function):
    """out[t] = sum over slots of rows[row_of[t, slot]]; the gradient of rows is spread back."""

    @staticmethod
    def forward(ctx, rows, row_of, copy_of_row):
        ctx.save_for_backward(row_of, copy_of_row)
        return _collect(rows, row_of)

    @staticmethod
    def backward(ctx, out):
        row_of, copy_of_row = ctx.saved_tensors
        return _spread(out, row_of, copy_of_row), None, None


class _SpreadProb(torch.autograd.Function):
    """One value per copy instead of one per token."""

    @staticmethod
    def forward(ctx, prob, row_of, copy_of_row):
        ctx.save_for_backward(row_of)
        flat = torch.cat([prob.reshape(-1), prob.new_zeros(1)])
        return flat[copy_of_row]

    @staticmethod
    def backward(ctx, rows):
        (row_of,) = ctx.saved_tensors
        return rows[row_of], None, None


def _spread(x, row_of, copy_of_row):
    padded = torch.cat([x, x.new_zeros((1, x.shape[1]))])
    return padded[copy_of_row // row_of.shape[1]]


def _collect(rows, row_of):
    return rows[row_of].sum(dim=1)


def plan(experts, num_experts):
    """The Permutation of an assignment (T, k) of tokens to experts."""
    tokens, slots = experts.shape
    copies = tokens * slots
    flat = experts.reshape(-1).long()
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    expert = flat[order]
    position = torch.arange(copies, device=flat.device) - (counts.cumsum(0) - counts)[expert]
    row = (ends - padded)[expert] + position
    rows = ((copies + ALIGNMENT - 1) // ALIGNMENT + num_experts) * ALIGNMENT
    row_of = torch.empty_like(row).scatter(0, order, row).view(tokens, slots)
    copy_of_row = torch.full((rows,), copies, dtype=torch.int64, device=flat.device).scatter(0, row, order)
    return Permutation(row_of, copy_of_row, ends.to(torch.int32))


def permute(x, experts, prob, num_experts):
    """Copy each token to a row of every expert it goes to.

    x: (T, H) tokens. experts: (T, k) integer expert of each copy, below num_experts. prob: (T, k) routing probabilities.
    Returns (rows (M, H), row_prob (M,) float32, permutation), M = (ceil(T * k / 256) + num_experts) * 256, rows of an
    expert adjacent and in token order, padding zero. Differentiable in x and prob. ValueError for other shapes.
    """
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (T, H), got {tuple(x.shape)}")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"experts: expected shape (T, k) with T = {x.shape[0]}, got {tuple(experts.shape)}")
    if experts.shape[1] < 1:
        raise ValueError(f"experts: expected k of at least 1, got shape {tuple(experts.shape)}")
    if not isinstance(num_experts, int) or isinstance(num_experts, bool) or num_experts < 1:
        raise ValueError(f"num_experts: expected an int above 0, got {num_experts!r}")
    if experts.dtype.is_floating_point or experts.dtype.is_complex or experts.dtype == torch.bool:
        raise ValueError(f"experts: expected an integer dtype, got {experts.dtype}")
    if prob.shape != experts.shape:
        raise ValueError(f"prob: expected the shape of experts, {tuple(experts.shape)}, got {tuple(prob.shape)}")
    try:
        permutation = plan(experts, num_experts)
    except RuntimeError as error:  # scatter_add's own bounds check: looking at the values would wait for the device
        raise ValueError(f"experts: expected numbers from 0 to {num_experts - 1} ({error})") from error
    rows = _Spread.apply(x, permutation.row_of, permutation.copy_of_row)
    row_prob = _SpreadProb.apply(prob.float(), permutation.row_of, permutation.copy_of_row)
    return rows, row_prob, permutation


def unpermute(rows, permutation):
    """The sum of each token's rows: (M, H) to (T, H), the inverse of ``permute``. Differentiable in rows.

    The experts' outputs carry their routing probability already, so the sum has no weights. ValueError for other rows.
    """
    if not isinstance(permutation, Permutation):
        raise ValueError(f"permutation: expected what permute returned, got {type(permutation).__name__}")
    count = permutation.copy_of_row.shape[0]
    if rows.dim() != 2 or rows.shape[0] != count:
        raise ValueError(f"rows: expected shape (M, H) with M = {count}, got {tuple(rows.shape)}")
    return _Collect.apply(rows, permutation.row_of, permutation.copy_of_row)
