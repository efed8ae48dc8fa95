"""Number formats, exhaustively over their codes: the core's functions directly, then through the operators."""

import ctypes

import cases
import numpy as np
import oracle_formats as formats
import pytest
import torch
from cases import DTYPES, operator, tensor_of
from oracle_formats import E2M1, E4M3, E5M2, FORMATS

SMALL = {"e4m3": E4M3, "e5m2": E5M2}


def float_patterns(seed: int = 0) -> np.ndarray:
    """FP32 numbers: every exponent, with mantissas at, beside and between all rounding points of 1 to 10 bits."""
    bits = {0, 1, 2, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x555555, 0x2AAAAA}
    for kept in range(11):
        half = 1 << (22 - kept)
        for k in (half, half | (half << 1) & 0x7FFFFF, 0x7FFFFF - half, (0x7FFFFF >> kept) << kept):
            bits.update((k + d) & 0x7FFFFF for d in (-1, 0, 1))
    bits |= set(np.random.default_rng(seed).integers(0, 1 << 23, 32).tolist())
    mantissas = np.array(sorted(bits), dtype=np.uint32)
    exponents = np.arange(256, dtype=np.uint32) << 23
    magnitudes = (exponents[:, None] | mantissas).ravel()
    return np.concatenate([magnitudes, magnitudes | 0x80000000]).view(np.float32)


def neighbours(values) -> np.ndarray:
    """Values, the ties between them, and the FP32 numbers on both sides of each."""
    values = np.unique(values[np.isfinite(values)])
    x = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    return np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])


def probe(library, name: str, data: np.ndarray, out_dtype) -> np.ndarray:
    data = np.ascontiguousarray(data)
    out = np.empty(data.shape, out_dtype)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (data, out)]
    getattr(library, name)(*pointers, ctypes.c_int64(data.size))
    return out


@pytest.mark.parametrize("name", [*FORMATS, "e8m0"])
def test_core_decode(core_probe, name):
    bits = 8 if name == "e8m0" else FORMATS[name].bits
    codes = np.arange(1 << bits, dtype=np.uint32)
    want = formats.decode_e8m0(codes) if name == "e8m0" else FORMATS[name].decode(codes)
    got = probe(core_probe, f"probe_decode_{name}", codes, np.float32)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("name", FORMATS)
def test_core_encode(core_probe, name):
    form = FORMATS[name]
    x = np.concatenate([float_patterns(), neighbours(form.decode(np.arange(1 << form.bits)))])
    got = probe(core_probe, f"probe_encode_{name}", x, np.uint32)
    want = form.encode(x, saturate=name not in ("bf16", "fp16"))
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    if name in SMALL:
        assert set(got[nan]) == {0x7F}
    elif name != "e2m1":
        assert np.isnan(form.decode(got[nan])).all()


def test_core_encode_e8m0(core_probe):
    powers = np.ldexp(1.0, np.arange(-149, 128))
    x = np.concatenate([float_patterns(), neighbours(powers)])
    got = probe(core_probe, "probe_encode_e8m0", x, np.uint32)
    np.testing.assert_array_equal(got, formats.encode_e8m0_up(x))


# Through the operators ----------------------------------------------------------------------------------------


def scale_view(scales: np.ndarray, name: str) -> torch.Tensor:
    rows, blocks = scales.shape
    physical = (1, formats.ceil_div(rows, 128), formats.ceil_div(blocks, 4), 32, 4, 4)
    return tensor_of(formats.pack_scales(scales), name).view(physical).permute(3, 4, 1, 5, 2, 0)


@pytest.mark.parametrize("name", SMALL)
def test_dequantize_all_codes(name):
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    scales = scale_view(np.full((8, 1), 127, np.uint8), "e8m0")
    got = operator("dequantize")(tensor_of(codes, name), scales, 32)
    want = SMALL[name].decode(codes)
    np.testing.assert_array_equal(got.numpy(), want)
    np.testing.assert_array_equal(np.signbit(got.numpy()), np.signbit(want))


def test_dequantize_all_fp4_bytes():
    data = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = scale_view(np.full((16, 1), 127, np.uint8), "e8m0")
    want = E2M1.decode(formats.unpack_fp4(data))
    for name in ("fp4", "uint8"):
        got = operator("dequantize")(tensor_of(data, name), scales, 32)
        np.testing.assert_array_equal(got.numpy(), want)
        np.testing.assert_array_equal(np.signbit(got.numpy()), np.signbit(want))


@pytest.mark.parametrize(("name", "vec"), [("e8m0", 32), ("e8m0", 16), ("e4m3", 16)])
def test_dequantize_all_scales(name, vec):
    scales = np.arange(256, dtype=np.uint8).reshape(64, 4)
    codes = np.tile(E2M1.encode([1.0, -1.5, 0.5, 6.0]), (64, vec))
    got = operator("dequantize")(tensor_of(formats.pack_fp4(codes), "fp4"), scale_view(scales, name), vec)
    with np.errstate(over="ignore"):
        want = formats.dequantize(codes, scales, E2M1, name, vec).astype(np.float32)
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("name", SMALL)
def test_quantize_encodes(name):
    """A first element of the largest number, and norm_const 1, hold the scale at 1 where FP32(1/limit)*limit is <= 1;
    the oracle says which scale it is, and the other elements run over all FP32 exponents below the limit."""
    form = SMALL[name]
    x = np.concatenate([float_patterns(), neighbours(form.decode(np.arange(256)))])
    x = x[np.abs(x) <= form.max]
    x = np.pad(x, (0, -len(x) % 31)).reshape(-1, 31)
    x = np.concatenate([np.full((len(x), 1), form.max, np.float32), x], axis=1)
    data, scales = operator("quantize")(torch.from_numpy(x), DTYPES[name], DTYPES["e8m0"], 32)
    want, want_scales = formats.quantize(x, form, "e8m0", 32)
    np.testing.assert_array_equal(cases.scale_matrix(scales)[formats.scale_offsets(len(x), 1)], want_scales)
    np.testing.assert_array_equal(data.view(torch.uint8).numpy(), want)


# Through dsrelu: with every other factor 1, D is the number under test. -----------------------------------------


def one_factor(a=None, b=None, c=None, sfa=None, sfb=None, rows=256, n=256, k=32, ab="e4m3", vec=32, sf="e8m0", **more):
    """D of dsrelu (role preactivation): 2 * 0.5 * relu(C) * sum_k A B, everything 1 at k = 0 unless given."""
    operand = E2M1 if ab == "fp4" else FORMATS[ab]

    def first_column(count, codes):
        full = np.zeros((count, k), np.uint8)
        full[:, 0] = operand.encode(1.0) if codes is None else codes
        return full

    a, b = first_column(rows, a), first_column(n, b)
    if ab == "fp4":
        a, b = formats.pack_fp4(a), formats.pack_fp4(b)
    one = 127 if sf == "e8m0" else E4M3.encode(1.0)
    blocks = formats.ceil_div(k, vec)
    sfa = np.full((rows, blocks), one, np.uint8) if sfa is None else np.repeat(sfa[:, None], blocks, 1)
    sfb = np.full((n, blocks), one, np.uint8) if sfb is None else np.repeat(sfb[:, None], blocks, 1)
    c = torch.ones(rows, n) if c is None else c
    options = {"c_role": "preactivation", "d_dtype": torch.float32, "sf_vec_size": vec, **more}
    outputs = operator("dsrelu")(
        tensor_of(a, ab),
        [tensor_of(b, ab).unsqueeze(-1)],
        c,
        torch.tensor([rows], dtype=torch.int32),
        torch.ones(1),
        torch.full((rows,), 0.5),
        sfa=scale_view(sfa, sf),
        sfb=[scale_view(sfb, sf)],
        **options,
    )
    return outputs[0]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("side", ["a", "b"])
def test_operand_decodes_all_codes(name, side):
    codes = np.arange(256, dtype=np.uint8)
    d = one_factor(**{side: codes}, ab=name).numpy()
    want = np.broadcast_to(FORMATS[name].decode(codes)[:, None], (256, 256))
    np.testing.assert_array_equal(d if side == "a" else d.T, want)


@pytest.mark.parametrize("side", ["a", "b"])
def test_operand_decodes_all_fp4_codes(side):
    codes = np.arange(256, dtype=np.uint8) % 16
    d = one_factor(**{side: codes}, ab="fp4", vec=16).numpy()
    want = np.broadcast_to(E2M1.decode(codes)[:, None], (256, 256))
    np.testing.assert_array_equal(d if side == "a" else d.T, want)


@pytest.mark.parametrize(("ab", "sf", "vec"), [("e4m3", "e8m0", 32), ("fp4", "e8m0", 16), ("fp4", "e4m3", 16)])
@pytest.mark.parametrize("side", ["sfa", "sfb"])
def test_scale_factors_decode_all_bytes(ab, sf, vec, side):
    """Scale byte 0 is 2^-127, an FP32 subnormal, and must arrive as such; NaN stays in its row or column."""
    codes = np.arange(256, dtype=np.uint8)
    d = one_factor(**{side: codes}, ab=ab, sf=sf, vec=vec).numpy()
    want = np.broadcast_to(formats.decode_scale(codes, sf)[:, None], (256, 256))
    np.testing.assert_array_equal(d if side == "sfa" else d.T, want)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "bf16", "fp16"])
def test_c_decodes_all_codes(name):
    """Role grad_output: D = 2 * 0.5 * C * relu(1)."""
    form = FORMATS[name]
    rows = 1 << (form.bits - 8)
    codes = np.resize(np.arange(1 << form.bits), (max(rows, 256), 256)).astype(
        np.uint8 if form.bits == 8 else np.uint16
    )
    d = one_factor(c=tensor_of(codes, name), c_role="grad_output")
    np.testing.assert_array_equal(d.numpy(), form.decode(codes))


@pytest.mark.parametrize("name", ["bf16", "fp16", "f32"])
def test_d_encodes(name):
    x = float_patterns(1)
    x = x[np.abs(x) < 2.0**126]  # 2 * C may be formed first
    if name != "f32":
        x = np.concatenate([neighbours(FORMATS[name].decode(np.arange(1 << 16))), x])
        x = x[np.abs(x) < 2.0**126]
    x = np.resize(x, (-(-x.size // (256 * 256)) * 256, 256))
    d = one_factor(c=torch.from_numpy(x), rows=len(x), c_role="grad_output", d_dtype=DTYPES[name])
    if name == "f32":
        np.testing.assert_array_equal(d.numpy(), x)
    else:
        np.testing.assert_array_equal(cases.values_of(d), FORMATS[name].round(x))
