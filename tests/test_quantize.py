"""The block quantiser, byte for byte against its definition."""

from dataclasses import replace

import cases
import numpy as np
import oracle
import oracle_formats as formats
import pytest
import torch
from cases import DTYPES, operator, tensor_of
from oracle_formats import FORMATS, ceil_div

KINDS = {  # data format, scale format, block
    "mxfp8": ("e4m3", "e8m0", 32),
    "mxfp8_e5m2": ("e5m2", "e8m0", 32),
    "mxfp4": ("e2m1", "e8m0", 32),
    "mxfp4_16": ("e2m1", "e8m0", 16),
    "nvfp4": ("e2m1", "e4m3", 16),
}
NORMS = [None, 0.01, 1.0, 3.0, 448.0, 1e4, 1e-30]
TINIEST = 2.0**-149


def quantize(x: torch.Tensor, kind: str, **keywords):
    data, scale, block = KINDS[kind]
    dtype = DTYPES["fp4" if data == "e2m1" else data]
    norm = keywords.pop("norm", None)
    if norm is not None:
        keywords["norm_const"] = torch.tensor([norm], dtype=torch.float32)
    return operator("quantize")(x, dtype, DTYPES[scale], block, **keywords)


def dequantize(data: torch.Tensor, scales: torch.Tensor, kind: str, norm=None, **keywords):
    if norm is not None:
        keywords["norm_const"] = torch.tensor([norm], dtype=torch.float32)
    return operator("dequantize")(data, scales, KINDS[kind][2], **keywords)


def data_bytes(codes: np.ndarray, kind: str) -> np.ndarray:
    return formats.pack_fp4(codes) if KINDS[kind][0] == "e2m1" else codes


def check(x: np.ndarray, kind: str, norm=None, axis="row", offsets=None) -> None:
    """Quantise a float32 matrix by the product and by the definition; both outputs must be the same bytes."""
    data_format, scale_format, block = KINDS[kind]
    keywords = {"axis": axis, "norm": norm}
    if offsets is not None:
        keywords["padded_offsets"] = torch.tensor(offsets, dtype=torch.int32)
    data, scales = quantize(torch.from_numpy(np.ascontiguousarray(x)), kind, **keywords)
    blocks_last = x if axis == "row" else x.T
    used = None if offsets is None else offsets[-1]
    if used is not None:
        blocks_last = blocks_last[:, :used]
    want, want_scales = formats.quantize(
        blocks_last, FORMATS[data_format], scale_format, block, 1.0 if norm is None else norm
    )
    flat = cases.scale_matrix(scales)
    if offsets is None:
        expected = formats.pack_scales(want_scales)
    else:
        expected = np.zeros(flat.size, np.uint8)
        places = discrete_places(x.shape, block, offsets)
        expected[places[places >= 0]] = want_scales[places >= 0]
    np.testing.assert_array_equal(flat, expected, err_msg="scale bytes")
    got = data.view(torch.uint8).numpy()
    want = data_bytes(want, kind)
    if axis == "col" and data_format != "e2m1":
        want = want.T
    inside = np.zeros(got.shape, np.uint8)  # rows past the last expert: data zero, as their scales
    inside[: want.shape[0], : want.shape[1]] = want
    np.testing.assert_array_equal(got, inside, err_msg="data bytes")


def discrete_places(shape, block, offsets) -> np.ndarray:
    """As column_scale_offsets, for any block length."""
    rows, columns = shape
    out, start = np.full((columns, ceil_div(offsets[-1], block)), -1, np.int64), 0
    base = 0
    for end in offsets:
        blocks = (end - start) // block
        out[:, start // block : end // block] = base + formats.scale_offsets(columns, blocks)
        base += formats.scale_bytes(columns, blocks) if blocks else 0
        start = end
    return out


def blocks(rows: list, width: int) -> np.ndarray:
    out = np.zeros((len(rows), width), np.float32)
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out


def neighbours(x: np.float32) -> list:
    with np.errstate(over="ignore"):
        return [np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))]


def corner_blocks(limit: float, block: int) -> np.ndarray:
    """One block a row: zeros, the ends of the scale's range, powers of two and their neighbours, NaN, Inf."""
    rng = np.random.default_rng(0)
    rows = [[], [0.0, -0.0], [TINIEST], [-TINIEST, TINIEST]]
    # amax such that v = amax / limit is at, just above and just below a power of two, over the whole range.
    for exponent in (-149, -140, -128, -127, -126, -120, -10, -1, 0, 1, 7, 100, 118, 119, 120, 126, 127):
        edge = np.float32(min(limit * 2.0**exponent, formats.F32_MAX))
        for amax in neighbours(edge):
            rows.append([amax, -amax / 2, amax / 3, -amax * np.float32(0.99), 1e-9 * amax])
    for exponent in range(-149, 128, 9):
        power = np.float32(2.0**exponent)
        for amax in neighbours(power):
            rows.append(np.concatenate([[amax], amax * rng.uniform(-1, 1, block - 1)]))
    # The list of notes on rounding rules: 150 tells round up from ceil(log2), 448 (1 + ulp) from double rounding.
    rows += [[150.0], [448.0], [448.0 * (1 + 2.0**-23)], [447.9], [np.nextafter(np.float32(448), np.float32(0))]]
    rows += [[formats.F32_MAX], [-formats.F32_MAX, 1.0], [np.inf, 1.0, -2.0, 0.0], [-np.inf, np.inf, 3e38, -1e-30]]
    rows += [[np.nan], [1.0, np.nan, -2.0], [0.0, 0.0, np.nan], [np.inf, np.nan], [1.0] * (block - 1) + [np.nan]]
    rows += [[0.0] * (block - 1) + [5.0], [-0.0] * block]
    with np.errstate(over="ignore", under="ignore"):
        return blocks([np.asarray(r, dtype=np.float32) for r in rows], block)


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["row", "col"])
def test_corner_cases(kind, norm, axis):
    data, _, block = KINDS[kind]
    x = corner_blocks(FORMATS[data].max, block)
    x = np.concatenate([x, np.zeros((-len(x) % 32, block), np.float32)])
    check(x if axis == "row" else x.T, kind, norm, axis)


def test_corner_rules_in_words():
    """The rules of the definition spelled out, without the oracle: scale byte and data of single blocks."""
    x = blocks(
        [[], [448.0], [448.0 * (1 + 2.0**-23)], [150.0], [np.nan, 1.0], [np.inf, 1.0], [2.0**-149], [-0.0, 448.0]], 32
    )
    data, scales = quantize(torch.from_numpy(x), "mxfp8")
    scale = cases.scale_matrix(scales)[formats.scale_offsets(len(x), 1)].ravel().tolist()
    codes = data.view(torch.uint8)
    # FP32(1/448) is above 1/448, but 448 times it rounds to 1: byte 127. One ulp more rounds up to 2. 150/448 < 1/2.
    assert scale == [0, 127, 128, 126, 255, 254, 0, 127]
    assert codes[0].tolist() == [0] * 32
    assert codes[1, 0] == 0x7E  # 448
    assert codes[2, 0] == 0x76  # 224
    assert codes[3, 0] == 0x79  # 300 to nearest even: 288
    assert set(codes[4].tolist()) == {0x7F}  # a NaN makes its block NaN
    assert codes[5, 0] == 0x7E  # Inf saturates; the rest is tiny
    assert codes[5, 1:].tolist() == [0] * 31
    assert codes[6, 0] == 0  # 2^-149 * 2^127 rounds to 0
    assert codes[7, 0] == 0x80  # the sign of zero is kept


@pytest.mark.parametrize("norm", [0.01, 1.0, 3.0, 448.0])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_block_is_zero_for_any_norm(kind, norm):
    for axis in ("row", "col"):
        data, scales = quantize(torch.zeros(64, 64), kind, norm=norm, axis=axis)
        assert not data.view(torch.uint8).any()
        assert not cases.scale_matrix(scales).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_random_matrices(kind, norm):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((96, 160)) * np.exp2(rng.integers(-20, 20, (96, 160)))).astype(np.float32)
    for axis in ("row", "col"):
        check(x, kind, norm, axis)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(32, 16), (64, 48), (160, 80), (33, 144), (1, 32), (128, 4096)], ids=str)
def test_shapes_and_short_last_blocks(kind, shape):
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    check(x, kind)
    if KINDS[kind][0] != "e2m1" or shape[0] % 2 == 0:
        check(x, kind, axis="col")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bit_input(kind, name):
    data_format, scale_format, block = KINDS[kind]
    codes, values = cases.encode(np.random.default_rng(3).standard_normal((64, 96)), name)
    data, scales = quantize(tensor_of(codes, name), kind)
    want, want_scales = formats.quantize(values, FORMATS[data_format], scale_format, block)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), data_bytes(want, kind))
    np.testing.assert_array_equal(cases.scale_matrix(scales), formats.pack_scales(want_scales))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", ["row", "col"])
def test_batch(kind, axis):
    """(R, C, L): each slice as a matrix of its own."""
    x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    data, scales = quantize(x.permute(1, 2, 0), kind, axis=axis)
    for i in range(3):
        one, one_scales = quantize(x[i], kind, axis=axis)
        assert torch.equal(data[..., i].view(torch.uint8), one.view(torch.uint8))
        assert torch.equal(scales[..., i : i + 1].view(torch.uint8), one_scales.view(torch.uint8))
    back = dequantize(data, scales, kind, axis=axis)
    assert back.shape == (64, 96, 3)
    for i in range(3):
        one = dequantize(*quantize(x[i], kind, axis=axis), kind, axis=axis)
        assert torch.equal(back[..., i], one)


def test_trailing_unit_dimension():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    data, scales = quantize(x.unsqueeze(-1), "mxfp8")
    flat, flat_scales = quantize(x, "mxfp8")
    assert data.shape == (64, 96, 1)
    assert torch.equal(data[..., 0].view(torch.uint8), flat.view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), flat_scales.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offsets", [(256,), (256, 768), (0, 256, 256, 1024, 1024), (256, 512)], ids=str)
def test_per_expert_columns(kind, offsets):
    x = np.random.default_rng(4).standard_normal((1024, 160)).astype(np.float32)
    check(x, kind, axis="col", offsets=offsets)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [None, 0.25, 3.0, 448.0])
@pytest.mark.parametrize("axis", ["row", "col"])
def test_dequantize(kind, norm, axis):
    """value = data * scale / norm. The product is exact; dividing is one rounding, multiplying by FP32(1/norm) two."""
    data_format, scale_format, block = KINDS[kind]
    x = np.random.default_rng(5).standard_normal((96, 160)).astype(np.float32)
    codes, scales = formats.quantize(x if axis == "row" else x.T, FORMATS[data_format], scale_format, block, norm or 1)
    data, packed = quantize(torch.from_numpy(x), kind, norm=norm, axis=axis)
    want = formats.dequantize(codes, scales, FORMATS[data_format], scale_format, block, norm or 1)
    want = want if axis == "row" else want.T
    got = dequantize(data, packed, kind, norm=norm, axis=axis)
    if norm in (None, 0.25):
        np.testing.assert_array_equal(got.numpy(), want)
    else:
        assert (np.abs(got.numpy() - want) <= oracle.gamma(2, oracle.U) * np.abs(want)).all()
    for name in ("bf16", "fp16"):
        rounded = dequantize(data, packed, kind, norm=norm, axis=axis, dtype=DTYPES[name])
        np.testing.assert_array_equal(cases.values_of(rounded), FORMATS[name].round(got.numpy()))


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_error(kind):
    """Half an ulp of the data format at the block's scale: the scale is at most twice amax / limit (e8m0)."""
    data_format, scale_format, block = KINDS[kind]
    form = FORMATS[data_format]
    x = np.random.default_rng(6).standard_normal((64, 160)).astype(np.float32)
    back = dequantize(*quantize(torch.from_numpy(x), kind), kind).numpy()
    amax = np.repeat(formats.block_amax(x, block), block, axis=1)[:, :160]
    # The widest spacing of the format, 2^(e - mantissa), as a share of its largest number; halved by rounding. An e4m3
    # scale is itself off by at most 2^-4, which moves data and may saturate the largest element by as much.
    spacing = 2.0 ** (np.floor(np.log2(form.max)) - form.mantissa_bits) / form.max / 2
    bound = amax * spacing * 2 if scale_format == "e8m0" else amax * (spacing * (1 + 2**-4) + 2**-4)
    assert (np.abs(back - x) <= bound * (1 + 2.0**-20)).all()


def test_quantizer_is_the_operators_quantizer():
    """An FP8 D of dsrelu is quantize() of its FP32 D, in both directions."""
    case = cases.Case("dsrelu", (256, 768), m=1024, n=160, k=96, d="f32", norm=3.0)
    d = cases.call(cases.build(case))[0]["d_row"][..., 0]
    for name, kind in (("e4m3", "mxfp8"), ("e5m2", "mxfp8_e5m2")):
        for discrete in (False, True):
            fp8 = replace(case, d=name, discrete_col_sfd=discrete)
            outputs = cases.call(cases.build(fp8))[0]
            keywords = {"padded_offsets": torch.tensor(case.offsets, dtype=torch.int32)} if discrete else {}
            for axis, extra in (("row", {}), ("col", keywords)):
                data, scales = quantize(d, kind, norm=3.0, axis=axis, **extra)
                assert torch.equal(outputs[f"d_{axis}"][..., 0].view(torch.uint8), data.view(torch.uint8))
                assert torch.equal(outputs[f"sfd_{axis}"].view(torch.uint8), scales.view(torch.uint8))
