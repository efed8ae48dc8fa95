"""The weight gradient of a grouped GEMM: the documented wrapper."""

import torch

from ..errors import meta_mixture, raise_verdict, translated_errors
from .arguments import check_constants, check_options, check_tensors
from .stream import launch_stream
from .tuple_dict import TupleDict

_TENSORS = ("a", "b", "sfa", "sfb")
_REQUIRED = ("a", "b", "padded_offsets")


def _name_of(argument):
    """The operator's argument name as the wrapper spells it."""
    if argument in _TENSORS:
        return f"{argument}_tensor"
    return {"padded_offsets": "offsets_tensor", "d_dtype": "wgrad_dtype"}.get(argument, argument)


def grouped_gemm_wgrad_wrapper_sm100(
    a_tensor=None,
    b_tensor=None,
    sfa_tensor=None,
    sfb_tensor=None,
    offsets_tensor=None,
    output_mode="dense",
    wgrad_tensor=None,
    wgrad_ptrs=None,
    global_scale_a=None,
    global_scale_b=None,
    acc_dtype=None,
    wgrad_dtype=None,
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    accumulate_on_output=False,
    input_order="tensor2d",
    current_stream=None,
    *,
    discrete_col_sfd=True,
):
    """Weight gradient of each expert, over its tokens [offsets[g-1], offsets[g]) (the document's equation):

        W[g] = global_scale_a[g] * global_scale_b[g] * A[:, tokens of g] @ B[tokens of g, :]

    FP32 sums, rounded once; A and B dequantised where block-scaled. An expert without tokens gives zeros. With
    accumulate_on_output the old value of W[g] is added before that rounding.

    Inputs (T tokens of all experts, a multiple of 256; L experts; V = sf_vec_size):
        a_tensor (m, T) and b_tensor (T, n) of one dtype: bfloat16, float8_e4m3fn, float8_e5m2, either dimension contiguous; or
        float4_e2m1fn_x2, uint8, packed along T (T/2 bytes), T contiguous.
        sfa_tensor, sfb_tensor: column scales of (m, T) and (n, T), one per V tokens: (32, 4, ceil(m/128), 4, ceil(T/V/4), 1), its
        flat buffer or that buffer as (ceil(m/128)*128, T/V). float8_e8m0fnu, or float8_e4m3fn with FP4 and V = 16. None for
        BF16. Each expert's are a tensor of their own (discrete_col_sfd, a keyword of this package; False: one over all tokens).
        offsets_tensor (L,) int32 cumulative ends, multiples of 256.
        global_scale_a, global_scale_b (L,) float32: both or neither; required for FP4 with float8_e4m3fn scales.
    Output: output_mode "dense": W is (L, m, n), into wgrad_tensor if given. "discrete": into wgrad_ptrs, a list of L tensors
        (m, n); without it as "dense". Contiguous, bfloat16, float16 or float32.
        wgrad_dtype: None is that of the given output, or bfloat16.
        accumulate_on_output adds onto the given output; a new one starts as zero.
    Options: FP8 operands need V = 32, BF16 the default 16. input_order: "tensor2d" ("tensor_ragged" is not available).
        acc_dtype (float32) has one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict with wgrad_tensor: (L, m, n), the given one or a new one; or the list given as wgrad_ptrs.

    Raises ValueError for a bad argument, NotImplementedError for "tensor_ragged" and for addresses in wgrad_ptrs,
    RuntimeError where no built engine serves the device; the text starts with the argument's name.
    """
    tensors = {
        "a": a_tensor,
        "b": b_tensor,
        "padded_offsets": offsets_tensor,
        "sfa": sfa_tensor,
        "sfb": sfb_tensor,
        "global_scale_a": global_scale_a,
        "global_scale_b": global_scale_b,
    }
    options = {"sf_vec_size": sf_vec_size, "discrete_col_sfd": discrete_col_sfd}
    check_constants({"acc_dtype": acc_dtype})
    check_options(
        {
            **options,
            "output_mode": output_mode,
            "wgrad_dtype": wgrad_dtype,
            "mma_tiler_mn": mma_tiler_mn,
            "cluster_shape_mn": cluster_shape_mn,
            "accumulate_on_output": accumulate_on_output,
            "input_order": input_order,
        }
    )
    _check_choices(output_mode, input_order, mma_tiler_mn, cluster_shape_mn)
    check_tensors(tensors, _REQUIRED, _name_of)
    if not isinstance(b_tensor, torch.Tensor):
        raise ValueError(f"b_tensor: expected a torch.Tensor, got {type(b_tensor).__name__}")
    _check_global_scales(tensors, sf_vec_size)
    name, destination, out = _destination(output_mode, wgrad_tensor, wgrad_ptrs, offsets_tensor, wgrad_dtype)
    tensors |= {"sfa": _flat_scales(sfa_tensor, a_tensor, 0), "sfb": _flat_scales(sfb_tensor, b_tensor, 1)}

    def name_of(argument):
        return name if argument == "out" else _name_of(argument)

    with launch_stream(current_stream, a_tensor.device) as record, translated_errors(name_of):
        if mixture := meta_mixture({**tensors, "out": out}):
            raise_verdict(("value", *mixture), name_of)
        if out is None:
            destination = torch.ops.cudnn_grouped.wgrad(**tensors, **options, d_dtype=wgrad_dtype)
        else:
            torch.ops.cudnn_grouped.wgrad_out(**tensors, **options, out=out, accumulate=accumulate_on_output)
        inputs = [tensor for tensor in (*tensors.values(), *(out or ())) if tensor is not None]
        record(inputs, [] if out is not None else [destination])
    return TupleDict({"wgrad_tensor": destination})


def _check_choices(output_mode, input_order, mma_tiler_mn, cluster_shape_mn):
    if output_mode not in ("dense", "discrete"):
        raise ValueError(f"output_mode: expected 'dense' or 'discrete', got {output_mode!r}")
    if input_order == "tensor_ragged":
        raise NotImplementedError(
            "input_order: expected 'tensor2d' ('tensor_ragged' is not available), got 'tensor_ragged'"
        )
    if input_order != "tensor2d":
        raise ValueError(f"input_order: expected 'tensor2d', got {input_order!r}")
    if not set(mma_tiler_mn) <= {128, 256}:
        raise ValueError(f"mma_tiler_mn: expected (128 or 256, 128 or 256), got {tuple(mma_tiler_mn)}")
    # A 256-row tile is two CTAs.
    ctas = mma_tiler_mn[0] // 128
    cluster = (ctas, 1) if cluster_shape_mn is None else tuple(cluster_shape_mn)
    if not set(cluster) <= {1, 2, 4} or cluster[0] % ctas:
        hint = ", the first one even with TILE_M = 256" if ctas == 2 else ""
        raise ValueError(f"cluster_shape_mn: expected two powers of two from 1 to 4{hint}, got {cluster}")


def _check_global_scales(tensors, sf_vec_size):
    sfa, scales = tensors["sfa"], {name: tensors[name] for name in ("global_scale_a", "global_scale_b")}
    missing = [name for name, scale in scales.items() if scale is None]
    if len(missing) == 1:
        raise ValueError(f"{missing[0]}: expected a tensor (the other global scale is given), got None")
    if missing and sf_vec_size == 16 and sfa is not None and sfa.dtype == torch.float8_e4m3fn:
        raise ValueError(f"{missing[0]}: expected a tensor (required with float8_e4m3fn scale factors), got None")


def _destination(output_mode, wgrad_tensor, wgrad_ptrs, padded_offsets, wgrad_dtype):
    """(argument name, what is returned, the tensors to write into); both None where a new tensor is to be made."""
    name = "wgrad_tensor" if wgrad_ptrs is None else "wgrad_ptrs"
    if wgrad_ptrs is None and wgrad_tensor is None:
        return name, None, None
    if wgrad_ptrs is not None and output_mode == "dense":
        raise ValueError("wgrad_ptrs: expected None with output_mode 'dense', got a value")
    if wgrad_ptrs is not None and wgrad_tensor is not None:
        raise ValueError("wgrad_tensor: expected None with wgrad_ptrs, got a tensor")
    if isinstance(wgrad_ptrs, torch.Tensor):
        raise NotImplementedError("wgrad_ptrs: expected a list of tensors, one per expert, got a tensor of addresses")
    if wgrad_tensor is not None:
        _check_stack(wgrad_tensor, padded_offsets)
        out = list(wgrad_tensor.unbind(0))
    else:
        out = _as_tensors(wgrad_ptrs)
    if out and wgrad_dtype not in (None, out[0].dtype):
        raise ValueError(f"wgrad_dtype: expected None or {out[0].dtype}, the dtype of {name}, got {wgrad_dtype}")
    return name, wgrad_ptrs if wgrad_tensor is None else wgrad_tensor, out


def _check_stack(wgrad, padded_offsets):
    check_tensors({"wgrad_tensor": wgrad}, (), str)
    experts = padded_offsets.shape[0] if padded_offsets.dim() else None
    if wgrad.dim() != 3 or wgrad.shape[0] != experts:
        raise ValueError(f"wgrad_tensor: expected shape (L, m, n) with L = {experts}, got shape {tuple(wgrad.shape)}")


def _as_tensors(wgrad_ptrs):
    if not isinstance(wgrad_ptrs, (list, tuple)):
        raise ValueError(f"wgrad_ptrs: expected a list of tensors, got {type(wgrad_ptrs).__name__}")
    tensors = {f"wgrad_ptrs[{index}]": tensor for index, tensor in enumerate(wgrad_ptrs)}
    check_tensors(tensors, tensors, str)
    return list(wgrad_ptrs)


def _flat_scales(scales, operand, row_axis):
    """The documents' 2-D form (rows in whole atoms, blocks of tokens) is the flat buffer by another shape."""
    if scales is None or scales.dim() != 2 or operand.dim() != 2 or not scales.is_contiguous():
        return scales
    rows = (operand.shape[row_axis] + 127) // 128 * 128
    return scales.view(-1) if scales.shape[0] == rows else scales
