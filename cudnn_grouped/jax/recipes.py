"""How a recipe gives operands to the grouped GEMMs, on JAX arrays: the twin of ``nn/recipes.py``, which says why.

A weight (L, N, K) is an operand twice: for the forward GEMM in blocks along K, for the input gradient in blocks along N.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..nn.recipes import factor_bits, inverse_bits
from .operators import operator, quantize


def plain(x):
    """x as the operators take it: they have no float64."""
    return x.astype(jnp.float32) if x.dtype == jnp.float64 else x


class Operand(NamedTuple):
    """A GEMM operand: data, scale factors or None, the factor its values were multiplied by or None, a weight's layout."""

    data: jax.Array
    scales: jax.Array | None = None
    norm: jax.Array | None = None
    b_major: str = "k"


class TokenOperand(NamedTuple):
    """An operand of the weight gradient, (M, columns): its blocks run along the tokens of each expert."""

    data: jax.Array
    scales: jax.Array | None = None


class BF16:
    """BF16 throughout."""

    hidden_dtype = jnp.bfloat16
    options = {}  # noqa: RUF012

    @staticmethod
    def rows(x, padded_offsets):
        return Operand(x.astype(jnp.bfloat16))

    @staticmethod
    def weight(w):
        return Operand(w.astype(jnp.bfloat16))

    @staticmethod
    def weight_transposed(w):
        return Operand(w.astype(jnp.bfloat16), b_major="n")

    @staticmethod
    def tokens(x, padded_offsets):
        return TokenOperand(x.astype(jnp.bfloat16))

    @classmethod
    def from_gemm(cls, outputs, padded_offsets):
        """The two operands that a fused GEMM's D makes: of the next GEMM, and of the weight gradient."""
        d = outputs["d_row"] if "d_row" in outputs else outputs["d"]
        return cls.rows(d, padded_offsets), cls.tokens(d, padded_offsets)


class MXFP8(BF16):
    """e4m3 data with a power-of-two scale per 32 values. D comes quantised by rows and by columns: nothing to do."""

    hidden_dtype = jnp.float8_e4m3fn
    options = {"sf_vec_size": 32, "discrete_col_sfd": True}  # noqa: RUF012

    @staticmethod
    def rows(x, padded_offsets):
        return Operand(*quantize(x, "mxfp8"))

    @staticmethod
    def weight(w):
        return Operand(*quantize(plain(w), "mxfp8"))

    @staticmethod
    def weight_transposed(w):
        return Operand(*quantize(plain(w), "mxfp8", axis="col"), b_major="n")

    @staticmethod
    def tokens(x, padded_offsets):
        return TokenOperand(*quantize(x, "mxfp8", axis="col", padded_offsets=padded_offsets))

    @classmethod
    def from_gemm(cls, outputs, padded_offsets):
        d = outputs["d_row"] if "d_row" in outputs else outputs["d"]
        return Operand(d, outputs["sfd_row"]), TokenOperand(outputs["d_col"], outputs["sfd_col"])


class NVFP4(BF16):
    """e2m1 data with an e4m3 scale per 16 values and one factor per tensor; weight gradients in BF16."""

    options = {"sf_vec_size": 16}  # noqa: RUF012

    @staticmethod
    def _norm(amax):
        factor = _as_float(factor_bits(_bits(amax.astype(jnp.float32))))
        return jnp.where(amax > 0, factor, jnp.float32(1.0)).reshape(1)

    @staticmethod
    def _magnitude(x):
        return jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros_like(x))

    @classmethod
    def rows(cls, x, padded_offsets):
        owned = jnp.arange(x.shape[0]) < padded_offsets[-1]
        amax = jnp.where(owned[:, None], cls._magnitude(x), jnp.zeros_like(x)).max(initial=0)
        norm = cls._norm(amax)
        return Operand(*quantize(x, "nvfp4", norm_const=norm), norm)

    @classmethod
    def weight(cls, w):
        norm = cls._norm(cls._magnitude(w).max())
        return Operand(*quantize(plain(w), "nvfp4", norm_const=norm), norm)

    @classmethod
    def weight_transposed(cls, w):
        norm = cls._norm(cls._magnitude(w).max())
        return Operand(*quantize(plain(w), "nvfp4", axis="col", norm_const=norm), norm)


RECIPES = {"bf16": BF16, "mxfp8": MXFP8, "nvfp4": NVFP4}


def gemm(operation, recipe, a, b, padded_offsets, squared=False, **arguments):
    """Run ``operation`` on an operand pair of the recipe, with the alpha that undoes the operands' factors."""
    pair = {"a": a.data, "b": b.data, "b_major": b.b_major, "padded_offsets": padded_offsets}
    if a.scales is not None:
        pair |= {"sfa": a.scales, "sfb": b.scales, "sf_vec_size": recipe.options["sf_vec_size"]}
    return operator(operation, **pair, alpha=_alpha_of(a, b, padded_offsets, squared), **arguments)


def _alpha_of(a, b, padded_offsets, squared):
    alpha = jnp.ones(padded_offsets.shape, jnp.float32)
    if a.norm is None:
        return alpha
    return alpha * (_inverse(a.norm, squared) * _inverse(b.norm, squared))


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _as_float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def _inverse(norm, root):
    return _as_float(inverse_bits(_bits(norm), root))


def weight_gradient(a, b, padded_offsets, dtype):
    """(L, columns of a, columns of b): a.T @ b over each expert's tokens."""
    scales = {} if a.scales is None else {"sfa": a.scales, "sfb": b.scales, "sf_vec_size": 32}
    computed = jnp.float32 if dtype == jnp.float64 else dtype
    out = operator("wgrad", a=a.data, b=b.data, padded_offsets=padded_offsets, d_dtype=computed, **scales)["out"]
    return out.astype(dtype)
