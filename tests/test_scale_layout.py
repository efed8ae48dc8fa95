"""The scale layout: a bijection, the same by the byte formula and by the permuted view, in both column forms."""

import ctypes
import itertools

import numpy as np
import oracle_formats as formats
import pytest
import torch
from cases import operator, tensor_of
from oracle_formats import ceil_div

from cudnn_grouped import library
from cudnn_grouped import scales as product

SHAPES = [(1, 1), (32, 4), (33, 3), (128, 4), (129, 5), (160, 7), (256, 8), (300, 13), (512, 33)]
# first, middle and last expert empty; one expert; rows past the last offset
OFFSETS = [(256,), (256, 512), (0, 256, 256, 768, 768), (512, 768, 1536), (0, 0)]


def labels(rows: int, blocks: int) -> np.ndarray:
    """A scale matrix in which, over two passes (low and high byte), every entry is distinct."""
    return np.arange(rows * blocks).reshape(rows, blocks)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_byte_formula_is_a_bijection(shape):
    rows, blocks = ceil_div(shape[0], 128) * 128, ceil_div(shape[1], 4) * 4
    offsets = formats.scale_offsets(rows, blocks).ravel()
    np.testing.assert_array_equal(np.sort(offsets), np.arange(formats.scale_bytes(*shape)))
    inside = formats.scale_offsets(*shape)
    np.testing.assert_array_equal(inside, offsets.reshape(rows, blocks)[: shape[0], : shape[1]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_view_equals_byte_formula(shape):
    rows, blocks = shape
    physical = torch.arange(formats.scale_bytes(*shape)).view(1, ceil_div(rows, 128), ceil_div(blocks, 4), 32, 4, 4)
    view = product.scale_view(physical)
    assert tuple(view.shape) == product.scale_shape(rows, blocks * 32, 32)
    index = formats.scale_view_index(*shape)
    np.testing.assert_array_equal(view[..., 0].numpy()[index], formats.scale_offsets(*shape))
    assert torch.equal(product.physical_scales(view), physical)


def test_core_layout(core_probe):
    for rows, blocks in SHAPES:
        assert core_probe.probe_scale_bytes(rows, blocks) == formats.scale_bytes(rows, blocks)
        offsets = formats.scale_offsets(rows, blocks)
        for r, b in itertools.product(range(0, rows, 7), range(blocks)):
            assert core_probe.probe_scale_offset(rows, blocks, r, b) == offsets[r, b]
    for start, columns in itertools.product((0, 256, 512, 5120), (16, 128, 160, 512)):
        assert core_probe.probe_column_base(start, columns, 32) == start // 128 * ceil_div(columns, 128) * 512
        assert core_probe.probe_column_base(start, columns, 16) == start // 64 * ceil_div(columns, 128) * 512


def test_core_layout_is_64_bit(core_probe):
    """Sizes at which 32-bit products overflow: rows x blocks past 2^31, and 384 experts of 3072 x 7168."""
    rows, blocks = 2**31, 8
    c = ctypes.c_int64
    last = core_probe.probe_scale_offset(c(rows), c(blocks), c(rows - 1), c(blocks - 1))
    assert last == core_probe.probe_scale_bytes(c(rows), c(blocks)) - 1 == rows * blocks - 1
    assert core_probe.probe_column_base(c(2**31), c(8192), c(32)) == 2**31 // 128 * 64 * 512
    assert 384 * core_probe.probe_scale_bytes(c(3072), c(7168 // 16)) == 384 * 3072 * 448


@pytest.mark.parametrize(("m", "n", "refused"), [(2**30, 128, False), (2**30 + 256, 16, True), (2**29, 160, False)])
def test_scale_factors_past_32_bits_are_refused(m, n, refused):
    """The GPU engines' offsets are of 32 bits; most bytes of a narrow D's scale factors are padding."""

    def described(shape, dtype):
        tensor = torch.empty(shape, device="meta")
        return (dtype, "cpu", -1, tuple(shape), tuple(tensor.stride()), 0)

    scales = [described((rows * 4,), "float8_e8m0fnu") for rows in (m, ceil_div(n, 128) * 128)]
    tensors = {"a": described((m, 32), "float8_e4m3fn"), "b": described((n, 32), "float8_e4m3fn"), "sfa": scales[0]}
    tensors |= {
        "sfb": [scales[1]],
        "padded_offsets": described((1,), "int32"),
        "norm_const": described((1,), "float32"),
    }
    options = {"sf_vec_size": 32, "generate_c": False, "d_dtype": "float8_e4m3fn"}
    verdict = library.C.check("srelu", tensors, options, False)
    assert (verdict[1], "at most 4 GiB" in verdict[2]) == ("a", True) if refused else verdict is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_rows(shape):
    for shift in (0, 8):
        matrix = (labels(*shape) >> shift).astype(np.uint8)
        packed = product.pack_scales(tensor_of(matrix, "e8m0"))
        assert packed.dtype == torch.float8_e8m0fnu
        assert tuple(packed.shape) == product.scale_shape(shape[0], shape[1], 1)
        flat = product.physical_scales(packed).contiguous().view(torch.uint8).flatten()
        np.testing.assert_array_equal(flat.numpy(), formats.pack_scales(matrix))
        for form in (packed, product.physical_scales(packed), flat.view(torch.float8_e8m0fnu)):
            got = product.unpack_scales(form, shape)
            np.testing.assert_array_equal(got.view(torch.uint8).numpy(), matrix)


def test_pack_several_experts():
    matrices = np.random.default_rng(0).integers(0, 255, (3, 160, 5)).astype(np.uint8)
    packed = product.pack_scales(torch.from_numpy(matrices).permute(1, 2, 0).contiguous().view(torch.float8_e4m3fn))
    flat = product.physical_scales(packed).contiguous().view(torch.uint8).flatten()
    np.testing.assert_array_equal(flat.numpy(), np.concatenate([formats.pack_scales(m) for m in matrices]))
    got = product.unpack_scales(packed, (160, 5, 3)).view(torch.uint8).permute(2, 0, 1)
    np.testing.assert_array_equal(got.numpy(), matrices)


@pytest.mark.parametrize(("offsets", "tail"), [(o, t) for o in OFFSETS for t in (0, 256) if o[-1] + t], ids=str)
@pytest.mark.parametrize("columns", [16, 128, 160, 384])
@pytest.mark.parametrize("discrete", [False, True])
def test_column_forms(offsets, columns, tail, discrete):
    rows = offsets[-1] + tail
    matrix = np.random.default_rng(0).integers(1, 255, (rows // 32, columns)).astype(np.uint8)
    places = formats.column_scale_offsets(rows, columns, offsets, discrete)
    used = places >= 0
    assert len(np.unique(places[used])) == used.sum()
    assert places.max() < formats.scale_bytes(columns, rows // 32)
    flat = np.zeros(formats.scale_bytes(columns, rows // 32), np.uint8)
    flat[places[used]] = matrix.T[used]
    keywords = {"axis": "col", "padded_offsets": torch.tensor(offsets, dtype=torch.int32) if discrete else None}
    packed = product.pack_scales(tensor_of(matrix, "e8m0"), **keywords)
    got = product.physical_scales(packed).contiguous().view(torch.uint8).flatten().numpy()
    np.testing.assert_array_equal(got, flat)
    back = product.unpack_scales(packed, matrix.shape, **keywords).view(torch.uint8).numpy()
    np.testing.assert_array_equal(back, np.where(used.T, matrix, 0))


def test_discrete_form_is_one_tensor_per_expert():
    """The slice that starts at an expert's first byte is that expert's own scale tensor."""
    offsets, columns = (256, 768, 1024), 160
    matrix = np.random.default_rng(1).integers(1, 255, (32, columns)).astype(np.uint8)
    packed = product.pack_scales(
        tensor_of(matrix, "e8m0"), axis="col", padded_offsets=torch.tensor(offsets, dtype=torch.int32)
    )
    flat = product.physical_scales(packed).contiguous().view(torch.uint8).flatten().numpy()
    byte, start = 0, 0
    for end in offsets:
        own = formats.pack_scales(matrix[start // 32 : end // 32].T)
        np.testing.assert_array_equal(flat[byte : byte + own.size], own)
        byte, start = byte + own.size, end
    assert byte == flat.size


def test_forms_coincide_for_one_expert_or_one_column_block():
    for offsets, columns in (((768,), 384), ((256, 512, 768), 128)):
        whole = formats.column_scale_offsets(768, columns, offsets, False)
        np.testing.assert_array_equal(whole, formats.column_scale_offsets(768, columns, offsets, True))
    a = formats.column_scale_offsets(768, 160, (256, 768), False)
    assert (a != formats.column_scale_offsets(768, 160, (256, 768), True)).any()


def test_dequantize_reads_each_scale():
    """The operator's layout is the byte formula: 2^(row + block) style scales all come back in their place."""
    rows, blocks = 300, 5
    matrix = np.random.default_rng(2).integers(100, 150, (rows, blocks)).astype(np.uint8)
    data = tensor_of(np.full((rows, blocks * 32), formats.E4M3.encode(1.0), np.uint8), "e4m3")
    got = operator("dequantize")(data, product.pack_scales(tensor_of(matrix, "e8m0")), 32)
    np.testing.assert_array_equal(got.numpy(), np.repeat(formats.decode_e8m0(matrix), 32, axis=1))


@pytest.mark.parametrize(
    ("counts", "want"),
    [([1, 0, 256, 257], [256, 256, 512, 1024]), ([0], [0]), ([512], [512])],
)
def test_padded_offsets_from_counts(counts, want):
    got = product.padded_offsets_from_counts(counts)
    assert got.dtype == torch.int32
    assert got.tolist() == want
