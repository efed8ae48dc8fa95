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
    return _call("quantize", tensors, **chosen._asdict(), axis=axis)


def dequantize(data, scales, format="mxfp8", *, axis="row", norm_const=None, padded_offsets=None, dtype=torch.float32):
    """The values that ``data`` and ``scales`` stand for: data * scale / norm_const. The inverse of ``quantize``.

    data, scales, format, axis, norm_const, padded_offsets: as ``quantize`` returned or took them. FP4 data may be uint8.
    dtype: of the result: float32 (default), bfloat16 or float16.
    Returns a tensor of the shape that was quantised. ValueError for a bad argument.
    """
    chosen = block_format(format)
    tensors = {"data": data, "scales": scales, "norm_const": norm_const, "padded_offsets": padded_offsets}
    for name, expected in (("data", chosen.dtype), ("scales", chosen.sf_dtype)):
        got = getattr(tensors[name], "dtype", None)
        packed = got == torch.uint8 and expected == torch.float4_e2m1fn_x2
        if got is not None and got != expected and not packed:
            raise ValueError(f"{name}: expected dtype {expected} of format {format}, got {got}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: expected a torch.dtype, got {dtype!r}")
    return _call("dequantize", tensors, sf_vec_size=chosen.sf_vec_size, axis=axis, dtype=dtype)


def block_format(format):
    if not isinstance(format, str) or format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    return FORMATS[format]


def _call(operator, tensors, **options):
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("x", "data", "scales")):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if not isinstance(options["axis"], str):
        raise ValueError(f"axis: expected 'row' or 'col', got {options['axis']!r}")
    if mixture := meta_mixture(tensors):
        raise_verdict(("value", *mixture))
    with translated_errors():
        return getattr(torch.ops.cudnn_grouped, operator).default(**tensors, **options)
