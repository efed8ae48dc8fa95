"""Fakes of the forward operators, the weight gradient and dact; see ``ops``."""

import torch

from .ops import _FP8, _SIXTEEN_BIT, _ceil_div, _rows, _scales, register_fake


def forward_outputs(a, b, padded_offsets, sfa, n, c_dtype, d_dtype, generate_c, width):
    """New c, d, d_col, amax, sfd_row, sfd_col, uninitialised; absent ones have shape (0,)."""
    c_dtype = torch.bfloat16 if c_dtype is None else c_dtype
    d_dtype = torch.bfloat16 if d_dtype is None else d_dtype
    rows, experts = a.shape[0], padded_offsets.shape[0]
    n = b[0].shape[0] if b else n
    columns = n // width
    quantised = d_dtype in _FP8
    sf_dtype = torch.float8_e8m0fnu if sfa is None else sfa.dtype
    none = lambda dtype: a.new_empty((0,), dtype=dtype)  # noqa: E731
    c = _rows(a, rows, n, c_dtype) if generate_c else none(c_dtype)
    d = _rows(a, rows, columns, d_dtype)
    d_col = _rows(a, rows, columns, d_dtype) if quantised else none(d_dtype)
    has_amax = sfa is not None and d_dtype in _SIXTEEN_BIT
    amax = a.new_empty((experts, 1), dtype=torch.float32) if has_amax else none(torch.float32)
    if not quantised:
        return c, d, d_col, amax, none(sf_dtype), none(sf_dtype)
    sfd_row = _scales(a, sf_dtype, rows, _ceil_div(columns, 32))
    sfd_col = _scales(a, sf_dtype, columns, _ceil_div(rows, 32))
    return c, d, d_col, amax, sfd_row, sfd_col


def _fake_of(width, generate_c):
    def fake(
        a, b, padded_offsets, alpha=None, prob=None, bias=None, sfa=None, *tensors,
        n=None, c_dtype=None, d_dtype=None, generate_c=generate_c, **options,
    ):  # fmt: skip
        return forward_outputs(a, b, padded_offsets, sfa, n, c_dtype, d_dtype, generate_c, width)

    return fake


register_fake("srelu")(_fake_of(1, True))
register_fake("glu")(_fake_of(2, True))
register_fake("mm")(_fake_of(1, False))


@register_fake("dact")
def _(r, c, padded_offsets, prob=None, *, d_dtype=None, generate_dbias=False, generate_d=True, **options):
    d_dtype = torch.bfloat16 if d_dtype is None else d_dtype
    rows, columns, experts = r.shape[0], c.shape[1], padded_offsets.shape[0]
    dprob_shape = (rows,) if prob is not None and prob.dim() == 1 else (rows, 1, 1)
    d = _rows(c, rows, columns, d_dtype) if generate_d else c.new_empty((0,), dtype=d_dtype)
    dbias = c.new_empty((experts, columns, 1) if generate_dbias else (0,), dtype=torch.bfloat16)
    return d, c.new_empty(dprob_shape, dtype=torch.float32), dbias


@register_fake("wgrad")
def _(a, b, padded_offsets, *, sfa=None, sfb=None, d_dtype=None, **options):
    return a.new_empty(
        (padded_offsets.shape[0], a.shape[0], b.shape[1]), dtype=torch.bfloat16 if d_dtype is None else d_dtype
    )
