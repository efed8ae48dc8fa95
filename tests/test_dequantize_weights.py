"""dequantize_weights, and its results in compiled graphs and in the documented wrappers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from api_problem import CASES as API_CASES
from api_problem import call_wrapper, wrapper_arguments
from cases import raw

import cudnn_grouped
from cudnn_grouped.quantize import FORMATS


def weights_of(format, kind, major="k"):
    """Quantised weights (80, 96) of three experts and their scales, as the operators take them."""
    generator = torch.Generator().manual_seed(0)
    # Over many powers of two, all within BF16's range.
    exponents = torch.randint(-90, 90, (3, 80, 3), generator=generator).repeat_interleave(32, 2)
    x = torch.randn(3, 80, 96, generator=generator) * torch.exp2(exponents)
    data, scales = cudnn_grouped.quantize(x.permute(1, 2, 0), format)
    if major == "n":
        data = data.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    if kind == "dense":
        return data, scales
    # A list's scales, one physical tensor an expert.
    physical = scales.permute(5, 2, 4, 0, 1, 3)
    return list(data.unbind(2)), list(physical.unsqueeze(1).unbind(0))


@pytest.mark.parametrize("kind", ["dense", "list"])
@pytest.mark.parametrize(
    ("format", "major"), [*((format, "k") for format in FORMATS), ("mxfp8", "n"), ("mxfp8_e5m2", "n")]
)
def test_dequantize_weights(format, major, kind):
    """The values that ``dequantize`` has in FP32: K-major BF16, in the form of b."""
    b, sfb = weights_of(format, kind, major)
    result = cudnn_grouped.dequantize_weights(b, sfb, format)
    data, scales = weights_of(format, "dense")
    expected = cudnn_grouped.dequantize(data, scales, format)
    assert isinstance(result, list) == (kind == "list")
    for one in result if kind == "list" else [result]:
        assert one.dtype == torch.bfloat16 and one.stride()[:2] == (96, 1)
    got = torch.stack(result, dim=2) if kind == "list" else result
    assert torch.equal(got.float(), expected)


def test_ends_of_the_range():
    """Below 2^-126 BF16 numbers are multiples of 2^-133: a product that is none is rounded to one. 2^128 is infinite."""
    codes = np.full((32, 32), 0x09, np.uint8)  # 9 * 2^-9 in e4m3
    scales = np.zeros((32, 1), np.uint8)
    scales[:, 0] = np.arange(32)  # 2^-127 and on
    codes[31] = 0x7E  # 448
    scales[31] = 254  # times 2^127
    data, packed = (
        torch.from_numpy(codes).view(torch.float8_e4m3fn),
        cudnn_grouped.pack_scales(torch.from_numpy(scales)),
    )
    result = cudnn_grouped.dequantize_weights(data[..., None], packed.view(torch.float8_e8m0fnu), "mxfp8")[:, 0, 0]
    exact = cudnn_grouped.dequantize(data[..., None], packed.view(torch.float8_e8m0fnu), "mxfp8")[:, 0, 0]
    assert result[31] == torch.inf
    assert torch.equal(result[:31].float(), exact[:31].bfloat16().float())
    steps = result[:31].double() * 2.0**133
    assert torch.equal(steps, steps.round())
    rounded = result[:31].float() != exact[:31]
    assert rounded[0] and not rounded[4:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fp8"}, "format: expected one of mxfp8, .*got 'fp8'"),
        ({"b": None}, "b: expected a torch.Tensor, got NoneType"),
        ({"sfb": None}, "sfb: expected a torch.Tensor, got NoneType"),
        ({"b": torch.zeros(64, 64, 2)}, "b: expected dtype torch.float8_e4m3fn of format mxfp8, got torch.float32"),
        ({"b": []}, "b: expected a tensor or a list of at least one, got an empty list"),
        ({"sfb": []}, "sfb: expected a tensor, like b, got a list"),
        ({"b": ["w"], "sfb": ["s"]}, r"b\[0\]: expected a torch.Tensor, got str"),
    ],
)
def test_dequantize_weights_errors(change, message):
    b, sfb = weights_of("mxfp8", "dense")
    with pytest.raises(ValueError, match=message):
        cudnn_grouped.dequantize_weights(**{"b": b, "sfb": sfb, "format": "mxfp8", **change})


def test_dequantize_weights_of_lists_errors():
    b, sfb = weights_of("mxfp8", "list")
    with pytest.raises(ValueError, match="sfb: expected one tensor for each of b, 3, got 2"):
        cudnn_grouped.dequantize_weights(b, sfb[:2])
    with pytest.raises(ValueError, match=r"sfb\[1\]: expected .*got"):
        cudnn_grouped.dequantize_weights(b, [sfb[0], sfb[1].view(-1)[:-1], sfb[2]])
    packed = torch.zeros(16, 32, dtype=torch.uint8).t()  # N-major: its scales would fit it the other way round
    scales = cudnn_grouped.pack_scales(torch.zeros(32, 2, dtype=torch.uint8).view(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"b\[0\]: expected strides"):
        cudnn_grouped.dequantize_weights([packed], [scales], "nvfp4")
    with pytest.raises(ValueError, match=r"b\[2\]: expected strides"):
        cudnn_grouped.dequantize_weights([*b[:2], b[2][::2]], sfb)


# Their use -------------------------------------------------------------------------------------------------------


def kept(kind):
    """a, quantised weights, their dequantised form and offsets."""
    a, sfa = cudnn_grouped.quantize(torch.randn(512, 96, generator=torch.Generator().manual_seed(1)))
    b, sfb = weights_of("mxfp8", kind)
    return a, sfa, b, sfb, torch.tensor([256, 256, 512], dtype=torch.int32)


def listed(x):
    return x if isinstance(x, list) else [x]


@pytest.mark.parametrize("kind", ["dense", "list"])
def test_compiled(kind):
    """One graph of making and using them: eager's bits."""
    a, sfa, b, sfb, offsets = kept(kind)

    def run(a, sfa, b, sfb, offsets):
        kept = listed(cudnn_grouped.dequantize_weights(b, sfb))
        return torch.ops.cudnn_grouped.mm(a, kept, offsets, sfa=sfa, sf_vec_size=32)[1]

    torch._dynamo.reset()
    result = torch.compile(run, fullgraph=True, backend="aot_eager")(a, sfa, b, sfb, offsets)
    expected = torch.ops.cudnn_grouped.mm(a, listed(b), offsets, sfa=sfa, sfb=listed(sfb), sf_vec_size=32)[1]
    assert torch.equal(result, run(a, sfa, b, sfb, offsets)) and torch.equal(result, expected)


@pytest.mark.parametrize("weights", ["dense_k", "list_k", "ptrs_k"])
@pytest.mark.parametrize("name", ["dsrelu_mxfp8", "dsrelu_fp4", "dglu_mxfp8", "dglu_fp4"])
def test_documented_wrapper(name, weights):
    results = []
    for dequantized in (False, True):
        arguments = wrapper_arguments(replace(API_CASES[name], weights=weights, dequantized=dequantized))
        assert ("sfb_tensor" in arguments or "sfb_ptrs" in arguments) != dequantized
        results.append(call_wrapper(arguments))
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(raw(one), raw(other))
