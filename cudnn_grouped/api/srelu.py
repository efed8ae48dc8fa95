"""Grouped GEMM + sReLU (squared ReLU), the forward of dsReLU: the documented wrapper and class."""

from .arguments import check_call
from .forward import ForwardOperation, named, run_forward

_REQUIRED = ("a", "padded_offsets", "alpha", "prob")


def grouped_gemm_srelu_wrapper_sm100(
    a_tensor=None,
    b_tensor=None,
    sfa_tensor=None,
    sfb_tensor=None,
    padded_offsets=None,
    alpha_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    sfb_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    norm_const_tensor=None,
    prob_tensor=None,
    acc_dtype=None,
    c_dtype=None,
    d_dtype=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    vector_f32=False,
    m_aligned=256,
    discrete_col_sfd=False,
    use_dynamic_sched=False,
    tanh_clamp_scale=None,
    current_stream=None,
):
    """Grouped GEMM (block-scaled or BF16) with the squared-ReLU epilogue.

    For the rows m of expert g (the document's equations; its backward is ``grouped_gemm_dsrelu_wrapper_sm100``):

        X = alpha[g] * dequantize(A) @ dequantize(B[g]).T + bias[:, g]
        C = X in c_dtype        D = prob * relu(X)^2

    D is computed from X, not from the rounded C. With ``tanh_clamp_scale=s`` (finite, > 0) relu(x) becomes
    s*tanh(relu(x)/s).

    Inputs (M rows of all experts, K reduction, N columns, L experts, V = sf_vec_size; a trailing 1 may be left out):
        a_tensor (M, K, 1), k-major: float4_e2m1fn_x2 or uint8 (packed, K/2 bytes), float8_e4m3fn, float8_e5m2; bfloat16.
        b_tensor (N, K, L) or a list of L tensors (N, K): as A; k-major, for FP8 and BF16 also n-major. Or, discrete:
        b_ptrs (L,) int64 addresses of the experts' weights, with n=N, b_dtype and b_major "k" or "n" (FP8, BF16).
        sfa_tensor (32, 4, ceil(M/128), 4, ceil(ceil(K/V)/4), 1): float8_e8m0fnu, or float8_e4m3fn with V = 16; None for BF16.
        sfb_tensor (32, 4, ceil(N/128), 4, ceil(ceil(K/V)/4), L), a list, or sfb_ptrs (L,) int64 beside b_ptrs.
        None with BF16 weights, which may stand beside a block-scaled A too: dequantize_weights.
        padded_offsets (L,) int32 cumulative ends, multiples of 256. alpha_tensor (L,) and prob_tensor (M, 1, 1) float32.
        bias_tensor (N, L) with strides (1, N), optional: float32, float16, bfloat16.
        norm_const_tensor (1,) float32: required with FP8 D, otherwise ignored (an error with BF16 operands).
    Options: FP8 operands need V = 32, BF16 the default 16.
        c_dtype: bfloat16 (default), float16, float32; or FP8 with block-scaled operands.
        d_dtype: bfloat16 (default), float16, float32; or FP8 for FP8 operands.
        acc_dtype (float32), cd_major ("n") and m_aligned (256) have one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict, in order:
        c_tensor (M, N, 1) in c_dtype, d_tensor (M, N, 1) in d_dtype. Rows past padded_offsets[-1] are zero in every output.
        d_col_tensor: FP8 D quantised along m, otherwise None.
        amax_tensor (L, 1) float32, max |D| per expert, -inf without rows; None unless the operands are block-scaled and D is
        bfloat16 or float16.
        sfd_row_tensor (32, 4, ceil(M/128), 4, ceil(ceil(N/32)/4), 1) and
        sfd_col_tensor (32, 4, ceil(N/128), 4, ceil(ceil(M/32)/4), 1) in SFA's dtype; None unless D is FP8.
    C and a D that is not FP8 are differentiable in prob and bias, with BF16 operands also in A and B.

    Raises ValueError for a bad argument, NotImplementedError for a combination that is not available, RuntimeError where
    no built engine serves the device; the text starts with the argument's name.
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
        "c_dtype": c_dtype,
        "d_dtype": d_dtype,
        "sf_vec_size": sf_vec_size,
        "discrete_col_sfd": discrete_col_sfd,
        "mma_tiler_mn": mma_tiler_mn,
        "cluster_shape_mn": cluster_shape_mn,
        "vector_f32": vector_f32,
        "use_dynamic_sched": use_dynamic_sched,
        "tanh_clamp_scale": tanh_clamp_scale,
    }
    check_call(tensors, _REQUIRED, options, {"acc_dtype": acc_dtype, "cd_major": cd_major, "m_aligned": m_aligned})
    return named(run_forward("srelu", tensors, options, current_stream))


class GroupedGemmSreluSm100(ForwardOperation):
    """Grouped GEMM + sReLU into caller-owned outputs; see ``grouped_gemm_srelu_wrapper_sm100`` for the mathematics.

    The samples have the shapes and dtypes of the tensors that ``execute`` will get (M may differ); meta tensors will do.
    Weights: sample_b and sample_sfb (dense), or num_experts, b_shape=(N, K) and b_dtype (discrete); both or neither is a
    ValueError. For packed FP4, K of b_shape may be the logical or the visible (packed) one.

    C, D, D_col and the scale factors are overwritten; D_col is needed with FP8 D, and a copy of another D. amax (L, 1)
    float32 takes the maximum with what it holds: the caller sets it to -inf. It may go with any D dtype of block-scaled
    operands. BF16 operands take no D_col, amax and scale factors.
    """

    operator = "srelu"
    required = _REQUIRED

    def __init__(
        self,
        sample_a=None,
        sample_b=None,
        sample_c=None,
        sample_d=None,
        sample_sfa=None,
        sample_sfb=None,
        sample_padded_offsets=None,
        sample_alpha=None,
        sample_d_col=None,
        sample_bias=None,
        num_experts=None,
        b_shape=None,
        b_dtype=None,
        sample_sfd_row=None,
        sample_sfd_col=None,
        sample_amax=None,
        sample_norm_const=None,
        sample_prob=None,
        acc_dtype=None,
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=None,
        sf_vec_size=16,
        vector_f32=False,
        m_aligned=256,
        discrete_col_sfd=False,
        b_major="k",
        use_dynamic_sched=False,
        tanh_clamp_scale=None,
    ):
        samples = {
            "a": sample_a,
            "b": sample_b,
            "c": sample_c,
            "d": sample_d,
            "sfa": sample_sfa,
            "sfb": sample_sfb,
            "padded_offsets": sample_padded_offsets,
            "alpha": sample_alpha,
            "d_col": sample_d_col,
            "bias": sample_bias,
            "sfd_row": sample_sfd_row,
            "sfd_col": sample_sfd_col,
            "amax": sample_amax,
            "norm_const": sample_norm_const,
            "prob": sample_prob,
        }
        options = {
            "b_major": b_major,
            "sf_vec_size": sf_vec_size,
            "discrete_col_sfd": discrete_col_sfd,
            "mma_tiler_mn": mma_tiler_mn,
            "cluster_shape_mn": cluster_shape_mn,
            "vector_f32": vector_f32,
            "use_dynamic_sched": use_dynamic_sched,
            "tanh_clamp_scale": tanh_clamp_scale,
        }
        constants = {"acc_dtype": acc_dtype, "m_aligned": m_aligned}
        super().__init__(samples, options, constants, num_experts=num_experts, b_shape=b_shape, b_dtype=b_dtype)

    def execute(
        self,
        a_tensor,
        c_tensor,
        d_tensor,
        sfa_tensor,
        padded_offsets,
        alpha_tensor,
        b_tensor=None,
        sfb_tensor=None,
        bias_tensor=None,
        b_ptrs=None,
        sfb_ptrs=None,
        d_col_tensor=None,
        sfd_row_tensor=None,
        sfd_col_tensor=None,
        amax_tensor=None,
        norm_const_tensor=None,
        prob_tensor=None,
        current_stream=None,
    ):
        """Run into the given outputs. RuntimeError before ``compile()``; ValueError if a tensor is not as compiled."""
        tensors = {
            "a": a_tensor,
            "b": b_tensor,
            "c": c_tensor,
            "d": d_tensor,
            "sfa": sfa_tensor,
            "sfb": sfb_tensor,
            "padded_offsets": padded_offsets,
            "alpha": alpha_tensor,
            "bias": bias_tensor,
            "b_ptrs": b_ptrs,
            "sfb_ptrs": sfb_ptrs,
            "d_col": d_col_tensor,
            "sfd_row": sfd_row_tensor,
            "sfd_col": sfd_col_tensor,
            "amax": amax_tensor,
            "norm_const": norm_const_tensor,
            "prob": prob_tensor,
        }
        self._execute(tensors, current_stream)
