"""cudnn_grouped.quantize and dequantize: formats, shapes, and errors that name the argument."""

import pytest
import torch
from api_problem import same_bits

import cudnn_grouped
from cudnn_grouped import dequantize, quantize, scale_shape
from cudnn_grouped.quantize import FORMATS

# Largest error against the block's amax: half the step at the value. In FP4 the step is 2 from 4 to 6, so an error of 1
# comes with an amax of at least 5, or of 6 where the scale is amax/6 and not a power of two.
ERROR = {"mxfp8": 2**-4, "mxfp8_e5m2": 2**-3, "mxfp4": 1 / 5, "nvfp4": 1 / 6}


def data(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def block_amax(x, size, axis):
    blocks = x.unflatten(axis, (-1, size))
    return blocks.abs().amax(dim=axis + 1).repeat_interleave(size, dim=axis)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("norm", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back(format, axis, norm, dtype):
    x = data(256, 96).to(dtype)
    norm_const = None if norm is None else torch.tensor([norm])
    packed, scales = quantize(x, format, axis=axis, norm_const=norm_const)
    want = FORMATS[format]
    fp4 = want.dtype == torch.float4_e2m1fn_x2
    shape = (256, 48) if axis == "row" else (96, 128)
    assert packed.dtype == want.dtype and scales.dtype == want.sf_dtype
    assert tuple(packed.shape) == (shape if fp4 else (256, 96))
    rows, length = (256, 96) if axis == "row" else (96, 256)
    assert tuple(scales.shape) == scale_shape(rows, length, want.sf_vec_size)
    back = dequantize(packed, scales, format, axis=axis, norm_const=norm_const)
    assert back.dtype == torch.float32 and back.shape == x.shape
    bound = ERROR[format] * block_amax(x.float(), want.sf_vec_size, 1 if axis == "row" else 0)
    # An e4m3 scale is itself rounded, by up to 2^-4.
    assert bool(((back - x.float()).abs() <= bound * 1.0625).all())
    assert dequantize(packed, scales, format, axis=axis, norm_const=norm_const, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_experts_are_quantised_apart(format):
    x = data(3, 64, 96).permute(1, 2, 0)
    packed, scales = quantize(x, format)
    for expert in range(3):
        one, its_scales = quantize(x[..., expert].contiguous(), format)
        assert same_bits(packed[..., expert].view(torch.uint8), one.view(torch.uint8))
        assert same_bits(scales[..., expert : expert + 1].contiguous(), its_scales.contiguous())


def test_per_expert_column_scales():
    offsets = torch.tensor([256, 768], dtype=torch.int32)
    x = data(768, 160)
    packed, scales = quantize(x, axis="col", padded_offsets=offsets)
    parts = [quantize(x[start:end], axis="col") for start, end in ((0, 256), (256, 768))]
    assert same_bits(packed, torch.cat([part.view(torch.uint8) for part, _ in parts]).view(packed.dtype))
    memory = [s.permute(5, 2, 4, 0, 1, 3).reshape(-1).view(torch.uint8) for s in (scales, *(s for _, s in parts))]
    assert torch.equal(memory[0], torch.cat(memory[1:]))
    back = dequantize(packed, scales, axis="col", padded_offsets=offsets)
    assert torch.equal(back, torch.cat([dequantize(*part, axis="col") for part in parts]))


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x: quantize(x, "fp8"), "format"),
        (lambda x: quantize(x, ["mxfp8"]), "format"),
        (lambda x: quantize(x, axis="rows"), "axis"),
        (lambda x: quantize(x, axis=0), "axis"),
        (lambda x: quantize(x.numpy()), "x"),
        (lambda x: quantize(x.double()), "x"),
        (lambda x: quantize(x.T), "x"),
        (lambda x: quantize(x[0]), "x"),
        (lambda x: quantize(x[:, :63], "nvfp4"), "x"),
        (lambda x: quantize(x, norm_const=2.0), "norm_const"),
        (lambda x: quantize(x, norm_const=torch.ones(2)), "norm_const"),
        (lambda x: quantize(x, norm_const=torch.ones(1, device="meta")), "norm_const"),
        (lambda x: quantize(x, padded_offsets=torch.tensor([256], dtype=torch.int32)), "padded_offsets"),
        (lambda x: quantize(x, axis="col", padded_offsets=torch.tensor([256])), "padded_offsets"),
        (lambda x: dequantize(None, None), "data"),
        (lambda x: dequantize(*quantize(x), "nvfp4"), "data"),
        (lambda x: dequantize(quantize(x)[0], quantize(x, "nvfp4")[1]), "scales"),
        (lambda x: dequantize(quantize(x)[0], quantize(x)[1][:, :, :1]), "scales"),
        (lambda x: dequantize(*quantize(x), dtype="float32"), "dtype"),
        (lambda x: dequantize(*quantize(x), dtype=torch.float64), "dtype"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=f"^{name}(\\[0\\])?: expected "):
        call(data(256, 64))


def test_uint8_is_packed_fp4():
    packed, scales = quantize(data(64, 64), "nvfp4")
    expected = dequantize(packed, scales, "nvfp4")
    assert torch.equal(dequantize(packed.view(torch.uint8), scales, "nvfp4"), expected)
    assert cudnn_grouped.quantize is quantize
