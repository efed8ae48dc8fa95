"""Grouped GEMM + dGLU (dSwiGLU, dGeGLU, dSiTU-GLU): the documented wrapper and class."""

import functools
import warnings

from .operation import GroupedGemmOperation, run_wrapper

REQUIRED = ("a", "c", "padded_offsets", "alpha", "beta", "prob")


@functools.cache
def _warn_value_filter():
    warnings.warn(
        "dGeGLU on BF16 operands multiplies by the raw gate and input values inside the clamp, as the API document says; "
        'that is not the derivative of GeGLU. Pass clamp_grad="mask" for the derivative, or "value" to keep this silent.',
        stacklevel=4,
    )


def resolve_clamp_grad(options, a):
    """None is the document's filter: "value" for dGeGLU on BF16 operands (warned about once), "mask" everywhere else."""
    if options["clamp_grad"] is not None:
        return options
    value = options["act_func"] == "dgeglu" and str(getattr(a, "dtype", "")).endswith("bfloat16")
    if value:
        _warn_value_filter()
    return {**options, "clamp_grad": "value" if value else "mask"}


def grouped_gemm_dglu_wrapper_sm100(
    a_tensor=None,
    c_tensor=None,
    sfa_tensor=None,
    padded_offsets=None,
    alpha_tensor=None,
    beta_tensor=None,
    prob_tensor=None,
    dprob_tensor=None,
    b_tensor=None,
    sfb_tensor=None,
    generate_dbias=False,
    b_ptrs=None,
    sfb_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    norm_const_tensor=None,
    acc_dtype=None,
    d_dtype=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    vector_f32=False,
    m_aligned=256,
    discrete_col_sfd=False,
    act_func="dswiglu",
    linear_offset=None,
    geglu_alpha=1.702,
    glu_clamp_max=7.0,
    glu_clamp_min=-7.0,
    situ_beta1=4.0,
    situ_beta2=25.0,
    epilogue_op=None,
    use_dynamic_sched=False,
    use_single_group_runtime_offsets=False,
    current_stream=None,
    deterministic=None,
    *,
    clamp_grad=None,
):
    """Grouped GEMM (BF16 or block-scaled) with the backward epilogue of a gated linear unit.

    For the rows m of expert g, R = alpha[g]^2 * A @ B[g].T (dequantised where block-scaled). C holds 32-column blocks,
    even ones the gate and odd ones the up branch; D holds dgate and dup the same way. With s the sigmoid:

        dswiglu    X = beta[g] * C;  dgate = R*prob*up*s(gate)*(1 + gate*(1 - s(gate)));  dup = R*prob*gate*s(gate)
                   dprob = sum R*up*gate*s(gate)
        dgeglu     X = beta[g] * C for BF16 operands, otherwise C
                   gc = min(gate, max), uc = clamp(up, min, max), s = s(geglu_alpha*gc)
                   dgate = R*prob*(uc + linear_offset)*s*(1 + geglu_alpha*gc*(1 - s)) where gate <= max, else 0
                   dup = R*prob*gc*s where min <= up <= max, else 0;  dprob = sum R*gc*s*(uc + linear_offset)
        dsituglu   X = beta[g] * C;  Tg = b1*tanh(gate/b1)*s(gate), Tu = b2*tanh(up/b2)
                   dgate = R*prob*Tu*dTg/dgate;  dup = R*prob*Tg*dTu/dup;  dprob = sum R*Tg*Tu

    clamp_grad: what dgeglu multiplies by inside the clamp: "mask" 1 (the derivative), "value" the raw gate or up value (BF16
    operands only). None: "value" for BF16 operands, as the document defines it (warned about once), otherwise "mask".

    Inputs (M rows of all experts, K reduction, N compact width, L experts, V = sf_vec_size; a trailing 1 may be left out):
        a_tensor (M, K, 1), k-major: bfloat16; or float4_e2m1fn_x2, uint8 (packed, K/2 bytes), float8_e4m3fn, float8_e5m2.
        b_tensor (N, K, L) or a list of L tensors (N, K): as A; k-major, for BF16 and FP8 also n-major. Or, discrete:
        b_ptrs (L,) int64 addresses of the experts' weights, with n=N, b_dtype and b_major "k" or "n" (BF16, FP8).
        c_tensor (M, 2N, 1), n-major: float32, float16, bfloat16; float8_e4m3fn, float8_e5m2 with block-scaled operands.
        sfa_tensor (32, 4, ceil(M/128), 4, ceil(ceil(K/V)/4), 1): float8_e8m0fnu, or float8_e4m3fn with V = 16; None for BF16.
        sfb_tensor (32, 4, ceil(N/128), 4, ceil(ceil(K/V)/4), L), a list, or sfb_ptrs (L,) int64 beside b_ptrs.
        None with BF16 weights, which may stand beside a block-scaled A too: dequantize_weights.
        padded_offsets (L,) int32 cumulative ends, multiples of 256. alpha_tensor, beta_tensor (L,) float32.
        prob_tensor (M, 1, 1) float32. norm_const_tensor (1,) float32: required with FP8 D.
        dprob_tensor (M, 1, 1) float32: accumulated onto and returned; a zeroed one is made when None.
    Options: FP8 operands need V = 32, BF16 the default 16.
        d_dtype: bfloat16 (default), float16, float32, or FP8 for FP8 operands.
        linear_offset: None is 1.0 for dgeglu. epilogue_op: None, "identity", "relu", "srelu", on the FP32 values of D.
        use_single_group_runtime_offsets: one expert, whose end is M.
        deterministic: bit-equal dprob and dbias from run to run; None follows torch.use_deterministic_algorithms.
        acc_dtype (float32), cd_major ("n") and m_aligned (256) have one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict, in order:
        d_row_tensor (M, 2N, 1) in d_dtype. Rows past padded_offsets[-1] are zero in every output.
        d_col_tensor: FP8 D quantised along m; None for BF16 operands; otherwise the same tensor as d_row_tensor.
        dprob_tensor (M, 1, 1) float32. dbias_tensor (L, 2N, 1) bfloat16, None unless generate_dbias.
        amax_tensor (L, 2, 1) float32, max |dgate| and |dup| per expert, -inf without rows; None unless the operands are
        block-scaled and D is bfloat16 or float16.
        sfd_row_tensor (32, 4, ceil(M/128), 4, ceil(ceil(2N/32)/4), 1) and
        sfd_col_tensor (32, 4, ceil(2N/128), 4, ceil(ceil(M/32)/4), 1) in SFA's dtype; None unless D is FP8.

    Raises ValueError for a bad argument, NotImplementedError for a combination that is not available, RuntimeError where
    no built engine serves the device; the text starts with the argument's name.
    """
    tensors = {
        "a": a_tensor,
        "b": b_tensor,
        "c": c_tensor,
        "sfa": sfa_tensor,
        "sfb": sfb_tensor,
        "padded_offsets": padded_offsets,
        "alpha": alpha_tensor,
        "beta": beta_tensor,
        "prob": prob_tensor,
        "norm_const": norm_const_tensor,
        "b_ptrs": b_ptrs,
        "sfb_ptrs": sfb_ptrs,
    }
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": b_major,
        "d_dtype": d_dtype,
        "generate_dbias": generate_dbias,
        "sf_vec_size": sf_vec_size,
        "discrete_col_sfd": discrete_col_sfd,
        "deterministic": deterministic,
        "mma_tiler_mn": mma_tiler_mn,
        "cluster_shape_mn": cluster_shape_mn,
        "vector_f32": vector_f32,
        "use_dynamic_sched": use_dynamic_sched,
        "act_func": act_func,
        "linear_offset": linear_offset,
        "geglu_alpha": geglu_alpha,
        "glu_clamp_max": glu_clamp_max,
        "glu_clamp_min": glu_clamp_min,
        "clamp_grad": clamp_grad,
        "situ_beta1": situ_beta1,
        "situ_beta2": situ_beta2,
        "epilogue_op": epilogue_op,
        "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
    }
    options = resolve_clamp_grad(options, a_tensor)
    constants = {"acc_dtype": acc_dtype, "cd_major": cd_major, "m_aligned": m_aligned}
    return run_wrapper("dglu", tensors, REQUIRED, options, constants, dprob_tensor, current_stream)


class GroupedGemmDgluSm100(GroupedGemmOperation):
    """Grouped GEMM + dGLU into caller-owned outputs; see ``grouped_gemm_dglu_wrapper_sm100`` for the mathematics.

    The samples have the shapes and dtypes of the tensors that ``execute`` will get (M may differ); meta tensors will do.
    Weights: sample_b and sample_sfb (dense), or num_experts, b_shape=(N, K) and b_dtype (discrete); both or neither is a
    ValueError. For packed FP4, K of b_shape may be the logical or the visible (packed) one.

    D, D_col and the scale factors are overwritten. dprob (M, 1, 1) float32, dbias (L, 2N, 1) bfloat16 and amax (L, 2, 1)
    float32 are accumulated onto (sum, sum, max): the caller sets them to 0, 0 and -inf. amax may go with any D dtype of
    block-scaled operands. dbias is made only if sample_dbias was given; BF16 operands take no D_col, amax and scale factors.
    """

    operator = "dglu"
    required = REQUIRED

    def __init__(
        self,
        sample_a=None,
        sample_c=None,
        sample_d_row=None,
        sample_d_col=None,
        sample_sfa=None,
        sample_padded_offsets=None,
        sample_alpha=None,
        sample_beta=None,
        sample_prob=None,
        sample_dprob=None,
        sample_b=None,
        sample_sfb=None,
        sample_dbias=None,
        num_experts=None,
        b_shape=None,
        b_dtype=None,
        sample_sfd_row=None,
        sample_sfd_col=None,
        sample_amax=None,
        sample_norm_const=None,
        acc_dtype=None,
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=None,
        sf_vec_size=16,
        vector_f32=False,
        m_aligned=256,
        discrete_col_sfd=False,
        act_func="dswiglu",
        b_major="k",
        epilogue_op=None,
        use_dynamic_sched=False,
        use_single_group_runtime_offsets=False,
        linear_offset=None,
        geglu_alpha=1.702,
        glu_clamp_max=7.0,
        glu_clamp_min=-7.0,
        situ_beta1=4.0,
        situ_beta2=25.0,
        deterministic=False,
        *,
        clamp_grad=None,
    ):
        samples = {
            "a": sample_a,
            "b": sample_b,
            "c": sample_c,
            "d_row": sample_d_row,
            "d_col": sample_d_col,
            "sfa": sample_sfa,
            "sfb": sample_sfb,
            "padded_offsets": sample_padded_offsets,
            "alpha": sample_alpha,
            "beta": sample_beta,
            "prob": sample_prob,
            "dprob": sample_dprob,
            "dbias": sample_dbias,
            "sfd_row": sample_sfd_row,
            "sfd_col": sample_sfd_col,
            "amax": sample_amax,
            "norm_const": sample_norm_const,
        }
        options = {
            "b_major": b_major,
            "sf_vec_size": sf_vec_size,
            "discrete_col_sfd": discrete_col_sfd,
            "deterministic": deterministic,
            "mma_tiler_mn": mma_tiler_mn,
            "cluster_shape_mn": cluster_shape_mn,
            "vector_f32": vector_f32,
            "use_dynamic_sched": use_dynamic_sched,
            "act_func": act_func,
            "linear_offset": linear_offset,
            "geglu_alpha": geglu_alpha,
            "glu_clamp_max": glu_clamp_max,
            "glu_clamp_min": glu_clamp_min,
            "clamp_grad": clamp_grad,
            "situ_beta1": situ_beta1,
            "situ_beta2": situ_beta2,
            "epilogue_op": epilogue_op,
            "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
        }
        constants = {"acc_dtype": acc_dtype, "m_aligned": m_aligned}
        super().__init__(samples, options, constants, num_experts=num_experts, b_shape=b_shape, b_dtype=b_dtype)

    def execute(
        self,
        a_tensor,
        c_tensor,
        d_row_tensor,
        d_col_tensor,
        sfa_tensor,
        padded_offsets,
        alpha_tensor,
        beta_tensor,
        prob_tensor,
        dprob_tensor,
        b_tensor=None,
        sfb_tensor=None,
        dbias_tensor=None,
        b_ptrs=None,
        sfb_ptrs=None,
        sfd_row_tensor=None,
        sfd_col_tensor=None,
        amax_tensor=None,
        norm_const_tensor=None,
        current_stream=None,
    ):
        """Run into the given outputs. RuntimeError before ``compile()``; ValueError if a tensor is not as compiled."""
        tensors = {
            "a": a_tensor,
            "b": b_tensor,
            "c": c_tensor,
            "sfa": sfa_tensor,
            "sfb": sfb_tensor,
            "padded_offsets": padded_offsets,
            "alpha": alpha_tensor,
            "beta": beta_tensor,
            "prob": prob_tensor,
            "norm_const": norm_const_tensor,
            "b_ptrs": b_ptrs,
            "sfb_ptrs": sfb_ptrs,
            "d_row": d_row_tensor,
            "d_col": d_col_tensor,
            "dprob": dprob_tensor,
            "dbias": dbias_tensor,
            "amax": amax_tensor,
            "sfd_row": sfd_row_tensor,
            "sfd_col": sfd_col_tensor,
        }
        self._execute(tensors, current_stream)

    def _resolve(self, options):
        return super()._resolve(resolve_clamp_grad(options, self._samples["a"]))
