"""Comparison of the product's outputs with the oracle's intervals.

FP32 arithmetic gives a value d within [low, high]; rounding to an output format and the block quantiser are monotone,
so the output must lie between the images of the two ends. That is half an ulp of the format beyond the derived error
and nothing more; where the oracle's error is zero it is equality. Values are compared, so -0 equals 0.
"""

import numpy as np
import oracle_formats as formats
from oracle_formats import FORMATS


def f32(x) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=np.float64).astype(np.float32)


def round_to(name: str, x) -> np.ndarray:
    x = f32(x)
    return x.astype(np.float64) if name == "f32" else FORMATS[name].round(x)


def within(what: str, got, low, high) -> None:
    got, low, high = np.broadcast_arrays(np.asarray(got, np.float64), low, high)
    wrong = ~((got >= low) & (got <= high))  # NaN is wrong
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} outside, first at {where}: "
            f"got {got[where]!r}, expected [{low[where]!r}, {high[where]!r}]"
        )


def check_rounded(what: str, got, approx, name: str) -> None:
    within(what, got, round_to(name, approx.low), round_to(name, approx.high))


def check_quantized(what, codes, scales, approx, data_format, norm, block=32) -> None:
    """Codes and scale bytes (rows, ceil(columns / block)) of the approximate matrix, blocks along the last axis."""
    low, high = f32(approx.low).astype(np.float64), f32(approx.high).astype(np.float64)
    reach = np.maximum(np.abs(low), np.abs(high))
    least = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    first = formats.scale_codes(formats.block_amax(least, block), data_format, "e8m0", norm)
    last = formats.scale_codes(formats.block_amax(reach, block), data_format, "e8m0", norm)
    within(f"{what} scales", scales, first, last)
    # The scale may fall on either side of a power of two; the data then follows the scale that was written.
    factor = np.repeat(formats.data_factor(scales, "e8m0", norm), block, axis=-1)[..., : low.shape[-1]]
    ends = [data_format.decode(formats.data_codes(end, factor, data_format)) for end in (low, high)]
    within(what, data_format.decode(codes), *ends)
