"""Block quantisation by format name, over the operators ``quantize`` and ``dequantize``."""

from typing import NamedTuple

import torch

from .errors import meta_mixture, raise_verdict, translated_errors


class BlockFormat(NamedTuple):
    """A block-scaled format: dtype of the data, dtype of the scales, elements per scale."""

    dtype: torch.dtype
    sf_dtype: torch.dtype
    sf_vec_size: int


FORMATS = {
    "mxfp8": BlockFormat(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
    "mxfp8_e5m2": BlockFormat(torch.float8_e5m2, torch.float8_e8m0fnu, 32),
    "mxfp4": BlockFormat(torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32),
    "nvfp4": BlockFormat(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
}


def quantize(x, format="mxfp8", *, axis="row", norm_const=None, padded_offsets=None):
    """Quantise ``x`` in blocks; returns ``(data, scales)``.

    x: (R, C), (R, C, 1) or (R, C, L), float32, bfloat16 or float16, C contiguous.
    format: "mxfp8" (e4m3) and "mxfp8_e5m2" (a power-of-two scale per 32 values), "mxfp4" (the same for FP4),
        "nvfp4" (FP4 with an e4m3 scale per 16 values).
    axis: "row" for blocks along C, "col" for blocks along R.
    norm_const: (1,) float32 factor on the values, 1 when None.
    padded_offsets: (L,) int32 expert ends, axis "col" only: every expert gets its own complete scale tensor.

    data: the shape of ``x`` in the format's dtype. FP4 packs two values a byte, even one low: (R, C/2[, L]); with axis
    "col" it is packed along R and comes transposed, (C, R/2[, L]).
    scales: the 6-D view (32, 4, ceil(rows/128), 4, ceil(blocks/4), L), rows = R for "row" and C for "col".

    Power-of-two scale: the smallest 2^e >= amax/limit * norm_const (limit 448, 57344 or 6); data = x * norm_const/scale.
    e4m3 scale: amax/6 * norm_const to nearest, saturating. Source: the OCP MX specification and the API documents'
    SFD equations. ValueError for an unknown format or axis and for another shape, dtype or layout of ``x``.
    """
    chosen = block_format(format)
    tensors = {"x": x, "norm_const": norm_const, "padded_offsets": padded_offsets}
    return _call("quantize", tensors, {**chosen._asdict(), "axis": axis})


def dequantize(data, scales, format="mxfp8", *, axis="row", norm_const=None, padded_offsets=None, dtype=torch.float32):
    """The values that ``data`` and ``scales`` stand for: data * scale / norm_const. The inverse of ``quantize``.

    data, scales, format, axis, norm_const, padded_offsets: as ``quantize`` returned or took them. FP4 data may be uint8.
    dtype: of the result: float32 (default), bfloat16 or float16.
    Returns a tensor of the shape that was quantised. ValueError for a bad argument.
    """
    tensors = {"data": data, "scales": scales, "norm_const": norm_const, "padded_offsets": padded_offsets}
    return _dequantize(tensors, format, axis, dtype)


def _dequantize(tensors, format, axis, dtype, names=None):
    """names: the caller's, of arguments that it calls otherwise."""
    name_of = lambda name: (names or {}).get(name, name)  # noqa: E731
    chosen = block_format(format)
    for name, expected in (("data", chosen.dtype), ("scales", chosen.sf_dtype)):
        got = getattr(tensors[name], "dtype", None)
        packed = got == torch.uint8 and expected == torch.float4_e2m1fn_x2
        if got is not None and got != expected and not packed:
            raise ValueError(f"{name_of(name)}: expected dtype {expected} of format {format}, got {got}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected a torch.dtype, got {dtype!r}")
    options = {"sf_vec_size": chosen.sf_vec_size, "axis": axis, "dtype": dtype}
    return _call("dequantize", tensors, options, name_of)


def dequantize_weights(b, sfb, format="mxfp8"):
    """Block-scaled weights as bfloat16, to be kept and passed as ``b`` without ``sfb`` beside a block-scaled ``a``.

    The Hopper engine dequantises A and B to bfloat16 in every call; with these it does so for A alone. They take 2 bytes a
    value, and the numbers are those of the quantised weights, on any engine (docs/layouts.md).

    b: (N, K, L) weights of all experts, K-major or for FP8 N-major, or a list of one (N, K) or (N, K, 1) tensor for each.
    sfb: their scales as the operators take them: one tensor, or a list of one for each.
    format: "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", as ``quantize``; FP4 weights may be uint8.

    Returns a K-major tensor, or a list of them. Values are data * scale, exact where bfloat16 has them: below 2^-126 they are
    rounded to multiples of 2^-133, from 2^128 on they are infinite. ValueError for a bad argument.
    """
    if not isinstance(b, (list, tuple)):
        if isinstance(sfb, (list, tuple)):
            raise ValueError("sfb: expected a tensor, like b, got a list")
        return _dequantize_weight(b, sfb, format, "b", "sfb")
    if not b:
        raise ValueError("b: expected a tensor or a list of at least one, got an empty list")
    if not isinstance(sfb, (list, tuple)):
        raise ValueError(f"sfb: expected a list, like b, got {type(sfb).__name__}")
    if len(sfb) != len(b):
        raise ValueError(f"sfb: expected one tensor for each of b, {len(b)}, got {len(sfb)}")
    return [_dequantize_weight(*pair, format, f"b[{i}]", f"sfb[{i}]") for i, pair in enumerate(zip(b, sfb))]


def _dequantize_weight(b, sfb, format, b_name, sfb_name):
    tensors = {"data": b, "scales": sfb}
    names = {"data": b_name, "scales": sfb_name}
    # Stored (K, N): to dequantize, blocks along columns of the transposed matrix. FP4 weights are K-major alone.
    stored = isinstance(b, torch.Tensor) and b.dim() in (2, 3) and b.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    n_major = stored and b.stride(1) != 1 and b.stride(0) == 1
    if n_major:
        tensors["data"] = b.transpose(0, 1)
    values = _dequantize(tensors, format, "col" if n_major else "row", torch.bfloat16, names)
    if not n_major:
        return values
    values = values.transpose(0, 1)
    return values.contiguous() if values.dim() == 2 else values.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def block_format(format):
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def _call(operator, tensors, options, name_of=lambda name: name):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("x", "data", "scales")):
            raise ValueError(f"{name_of(name)}: expected a torch.Tensor, got {type(tensor).__name__}")
    if not isinstance(options["axis"], str):
        raise ValueError(f"axis: expected 'row' or 'col', got {options['axis']!r}")
    if mixture := meta_mixture(tensors):
        raise_verdict(("value", *mixture), name_of)
    with translated_errors(name_of):
        return getattr(torch.ops.cudnn_grouped, operator).default(**tensors, **options)
