"""The demo's eager composition: the same mathematics as separate torch operations, and the activations' formulas.

Used by ``demo.py`` only; the operators do not come here.
"""

from typing import NamedTuple

import torch

from .scales import pack_scales, unpack_scales

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GEGLU_ALPHA, CLAMP, OFFSET = 1.702, 7.0, 1.0
BETA1, BETA2 = 4.0, 25.0


class Format(NamedTuple):
    """Operand and output formats of a row of the table. ``block`` names the format in ``quantize``, None for BF16."""

    name: str
    block: str | None
    sf_vec_size: int
    tensor_scale: bool
    d_dtype: torch.dtype


FORMATS = (
    Format("BF16", None, 16, False, torch.bfloat16),
    Format("MXFP8", "mxfp8", 32, False, torch.float8_e4m3fn),
    Format("NVFP4", "nvfp4", 16, True, torch.bfloat16),
)


class Activation(NamedTuple):
    """Forward value; (slopes, value) of it; and upper limits of what is added up to get them."""

    name: str
    gated: bool
    forward: object
    derivative: object
    magnitudes: object


def _srelu(c):
    return c.relu().square()


def _srelu_derivative(c):
    r = c.relu()
    return [2 * r], r * r


def _swiglu(gate, up):
    return gate * gate.sigmoid() * up


def _swiglu_derivative(gate, up):
    s = gate.sigmoid()
    return [up * s * (1 + gate * (1 - s)), gate * s], gate * s * up


def _swiglu_magnitudes(gate, up):
    s = gate.sigmoid()
    return [up.abs() * s * (1 + gate.abs()), gate.abs() * s], (gate * s * up).abs()


def _clamped(gate, up):
    # torch.where, not clamp: the gradient at a bound is 1, as the document says, in every torch version.
    gate = torch.where(gate <= CLAMP, gate, CLAMP)
    return gate, torch.where(up <= CLAMP, torch.where(up >= -CLAMP, up, -CLAMP), CLAMP)


def _geglu(gate, up):
    gate, up = _clamped(gate, up)
    return gate * (GEGLU_ALPHA * gate).sigmoid() * (up + OFFSET)


def _geglu_derivative(gate, up):
    gate_mask, up_mask = gate <= CLAMP, up.abs() <= CLAMP
    gate, up = _clamped(gate, up)
    s = (GEGLU_ALPHA * gate).sigmoid()
    dgate = (up + OFFSET) * s * (1 + GEGLU_ALPHA * gate * (1 - s)) * gate_mask
    return [dgate, gate * s * up_mask], gate * s * (up + OFFSET)


def _geglu_magnitudes(gate, up):
    gate, up = (x.abs() for x in _clamped(gate, up))
    return [(up + OFFSET) * (1 + GEGLU_ALPHA * gate), gate], gate * (up + OFFSET)


def _situglu(gate, up):
    return BETA1 * (gate / BETA1).tanh() * gate.sigmoid() * BETA2 * (up / BETA2).tanh()


def _situglu_derivative(gate, up):
    tg, tu, s = (gate / BETA1).tanh(), (up / BETA2).tanh(), gate.sigmoid()
    gate_value, up_value = BETA1 * tg * s, BETA2 * tu
    dgate = up_value * ((1 - tg * tg) * s + gate_value * (1 - s))
    return [dgate, gate_value * (1 - tu * tu)], gate_value * up_value


def _situglu_magnitudes(gate, up):
    gate_value, up_value = BETA1 * (gate / BETA1).tanh().abs(), BETA2 * (up / BETA2).tanh().abs()
    return [up_value * (2 + gate_value), 2 * gate_value], gate_value * up_value


ACTIVATIONS = (
    Activation("dsrelu", False, _srelu, _srelu_derivative, _srelu_derivative),
    Activation("dswiglu", True, _swiglu, _swiglu_derivative, _swiglu_magnitudes),
    Activation("dgeglu", True, _geglu, _geglu_derivative, _geglu_magnitudes),
    Activation("dsituglu", True, _situglu, _situglu_derivative, _situglu_magnitudes),
)


def ranges(padded_offsets):
    """(expert, first row, end row) of each expert."""
    ends = padded_offsets.tolist()
    return list(zip(range(len(ends)), [0, *ends[:-1]], ends, strict=True))


def deinterleave(x):
    """Gate and up: the even and the odd 32-column blocks."""
    blocks = x.view(x.shape[0], -1, 2, 32)
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def interleave(gate, up):
    """The inverse of ``deinterleave``."""
    rows = gate.shape[0]
    return torch.stack([gate.view(rows, -1, 32), up.view(rows, -1, 32)], dim=2).view(rows, -1)


def _dequantize(data, scales, sf_vec_size):
    """(rows, columns) float32 from FP8 or packed FP4 data and its scale matrix."""
    if data.dtype == torch.float4_e2m1fn_x2:
        codes = data.view(torch.uint8)
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        values = E2M1[codes.int()]
    else:
        values = data.float()
    return values * scales.float().repeat_interleave(sf_vec_size, dim=1)


def _quantize(x):
    """e4m3 data and round-up power-of-two scales of blocks of 32 along the last axis."""
    rows, columns = x.shape
    blocks = x.view(rows, columns // 32, 32)
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=2) / 448)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(mantissa == 0, -127, exponent)
    data = torch.ldexp(blocks, -exponent[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return data.view(rows, columns), (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def backward(arguments, activation, format):
    """Dequantise, one matmul per expert, epilogue, quantise: what the fused operator replaces. D, D_col, dprob, scales."""
    a, b = arguments["a_tensor"][..., 0], arguments["b_tensor"]
    c, prob = arguments["c_tensor"][..., 0].float(), arguments["prob_tensor"].view(-1, 1)
    alpha = arguments["alpha_tensor"]
    if format.block is None:
        a, experts = a.float(), [b[..., g].float() for g in range(b.shape[2])]
    else:
        sfa, sfb = (_scale_matrices(arguments, name, format.sf_vec_size) for name in ("a", "b"))
        a = _dequantize(a, sfa, format.sf_vec_size)
        experts = [_dequantize(b[..., g], sfb[..., g], format.sf_vec_size) for g in range(b.shape[2])]
    r = torch.cat([a[s:e] @ experts[g].T * alpha[g] for g, s, e in ranges(arguments["padded_offsets"])])
    if activation.gated:
        r = torch.cat([r[s:e] * alpha[g] for g, s, e in ranges(arguments["padded_offsets"])])
        slopes, value = activation.derivative(*deinterleave(c))
        d = interleave(*(r * prob * slope for slope in slopes))
    else:
        slopes, value = activation.derivative(c)
        d = r * prob * slopes[0]
    dprob = (r * value).sum(dim=1)
    if format.d_dtype != torch.float8_e4m3fn:
        return d.to(format.d_dtype), dprob
    d_row, sf_row = _quantize(d)
    d_col, sf_col = _quantize(d.T.contiguous())
    return d_row, pack_scales(sf_row), d_col.T.contiguous(), pack_scales(sf_col), dprob


def _scale_matrices(arguments, name, sf_vec_size):
    data, packed = arguments[f"{name}_tensor"], arguments[f"sf{name}_tensor"]
    k = data.shape[1] * (2 if data.dtype == torch.float4_e2m1fn_x2 else 1)
    shape = (data.shape[0], k // sf_vec_size)
    return unpack_scales(packed, shape if name == "a" else (*shape, data.shape[2]))
