"""How a recipe gives operands to the grouped GEMMs: BF16 as they are, MXFP8 and NVFP4 quantised.

A weight (L, N, K) is an operand twice: for the forward GEMM in blocks along K, for the input gradient in blocks along N.
"""

from typing import NamedTuple

import torch

from ..quantize import quantize

_OPS = torch.ops.cudnn_grouped


def plain(x):
    """x as the operators take it: they have no float64."""
    return x.float() if x.dtype == torch.float64 else x


# On the bits of float32 as int32, of torch or JAX: integer arithmetic is the same in every backend.


def factor_bits(amax_bits):
    """The largest power of four with amax * factor < 2048, of amax > 0: within 6 * 448, the largest of e2m1 data and e4m3
    scales. Its inverse and the root of that are exact."""
    exponent = (amax_bits >> 23) - 127
    power = (((10 - exponent) >> 1) << 1).clip(max=126)
    return (power + 127) << 23


def inverse_bits(factor_bits, root):
    """1 / factor, or its square root, of a power of four."""
    exponent = 127 - (factor_bits >> 23)
    return ((exponent >> 1 if root else exponent) + 127) << 23


def _inverse(norm, root):
    return inverse_bits(norm.view(torch.int32), root).view(torch.float32)


class Operand(NamedTuple):
    """A GEMM operand: data, scale factors or None, and the factor its values were multiplied by, or None."""

    data: torch.Tensor
    scales: torch.Tensor | None = None
    norm: torch.Tensor | None = None


class TokenOperand(NamedTuple):
    """An operand of the weight gradient, (M, columns): its blocks run along the tokens of each expert."""

    data: torch.Tensor
    scales: torch.Tensor | None = None


class BF16:
    """BF16 throughout."""

    hidden_dtype = torch.bfloat16
    options = {}  # noqa: RUF012

    @staticmethod
    def rows(x, padded_offsets):
        """The GEMM's A; rows past the last offset have no influence on the others."""
        return Operand(x.to(torch.bfloat16))

    @staticmethod
    def weight(w):
        return Operand(w.to(torch.bfloat16).permute(1, 2, 0))

    @staticmethod
    def weight_transposed(w):
        return Operand(w.to(torch.bfloat16).permute(2, 1, 0))

    @staticmethod
    def tokens(x, padded_offsets):
        return TokenOperand(x.to(torch.bfloat16))

    @classmethod
    def from_gemm(cls, d, d_col, sfd_row, sfd_col, padded_offsets):
        """The two operands that a fused GEMM's D makes: of the next GEMM, and of the weight gradient."""
        return cls.rows(d, padded_offsets), cls.tokens(d, padded_offsets)


class MXFP8(BF16):
    """e4m3 data with a power-of-two scale per 32 values. D comes quantised by rows and by columns: nothing to do."""

    hidden_dtype = torch.float8_e4m3fn
    options = {"sf_vec_size": 32, "discrete_col_sfd": True}  # noqa: RUF012

    @staticmethod
    def rows(x, padded_offsets):
        return Operand(*quantize(x, "mxfp8"))

    @staticmethod
    def weight(w):
        return Operand(*quantize(plain(w).permute(1, 2, 0), "mxfp8"))

    @staticmethod
    def weight_transposed(w):
        data, scales = quantize(plain(w).permute(1, 2, 0), "mxfp8", axis="col")
        return Operand(data.transpose(0, 1), scales)

    @staticmethod
    def tokens(x, padded_offsets):
        return TokenOperand(*quantize(x, "mxfp8", axis="col", padded_offsets=padded_offsets))

    @classmethod
    def from_gemm(cls, d, d_col, sfd_row, sfd_col, padded_offsets):
        return Operand(d, sfd_row), TokenOperand(d_col, sfd_col)


class NVFP4(BF16):
    """e2m1 data with an e4m3 scale per 16 values and one factor per tensor; weight gradients in BF16."""

    options = {"sf_vec_size": 16}  # noqa: RUF012

    @staticmethod
    def _norm(amax):
        factor = factor_bits(amax.float().view(torch.int32)).view(torch.float32)
        return torch.where(amax > 0, factor, 1.0).view(1)

    @staticmethod
    def _magnitude(x):
        """Of finite values: a NaN or infinity spoils its own row and not the factor of all."""
        return torch.where(x.isfinite(), x.abs(), 0.0)

    @classmethod
    def rows(cls, x, padded_offsets):
        owned = torch.arange(x.shape[0], device=x.device) < padded_offsets[-1]
        amax = torch.where(owned, cls._magnitude(x).amax(dim=1), 0.0)
        norm = cls._norm(torch.cat([amax, amax.new_zeros(1)]).amax())  # of zero without rows
        return Operand(*quantize(x, "nvfp4", norm_const=norm), norm)

    @classmethod
    def weight(cls, w):
        norm = cls._norm(cls._magnitude(w).amax())
        return Operand(*quantize(plain(w).permute(1, 2, 0), "nvfp4", norm_const=norm), norm)

    @classmethod
    def weight_transposed(cls, w):
        norm = cls._norm(cls._magnitude(w).amax())
        return Operand(*quantize(plain(w).permute(1, 2, 0), "nvfp4", axis="col", norm_const=norm), norm)


RECIPES = {"bf16": BF16, "mxfp8": MXFP8, "nvfp4": NVFP4}


def gemm_arguments(a, b):
    """Keyword arguments that an operand pair needs beside a and b."""
    return {} if a.scales is None else {"sfa": a.scales, "sfb": [b.scales]}


def alpha_of(a, b, padded_offsets, squared=False):
    """(L,) float32 that undoes the operands' factors, or its root where the operator squares it; None without factors."""
    if a.norm is None:
        return None
    return ones_of(padded_offsets) * (_inverse(a.norm, squared) * _inverse(b.norm, squared))


def ones_of(padded_offsets):
    """(L,) float32."""
    return padded_offsets.new_ones(padded_offsets.shape, dtype=torch.float32)


def weight_gradient(a, b, padded_offsets, dtype):
    """(L, columns of a, columns of b): a.T @ b over each expert's tokens."""
    scales = {} if a.scales is None else {"sfa": a.scales, "sfb": b.scales, "sf_vec_size": 32}
    computed = torch.float32 if dtype == torch.float64 else dtype
    return _OPS.wgrad(a.data.t(), b.data, padded_offsets, d_dtype=computed, **scales).to(dtype)
