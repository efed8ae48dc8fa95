"""pack_scales and unpack_scales against the byte formulas, and the helpers beside them."""

import pytest
import torch

from cudnn_grouped.scales import (
    pack_scales,
    padded_offsets_from_counts,
    physical_scales,
    scale_shape,
    scale_view,
    unpack_scales,
)


def atom_byte(row, block, blocks):
    """Source: the documents' shape (32, 4, rows/128, 4, blocks/4, L) and strides (16, 4, .., 1, 512, ..)."""
    return (row // 128 * -(-blocks // 4) + block // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4


def memory(packed):
    return physical_scales(packed).view(torch.uint8).reshape(-1)


def random_bytes(*shape):
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows, blocks, experts", [(256, 4, 1), (130, 5, 3), (64, 1, 2), (1, 9, 1)])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.uint8])
def test_row_form(rows, blocks, experts, dtype):
    scales = random_bytes(rows, blocks, experts)
    packed = pack_scales(scales.view(dtype))
    assert packed.dtype == dtype and tuple(packed.shape) == scale_shape(rows, blocks * 32, 32, experts)
    expected = torch.zeros(experts, -(-rows // 128) * -(-blocks // 4) * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            expected[:, atom_byte(row, block, blocks)] = scales[row, block]
    assert torch.equal(memory(packed), expected.flatten())
    for form in (packed, physical_scales(packed), physical_scales(packed).reshape(-1)):
        assert torch.equal(unpack_scales(form, scales.shape).view(torch.uint8), scales)
    assert torch.equal(unpack_scales(pack_scales(scales[..., 0]), (rows, blocks)), scales[..., 0])


@pytest.mark.parametrize("columns", [32, 128, 192])
@pytest.mark.parametrize("discrete", [False, True])
def test_column_form(columns, discrete):
    offsets, rows = [256, 256, 1024], 1280
    scales = random_bytes(rows // 32, columns)
    if discrete:
        scales[offsets[-1] // 32 :] = 0
    padded_offsets = torch.tensor(offsets, dtype=torch.int32) if discrete else None
    packed = pack_scales(scales, axis="col", padded_offsets=padded_offsets)
    assert tuple(packed.shape) == scale_shape(columns, rows, 32)
    expected = torch.zeros(-(-columns // 128) * (rows // 128) * 512, dtype=torch.uint8)
    for start, end in zip([0, *offsets[:-1]], offsets, strict=True) if discrete else [(0, rows)]:
        base = start // 128 * -(-columns // 128) * 512
        for m in range(start, end, 32):
            for n in range(columns):
                expected[base + atom_byte(n, (m - start) // 32, (end - start) // 32)] = scales[m // 32, n]
    assert torch.equal(memory(packed), expected)
    assert torch.equal(unpack_scales(packed, scales.shape, axis="col", padded_offsets=padded_offsets), scales)


def test_views_do_not_copy():
    physical = random_bytes(2, 1, 3, 32, 4, 4)
    assert scale_view(physical).data_ptr() == physical.data_ptr()
    assert torch.equal(physical_scales(scale_view(physical)), physical)
    assert scale_view(physical).stride() == (16, 4, 3 * 512, 1, 512, 3 * 512)


def test_padded_offsets():
    offsets = padded_offsets_from_counts([3, 0, 256, 257])
    assert offsets.dtype == torch.int32 and offsets.tolist() == [256, 256, 512, 1024]
    assert padded_offsets_from_counts(torch.tensor([1, 1])).tolist() == [256, 512]
    assert padded_offsets_from_counts([100], alignment=128).tolist() == [128]
    for wrong in ([-1, 2], [[1], [2]], "ab", None, [0.5]):
        with pytest.raises(ValueError, match="token_counts"):
            padded_offsets_from_counts(wrong)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: pack_scales(random_bytes(4, 4), axis="column"), "axis"),
        (lambda: pack_scales(torch.zeros(4, 4)), "scales"),
        (lambda: pack_scales([[1]]), "scales"),
        (lambda: pack_scales(random_bytes(4, 4, 2, 2)), "scales"),
        (lambda: pack_scales(random_bytes(4, 4, 2), axis="col"), "scales"),
        (lambda: pack_scales(random_bytes(4, 4), padded_offsets=torch.tensor([256])), "padded_offsets"),
        (lambda: unpack_scales(random_bytes(512), (4,)), "shape"),
        (lambda: unpack_scales(random_bytes(512), (129, 4)), "packed"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        call()
