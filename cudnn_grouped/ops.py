"""Fakes of ``torch.ops.cudnn_grouped``: output shapes, dtypes and strides without data, with any symbolic size."""

import torch

from .errors import meta_mixture
from .scales import _ceil_div, scale_view

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def _scales(like, dtype, rows, blocks, experts=1):
    physical = like.new_empty((experts, _ceil_div(rows, 128), _ceil_div(blocks, 4), 32, 4, 4), dtype=dtype)
    return scale_view(physical)


def _rows(like, rows, columns, dtype):
    """A new (rows, columns), or (rows, columns, 1) where `like` has three dimensions."""
    return like.new_empty((rows, columns) if like.dim() == 2 else (rows, columns, 1), dtype=dtype)


def _backward(c, padded_offsets, prob, sfa, d_dtype, generate_dbias, amax_shape):
    d_dtype = torch.bfloat16 if d_dtype is None else d_dtype
    rows, width, experts = c.shape[0], c.shape[1], padded_offsets.shape[0]
    quantised = d_dtype in _FP8
    sf_dtype = torch.float8_e8m0fnu if sfa is None else sfa.dtype
    has_amax = sfa is not None and d_dtype in _SIXTEEN_BIT
    d_row = _rows(c, rows, width, d_dtype)
    d_col = _rows(c, rows, width, d_dtype) if quantised else c.new_empty((0,), dtype=d_dtype)
    dprob = prob.new_empty(prob.shape, dtype=torch.float32)
    dbias = c.new_empty((experts, width, 1) if generate_dbias else (0,), dtype=torch.bfloat16)
    amax = c.new_empty((experts, *amax_shape) if has_amax else (0,), dtype=torch.float32)
    if quantised:
        sfd_row = _scales(c, sf_dtype, rows, _ceil_div(width, 32))
        sfd_col = _scales(c, sf_dtype, width, _ceil_div(rows, 32))
    else:
        sfd_row, sfd_col = (c.new_empty((0,), dtype=sf_dtype) for _ in range(2))
    return d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col


def register_fake(*names):
    """Registers a fake that first refuses real tensors among meta ones: such a call never reaches the validator."""

    def decorate(fake):
        for name in names:
            schema = getattr(torch.ops.cudnn_grouped, name).default._schema
            arguments = [argument.name for argument in schema.arguments]

            def checked(*args, _arguments=arguments, **kwargs):
                if mixture := meta_mixture({**dict(zip(_arguments, args)), **kwargs}):
                    raise RuntimeError(": ".join(mixture))
                return fake(*args, **kwargs)

            torch.library.register_fake(f"cudnn_grouped::{name}", checked)
        return fake

    return decorate


@register_fake("dsrelu")
def _(a, b, c, padded_offsets, alpha, prob, sfa=None, *tensors, d_dtype=None, generate_dbias=False, **options):
    return _backward(c, padded_offsets, prob, sfa, d_dtype, generate_dbias, (1,))


@register_fake("dglu")
def _(a, b, c, padded_offsets, alpha, beta, prob, sfa=None, *tensors, d_dtype=None, generate_dbias=False, **options):
    return _backward(c, padded_offsets, prob, sfa, d_dtype, generate_dbias, (2, 1))


@register_fake("dsrelu_out", "dglu_out", "reduce_dbias", "srelu_out", "glu_out", "mm_out", "wgrad_out")
def _(*tensors, **options):
    return None


@register_fake("quantize")
def _(x, dtype, sf_dtype, sf_vec_size, *, axis="row", norm_const=None, padded_offsets=None):
    rows, columns = x.shape[0], x.shape[1]
    experts = x.shape[2] if x.dim() == 3 else 1
    by_row = axis == "row"
    shape = (rows, columns)
    if dtype == torch.float4_e2m1fn_x2:
        shape = (rows, columns // 2) if by_row else (columns, rows // 2)
    if x.dim() == 2:
        data = x.new_empty(shape, dtype=dtype)
    else:
        data = x.new_empty_strided((*shape, experts), (shape[1], 1, shape[0] * shape[1]), dtype=dtype)
    scale_rows, length = (rows, columns) if by_row else (columns, rows)
    return data, _scales(x, sf_dtype, scale_rows, _ceil_div(length, sf_vec_size), experts)


@register_fake("dequantize")
def _(data, scales, sf_vec_size, *, axis="row", norm_const=None, padded_offsets=None, dtype=None):
    rows, columns = data.shape[0], data.shape[1]
    if data.dtype in (torch.float4_e2m1fn_x2, torch.uint8):
        rows, columns = (rows, columns * 2) if axis == "row" else (columns * 2, rows)
    dtype = torch.float32 if dtype is None else dtype
    if data.dim() == 2:
        return data.new_empty((rows, columns), dtype=dtype)
    experts = data.shape[2]
    return data.new_empty_strided((rows, columns, experts), (columns, 1, rows * columns), dtype=dtype)
