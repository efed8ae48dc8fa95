"""Number formats, scale layout and block quantiser, written from their bit definitions.

Integer and float64 arithmetic (float32 where the definition says so); nothing of the product, no dtype cast of torch.
"""

import functools
from dataclasses import dataclass

import numpy as np

F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Format:
    """Sign, exponent, mantissa. `specials`: "ieee" (Inf and NaN), "nan" (only the all-ones code), "none"."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_code(self) -> int:
        """Code of the largest finite number."""
        top = (1 << (self.bits - 1)) - 1
        if self.specials == "ieee":
            return top - (1 << self.mantissa_bits)
        return top - 1 if self.specials == "nan" else top

    @property
    def max(self) -> float:
        return float(self.decode(np.array(self.max_code)))

    def decode(self, codes) -> np.ndarray:
        return self.table()[np.asarray(codes)]

    @functools.cache  # noqa: B019  (a handful of formats)
    def table(self) -> np.ndarray:
        """The value of every code."""
        codes = np.arange(1 << self.bits)
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        exponent = magnitude >> self.mantissa_bits
        mantissa = magnitude & ((1 << self.mantissa_bits) - 1)
        significand = np.where(exponent == 0, mantissa, mantissa + (1 << self.mantissa_bits))
        value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - self.bias - self.mantissa_bits)
        if self.specials == "ieee":
            special = exponent == (1 << self.exponent_bits) - 1
            value = np.where(special, np.where(mantissa == 0, np.inf, np.nan), value)
        elif self.specials == "nan":
            value = np.where(magnitude == (1 << (self.bits - 1)) - 1, np.nan, value)
        return np.where(codes >> (self.bits - 1) == 1, -value, value)

    def encode(self, x, saturate: bool = True) -> np.ndarray:
        """Round to nearest, ties to even. Overflow: largest finite number if `saturate`, else Inf (or NaN)."""
        with np.errstate(invalid="ignore"):  # a signalling NaN is converted too
            x = np.asarray(x, dtype=np.float64)
        size = np.abs(x)
        finite = np.where(np.isfinite(size), size, 0.0)
        exponent = np.where(finite == 0, 1 - self.bias, np.maximum(np.frexp(finite)[1] - 1, 1 - self.bias))
        # Dividing by a power of two is exact in float64, and rint breaks ties to even; the parity of the
        # significand is the parity of the code. A carry out of the significand moves the exponent by itself.
        significand = np.rint(np.ldexp(finite, self.mantissa_bits - exponent)).astype(np.int64)
        code = ((exponent + self.bias - 1) << self.mantissa_bits) + significand
        overflow = (code > self.max_code) | np.isinf(size)
        code = np.where(overflow, self.max_code if saturate else self.max_code + 1, code)
        code = np.where(np.signbit(x), code | (1 << (self.bits - 1)), code)
        not_a_number = (1 << (self.bits - 1)) - 1
        return np.where(np.isnan(x), not_a_number, code).astype(np.uint8 if self.bits <= 8 else np.uint16)

    def round(self, x, saturate: bool = False) -> np.ndarray:
        return self.decode(self.encode(x, saturate))


E4M3 = Format("e4m3", 4, 3, 7, "nan")
E5M2 = Format("e5m2", 5, 2, 15, "ieee")
E2M1 = Format("e2m1", 2, 1, 1, "none")
BF16 = Format("bf16", 8, 7, 127, "ieee")
FP16 = Format("fp16", 5, 10, 15, "ieee")
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1, BF16, FP16)}


def decode_e8m0(codes) -> np.ndarray:
    codes = np.asarray(codes).astype(np.int64)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))


def encode_e8m0_up(v) -> np.ndarray:
    """Smallest power of two >= v. Zero and all below 2^-127: 0x00; above 2^127: 0xFE; NaN: 0xFF."""
    with np.errstate(invalid="ignore"):
        v = np.asarray(v, dtype=np.float64)
    fraction, exponent = np.frexp(np.where(np.isfinite(v) & (v > 0), v, 1.0))  # v = fraction * 2^exponent
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    code = np.clip(exponent + 127, 0, 254)
    code = np.where(v <= 0, 0, code)
    code = np.where(v == np.inf, 254, code)
    return np.where(np.isnan(v), 255, code).astype(np.uint8)


def decode_scale(codes, scale_format: str) -> np.ndarray:
    return decode_e8m0(codes) if scale_format == "e8m0" else E4M3.decode(codes)


def pack_fp4(codes) -> np.ndarray:
    """Two codes a byte along the last axis, even index in the low nibble."""
    codes = np.asarray(codes, dtype=np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(data) -> np.ndarray:
    data = np.asarray(data, dtype=np.uint8)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


# Scale layout -------------------------------------------------------------------------------------------------


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def scale_bytes(rows: int, blocks: int) -> int:
    return ceil_div(rows, 128) * ceil_div(blocks, 4) * 512


def scale_offsets(rows: int, blocks: int) -> np.ndarray:
    """Byte offset of the scale of (row, block), by the byte formula."""
    r = np.arange(rows)[:, None]
    b = np.arange(blocks)[None, :]
    return (r // 128 * ceil_div(blocks, 4) + b // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + b % 4


def scale_view_index(rows: int, blocks: int) -> tuple:
    """Index of (row, block) in the documented view (32, 4, RP, 4, KP, L), last index left out."""
    r = np.arange(rows)[:, None]
    b = np.arange(blocks)[None, :]
    return tuple(np.broadcast_arrays(r % 32, r // 32 % 4, r // 128, b % 4, b // 4))


def pack_scales(scales) -> np.ndarray:
    """(rows, blocks) bytes -> flat buffer, padding 0."""
    scales = np.asarray(scales, dtype=np.uint8)
    out = np.zeros(scale_bytes(*scales.shape), dtype=np.uint8)
    out[scale_offsets(*scales.shape).ravel()] = scales.ravel()
    return out


def column_scale_offsets(rows: int, cols: int, offsets, discrete: bool) -> np.ndarray:
    """Byte offset of the scale of (column n, 32-row block) in a column-scale buffer over all `rows`.

    `discrete`: every expert has its own complete tensor, starting at (start / 128) * ceil(cols / 128) * 512.
    Blocks of rows at or past the last offset are -1 then; they belong to nobody.
    """
    if not discrete:
        return scale_offsets(cols, rows // 32)
    out = np.full((cols, rows // 32), -1, dtype=np.int64)
    start = 0
    for end in offsets:
        base = start // 128 * ceil_div(cols, 128) * 512
        if end > start:
            out[:, start // 32 : end // 32] = base + scale_offsets(cols, (end - start) // 32)
        start = max(start, end)
    return out


# Block quantiser ----------------------------------------------------------------------------------------------


def block_amax(x: np.ndarray, block: int) -> np.ndarray:
    """Largest magnitude of each block of the last axis; a last block may be short. NaN propagates."""
    starts = np.arange(0, x.shape[-1], block)
    return np.maximum.reduceat(np.abs(x), starts, axis=-1)


def scale_codes(amax, data_format: Format, scale_format: str, norm) -> np.ndarray:
    """Scale byte of a block from its amax: v = (amax * FP32(1/limit)) * norm, two FP32 multiplies."""
    with np.errstate(all="ignore"):
        v = np.asarray(amax, np.float32) * np.float32(1.0 / data_format.max) * np.float32(norm)
    return encode_e8m0_up(v) if scale_format == "e8m0" else E4M3.encode(v)


def data_factor(codes, scale_format: str, norm) -> np.ndarray:
    """norm / scale as FP32: by exponent arithmetic for e8m0 (over FLT_MAX: FLT_MAX), one FP32 division for e4m3."""
    norm = np.float32(norm)
    with np.errstate(all="ignore"):
        if scale_format == "e8m0":
            exponent = 127 - np.asarray(codes).astype(np.int64)
            factor = np.ldexp(np.float64(norm), exponent)
            factor = np.clip(factor, -F32_MAX, F32_MAX).astype(np.float32)
            return np.where(np.asarray(codes) == 255, np.float32(np.nan), factor)
        scale = E4M3.decode(codes).astype(np.float32)
        return np.where(scale == 0, np.float32(0), norm / scale)


def data_codes(x, factor, data_format: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        return data_format.encode(np.asarray(x, np.float32) * factor)


def quantize(x, data_format: Format, scale_format: str, block: int, norm=1.0) -> tuple[np.ndarray, np.ndarray]:
    """Codes (one an element, FP4 unpacked) and scale bytes of a float32 matrix, blocks along its last axis."""
    x = np.asarray(x, dtype=np.float32)
    scales = scale_codes(block_amax(x, block), data_format, scale_format, norm)
    factor = np.repeat(data_factor(scales, scale_format, norm), block, axis=-1)[..., : x.shape[-1]]
    return data_codes(x, factor, data_format), scales


def dequantize(codes, scales, data_format: Format, scale_format: str, block: int, norm=1.0) -> np.ndarray:
    scale = np.repeat(decode_scale(scales, scale_format), block, axis=-1)[..., : np.shape(codes)[-1]]
    return data_format.decode(codes) * scale / np.float64(np.float32(norm))
