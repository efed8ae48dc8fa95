"""The plain grouped GEMM: the documented wrappers for BF16 and for block-scaled operands."""

import torch

from ..errors import raise_verdict
from ..ops_forward import forward_outputs
from .arguments import as_list, call_name, check_call, check_options
from .forward import OUTPUTS, is_bf16, named, run_forward
from .operation import _call, _descriptions, _verdict


def grouped_gemm_wrapper_sm100(
    a_tensor=None,
    padded_offsets=None,
    alpha_tensor=None,
    b_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    prob_tensor=None,
    acc_dtype=None,
    c_dtype=None,
    d_dtype=None,
    c_tensor=None,
    d_tensor=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    vector_f32=False,
    m_aligned=256,
    generate_c=False,
    use_dynamic_sched=False,
    current_stream=None,
):
    """Grouped GEMM of BF16 operands. For the rows m of expert g (the document's equations):

        without bias    C = alpha[g] * A @ B[g].T                             D = prob * C
        with bias       C = D = alpha[g] * A @ B[g].T + prob * bias[:, g]     (A carries prob already)

    C and D are each rounded from the FP32 value.

    Inputs (M rows of all experts, K reduction, N columns, L experts; a trailing 1 may be left out):
        a_tensor (M, K, 1) bfloat16, k-major. padded_offsets (L,) int32 cumulative ends, multiples of 256.
        b_tensor (N, K, L) or a list of L tensors (N, K), bfloat16, k- or n-major. Or, discrete: b_ptrs (L,) int64 addresses
        of the experts' weights, with n=N, b_dtype and b_major "k" or "n".
        alpha_tensor (L,) and prob_tensor (M, 1, 1) float32.
        bias_tensor (N, L) with strides (1, N), optional: float32, float16, bfloat16.
        c_tensor, d_tensor (M, N, 1): written and returned instead of new ones; c_tensor goes with generate_c.
    Options: c_dtype, d_dtype: bfloat16, float16, float32; None is the dtype of c_tensor and d_tensor, or bfloat16.
        acc_dtype (float32), cd_major ("n") and m_aligned (256) have one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict, in order: d_tensor (M, N, 1); c_tensor (M, N, 1), None unless generate_c. Rows past
    padded_offsets[-1] are zero. Differentiable in A, B, prob and bias where neither c_tensor nor d_tensor is given.

    Raises ValueError for a bad argument, NotImplementedError for a combination that is not available, RuntimeError where
    no built engine serves the device; the text starts with the argument's name.
    """
    tensors = {
        "a": a_tensor,
        "b": b_tensor,
        "sfa": None,
        "sfb": None,
        "padded_offsets": padded_offsets,
        "alpha": alpha_tensor,
        "bias": bias_tensor,
        "b_ptrs": b_ptrs,
        "sfb_ptrs": None,
        "norm_const": None,
        "prob": prob_tensor,
    }
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": b_major,
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "generate_c": generate_c,
        "mma_tiler_mn": mma_tiler_mn,
        "cluster_shape_mn": cluster_shape_mn,
        "vector_f32": vector_f32,
        "use_dynamic_sched": use_dynamic_sched,
    }
    constants = {"acc_dtype": acc_dtype, "cd_major": cd_major, "m_aligned": m_aligned}
    given = {"c": c_tensor, "d": d_tensor}
    check_call({**tensors, **given}, ("a", "padded_offsets", "alpha", "prob"), options, constants)
    if not is_bf16(a_tensor):
        raise ValueError(
            f"a_tensor: expected dtype bfloat16, got {str(a_tensor.dtype).removeprefix('torch.')} "
            "(grouped_gemm_quant_wrapper_sm100 takes block-scaled operands)"
        )
    if c_tensor is not None and not generate_c:
        raise ValueError("c_tensor: expected None without generate_c, got a tensor")
    return named(_run(tensors, options, given, current_stream), ("d", "c"))


def grouped_gemm_quant_wrapper_sm100(
    a_tensor=None,
    sfa_tensor=None,
    padded_offsets=None,
    alpha_tensor=None,
    b_tensor=None,
    sfb_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    sfb_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    norm_const_tensor=None,
    prob_tensor=None,
    row_scale_tensor=None,
    acc_dtype=None,
    d_dtype=None,
    d_tensor=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    vector_f32=False,
    m_aligned=256,
    discrete_col_sfd=False,
    use_dynamic_sched=False,
    use_single_group_runtime_offsets=False,
    current_stream=None,
    generate_amax=True,
):
    """Grouped GEMM of block-scaled operands. For the rows m of expert g, with R = alpha[g] * dequantize(A) @ dequantize(B[g]).T:

        without bias    D = prob * R
        with bias       D = R + prob * bias[:, g]     (A carries prob already)

    Inputs (M rows of all experts, K reduction, N columns, L experts, V = sf_vec_size; a trailing 1 may be left out):
        a_tensor (M, K, 1), k-major: float4_e2m1fn_x2 or uint8 (packed, K/2 bytes), float8_e4m3fn, float8_e5m2.
        b_tensor (N, K, L) or a list of L tensors (N, K): as A; k-major, for FP8 also n-major. Or, discrete:
        b_ptrs (L,) int64 addresses of the experts' weights, with n=N, b_dtype and b_major "k" or "n" (FP8).
        sfa_tensor (32, 4, ceil(M/128), 4, ceil(ceil(K/V)/4), 1): float8_e8m0fnu, or float8_e4m3fn with V = 16.
        sfb_tensor (32, 4, ceil(N/128), 4, ceil(ceil(K/V)/4), L), a list, or sfb_ptrs (L,) int64 beside b_ptrs.
        None with BF16 weights, which may stand beside a block-scaled A too: dequantize_weights.
        padded_offsets (L,) int32 cumulative ends, multiples of 256. alpha_tensor (L,) float32.
        prob_tensor (M, 1, 1) float32, optional: 1. bias_tensor (N, L) with strides (1, N), optional: float32, float16, bfloat16.
        norm_const_tensor (1,) float32: required with FP8 D, otherwise ignored.
        d_tensor (M, N, 1): written and returned instead of a new one. row_scale_tensor: not available.
    Options: FP8 operands need V = 32.
        d_dtype: bfloat16, float16, float32, or FP8 for FP8 operands; None is the dtype of d_tensor, or bfloat16.
        use_single_group_runtime_offsets: one expert, whose end is M. generate_amax: False leaves amax out.
        acc_dtype (float32), cd_major ("n") and m_aligned (256) have one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict, in order:
        d_tensor (M, N, 1) in d_dtype. Rows past padded_offsets[-1] are zero in every output.
        d_col_tensor: FP8 D quantised along m, otherwise None.
        amax_tensor (L, 1) float32, max |D| per expert, -inf without rows; None unless D is bfloat16 or float16.
        sfd_row_tensor (32, 4, ceil(M/128), 4, ceil(ceil(N/32)/4), 1) and
        sfd_col_tensor (32, 4, ceil(N/128), 4, ceil(ceil(M/32)/4), 1) in SFA's dtype; None unless D is FP8.

    Raises ValueError for a bad argument, NotImplementedError for row_scale_tensor, RuntimeError where no built engine
    serves the device; the text starts with the argument's name.
    """
    tensors = {
        "a": a_tensor,
        "b": b_tensor,
        "sfa": sfa_tensor,
        "sfb": sfb_tensor,
        "padded_offsets": padded_offsets,
        "alpha": alpha_tensor,
        "bias": bias_tensor,
        "b_ptrs": b_ptrs,
        "sfb_ptrs": sfb_ptrs,
        "norm_const": norm_const_tensor,
        "prob": prob_tensor,
    }
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": b_major,
        "d_dtype": d_dtype,
        "sf_vec_size": sf_vec_size,
        "discrete_col_sfd": discrete_col_sfd,
        "mma_tiler_mn": mma_tiler_mn,
        "cluster_shape_mn": cluster_shape_mn,
        "vector_f32": vector_f32,
        "use_dynamic_sched": use_dynamic_sched,
    }
    constants = {"acc_dtype": acc_dtype, "cd_major": cd_major, "m_aligned": m_aligned}
    check_options(
        {"use_single_group_runtime_offsets": use_single_group_runtime_offsets, "generate_amax": generate_amax}
    )
    check_call({**tensors, "d": d_tensor}, ("a", "sfa", "padded_offsets", "alpha"), options, constants)
    if row_scale_tensor is not None:
        raise NotImplementedError("row_scale_tensor: expected None (not available), got a value")
    result = _run(tensors, options, {"d": d_tensor}, current_stream, use_single_group_runtime_offsets)
    if not generate_amax:
        result["amax"] = None
    return named(result, OUTPUTS[1:])


def _whole(padded_offsets, a):
    """The offsets of one expert that owns all rows."""
    if padded_offsets.shape != (1,):
        experts = padded_offsets.numel()
        raise ValueError(f"use_single_group_runtime_offsets: expected exactly one expert, got {experts}")
    return torch.full_like(padded_offsets, a.shape[0])


def _run(tensors, options, given, current_stream, single_group=False):
    """``run_forward``, into the tensors of given ({"c" or "d": tensor or None}) where there are any."""
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    for name, tensor in given.items():
        dtype = options[f"{name}_dtype"]
        if dtype not in (None, tensor.dtype):
            raise ValueError(f"{name}_dtype: expected None or {tensor.dtype}, that of {name}_tensor, got {dtype}")
        options = {**options, f"{name}_dtype": tensor.dtype}

    def run(operator, tensors, options):
        if single_group:
            tensors = {**tensors, "padded_offsets": _whole(tensors["padded_offsets"], tensors["a"])}
        return _into(operator, tensors, options, given) if given else _call(operator, tensors, options)

    return run_forward("mm", tensors, options, current_stream, run, given.values())


def _into(operator, tensors, options, given):
    """The functional operator's outputs, those of given written in place."""
    if not torch.compiler.is_compiling():  # before anything is allocated
        raise_verdict(_verdict(operator, _descriptions(tensors, tensors["a"].device), options), call_name)
    results = {name: options.get(name) for name in ("c_dtype", "d_dtype", "generate_c")}
    made = forward_outputs(
        *(tensors["a"], as_list(tensors["b"]), tensors["padded_offsets"], tensors["sfa"], options["n"]),
        **results,
        width=1,
    )
    outputs = dict(zip(OUTPUTS, made, strict=True)) | given
    outputs["amax"].fill_(-torch.inf)
    present = {name: output for name, output in outputs.items() if output.dim() > 1}
    _call("mm_out", {**tensors, **present}, {name: x for name, x in options.items() if name not in results})
    return outputs.values()
