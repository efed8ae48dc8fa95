"""Scale-factor tensors: shapes, packing and unpacking. Views and byte copies only, no arithmetic on the scales.

One atom holds the scales of 128 rows x 4 blocks in 512 bytes; ``byte(r, b) = (r % 32) * 16 + (r // 32 % 4) * 4 + b % 4``.
Memory is the C-contiguous physical form (L, RP, KP, 32, 4, 4), RP = ceil(rows / 128), KP = ceil(blocks / 4); the documents' 6-D
tensor is its permuted view (32, 4, RP, 4, KP, L). Source of the layout: the API documents (shapes of SFA, SFB,
SFD_row, SFD_col) and the CUTLASS block-scaled layout of the same atom.

Axis "row": a scale per row and block of columns, logical shape (rows, blocks) or (rows, blocks, L).
Axis "col": a scale per block of rows and column, logical shape (blocks, columns); with ``padded_offsets`` each expert
has its own complete tensor, one after the other (``discrete_col_sfd=True``), otherwise one tensor spans all rows.
"""

import torch

_TO_VIEW = (3, 4, 1, 5, 2, 0)
_TO_PHYSICAL = (5, 2, 4, 0, 1, 3)


def _ceil_div(a, b):
    return (a + b - 1) // b


def scale_shape(rows, length, sf_vec_size, experts=1):
    """The 6-D shape (32, 4, ceil(rows/128), 4, ceil(ceil(length/sf_vec_size)/4), experts) of a scale tensor.

    ``length`` counts elements along the blocks: K for SFA and SFB, N (or 2N) for SFD_row, and M for SFD_col, whose
    ``rows`` are the columns of D.
    """
    return (32, 4, _ceil_div(rows, 128), 4, _ceil_div(_ceil_div(length, sf_vec_size), 4), experts)


def scale_view(physical):
    """The 6-D view of a physical (L, RP, KP, 32, 4, 4) tensor. No copy."""
    return physical.permute(_TO_VIEW)


def physical_scales(view):
    """The physical (L, RP, KP, 32, 4, 4) tensor behind a 6-D view. No copy; the inverse of ``scale_view``."""
    return view.permute(_TO_PHYSICAL)


def padded_offsets_from_counts(token_counts, alignment=256, device=None):
    """Cumulative ends of experts whose row counts are each rounded up to ``alignment``.

    token_counts: a sequence or 1-D integer tensor (L,), none negative. Returns (L,) int32. ValueError otherwise.
    """
    expected = "token_counts: expected a 1-D sequence of counts >= 0"
    try:
        counts = torch.as_tensor(token_counts)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{expected}, got {token_counts!r:.100} ({error})") from error
    counts = counts.to(device=device)
    whole = not (counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool) or counts.numel() == 0
    on_cpu = counts.device.type == "cpu"
    if counts.dim() != 1 or not whole or (on_cpu and bool((counts < 0).any())):
        raise ValueError(f"{expected}, got {token_counts}")
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment: expected an int above 0, got {alignment!r}")
    ends = (_ceil_div(counts.long(), alignment) * alignment).cumsum(0)
    if on_cpu and counts.numel() and int(ends[-1]) >= 2**31:
        raise ValueError(f"token_counts: expected fewer than 2^31 rows in all, got {int(ends[-1])}")
    return ends.to(torch.int32)


def pack_scales(scales, *, axis="row", padded_offsets=None, sf_vec_size=32):
    """Pack a logical scale matrix into the 128x4 atoms; padding bytes are zero.

    scales: one-byte dtype; (rows, blocks) or (rows, blocks, L) for axis "row", (blocks, columns) for axis "col".
    padded_offsets: (L,) ends on the host, axis "col" only: the per-expert form. ``sf_vec_size`` is the rows per block there.
    Returns the 6-D view of one contiguous buffer, in the dtype of ``scales``. ValueError for another shape, dtype or axis.
    """
    _check(scales, axis, padded_offsets)
    raw = scales.view(torch.uint8)
    if axis == "row":
        physical = _pack(raw if raw.dim() == 3 else raw[..., None])
    else:
        blocks, columns = raw.shape
        shape = (1, _ceil_div(columns, 128), _ceil_div(blocks, 4), 32, 4, 4)
        if padded_offsets is None:
            physical = _pack(raw.T[..., None])
        else:
            flat = raw.new_zeros(shape).view(-1)
            for part, start, end in _expert_parts(flat, columns, padded_offsets, sf_vec_size):
                part.copy_(_pack(raw[start:end].T[..., None]).view(-1))
            physical = flat.view(shape)
    return scale_view(physical.view(scales.dtype))


def unpack_scales(packed, shape, *, axis="row", padded_offsets=None, sf_vec_size=32):
    """The logical scale matrix of ``shape`` out of a packed tensor; the inverse of ``pack_scales``.

    packed: the 6-D view, the physical 6-D tensor or the flat buffer. shape: the logical shape, as in ``pack_scales``.
    ValueError when ``packed`` has not the bytes that ``shape`` needs.
    """
    shape = tuple(shape)
    if axis not in ("row", "col") or len(shape) not in ((2, 3) if axis == "row" else (2,)):
        expected = "(rows, blocks[, L]) with axis row or (blocks, columns) with axis col"
        raise ValueError(f"shape: expected {expected}, got {shape}, axis {axis!r}")
    rows, blocks = shape[:2] if axis == "row" else shape[::-1]
    experts = shape[2] if len(shape) == 3 else 1
    physical_shape = (experts, _ceil_div(rows, 128), _ceil_div(blocks, 4), 32, 4, 4)
    raw = _physical_bytes(packed, physical_shape)
    if axis == "row":
        logical = _unpack(raw, rows, blocks)
        logical = logical if len(shape) == 3 else logical[..., 0]
    elif padded_offsets is None:
        logical = _unpack(raw, rows, blocks)[..., 0].T
    else:
        logical = raw.new_zeros(shape)
        flat = raw.reshape(-1)
        for part, start, end in _expert_parts(flat, rows, padded_offsets, sf_vec_size):
            one = part.view(1, physical_shape[1], -1, 32, 4, 4)
            logical[start:end] = _unpack(one, rows, end - start)[..., 0].T
    return logical.contiguous().view(packed.dtype)


def _check(scales, axis, padded_offsets):
    if axis not in ("row", "col"):
        raise ValueError(f"axis: expected 'row' or 'col', got {axis!r}")
    if not isinstance(scales, torch.Tensor):
        raise ValueError(f"scales: expected a tensor, got {type(scales).__name__}")
    if scales.element_size() != 1:
        raise ValueError(f"scales: expected a one-byte dtype, got {scales.dtype}")
    if scales.dim() not in ((2, 3) if axis == "row" else (2,)):
        expected = "(rows, blocks[, L])" if axis == "row" else "(blocks, columns)"
        raise ValueError(f"scales: expected shape {expected} with axis {axis}, got {tuple(scales.shape)}")
    if axis == "row" and padded_offsets is not None:
        raise ValueError("padded_offsets: expected None with axis row, got a tensor")


def _pack(raw):
    rows, blocks, experts = raw.shape
    row_atoms, block_atoms = _ceil_div(rows, 128), _ceil_div(blocks, 4)
    padded = raw.new_zeros((experts, row_atoms * 128, block_atoms * 4))
    padded[:, :rows, :blocks] = raw.permute(2, 0, 1)
    atoms = padded.view(experts, row_atoms, 4, 32, block_atoms, 4)
    return atoms.permute(0, 1, 4, 3, 2, 5).contiguous()


def _unpack(raw, rows, blocks):
    experts, row_atoms, block_atoms = raw.shape[:3]
    padded = raw.permute(0, 1, 4, 3, 2, 5).reshape(experts, row_atoms * 128, block_atoms * 4)
    return padded[:, :rows, :blocks].permute(1, 2, 0)


def _physical_bytes(packed, physical_shape):
    raw = packed.view(torch.uint8)
    if tuple(raw.shape) == tuple(physical_shape[i] for i in _TO_VIEW):
        return physical_scales(raw)
    if tuple(raw.shape) == physical_shape:
        return raw
    size = torch.Size(physical_shape).numel()
    if raw.dim() == 1 and raw.numel() == size:
        return raw.view(physical_shape)
    raise ValueError(
        f"packed: expected the 6-D view of {physical_shape}, that physical shape, or {size} bytes, got {tuple(raw.shape)}"
    )


def _expert_parts(flat, columns, padded_offsets, sf_vec_size):
    """(bytes of the expert's tensor, first block, end block) of each expert with rows."""
    byte, start = 0, 0
    for offset in torch.as_tensor(padded_offsets).tolist():
        end = offset // sf_vec_size
        size = _ceil_div(columns, 128) * _ceil_div(end - start, 4) * 512
        if end > start:
            yield flat[byte : byte + size], start, end
        byte, start = byte + size, end
