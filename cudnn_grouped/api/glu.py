"""Grouped GEMM + GLU (SwiGLU, GeGLU, SiTU-GLU), the forward of dGLU: the documented wrapper and class."""

import torch

from .arguments import check_call, check_options
from .forward import ForwardOperation, is_bf16, named, run_forward
from .operation import _call

_REQUIRED = ("a", "padded_offsets", "alpha")


def _required(a):
    """The BF16 contract needs prob; for block-scaled operands None is 1."""
    return (*_REQUIRED, "prob") if is_bf16(a) else _REQUIRED


def _float_prob(tensors):
    """Block-scaled operands may come with a bfloat16 prob."""
    prob = tensors["prob"]
    if is_bf16(prob) and not is_bf16(tensors["a"]):
        return {**tensors, "prob": prob.to(torch.float32)}
    return tensors


def _run(operator, tensors, options):
    return _call(operator, _float_prob(tensors), options)


def grouped_gemm_glu_wrapper_sm100(
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
    act_func="swiglu",
    linear_offset=None,
    geglu_alpha=1.702,
    glu_clamp_max=7.0,
    glu_clamp_min=-7.0,
    situ_beta1=4.0,
    situ_beta2=25.0,
    use_dynamic_sched=False,
    use_single_group_runtime_offsets=False,
    current_stream=None,
    generate_c=False,
):
    """Grouped GEMM (BF16 or block-scaled) with the epilogue of a gated linear unit.

    N counts gate and up together: 32-column blocks, even ones the gate and odd ones the up branch; D has N/2 columns. For the
    rows m of expert g, with s the sigmoid (the document's equations; the backward is ``grouped_gemm_dglu_wrapper_sm100``):

        X = alpha[g] * A @ B[g].T + bias[:, g] (A and B dequantised where block-scaled);  C = X in c_dtype;  gate, up = X
        swiglu     D = prob * gate*s(gate) * up
        geglu      D = prob * gc*s(geglu_alpha*gc) * (uc + linear_offset),  gc = min(gate, max), uc = clamp(up, min, max)
        situglu    D = prob * b1*tanh(gate/b1)*s(gate) * b2*tanh(up/b2)

    D is computed from X, not from the rounded C.

    Inputs (M rows of all experts, K reduction, L experts, V = sf_vec_size; a trailing 1 may be left out):
        a_tensor (M, K, 1), k-major: bfloat16; or float4_e2m1fn_x2, uint8 (packed, K/2 bytes), float8_e4m3fn, float8_e5m2.
        b_tensor (N, K, L) or a list of L tensors (N, K), N a multiple of 64: as A; k-major, for BF16 and FP8 also n-major. Or:
        b_ptrs (L,) int64 addresses of the experts' weights, with n=N, b_dtype and b_major "k" or "n" (BF16, FP8).
        sfa_tensor (32, 4, ceil(M/128), 4, ceil(ceil(K/V)/4), 1): float8_e8m0fnu, or float8_e4m3fn with V = 16; None for BF16.
        sfb_tensor (32, 4, ceil(N/128), 4, ceil(ceil(K/V)/4), L), a list, or sfb_ptrs (L,) int64 beside b_ptrs.
        None with BF16 weights, which may stand beside a block-scaled A too: dequantize_weights.
        padded_offsets (L,) int32 cumulative ends, multiples of 256. alpha_tensor (L,) float32.
        bias_tensor (N, L) with strides (1, N), optional: float32, float16, bfloat16.
        prob_tensor (M, 1, 1) float32: required with BF16 operands; otherwise also bfloat16, or None for 1.
        norm_const_tensor (1,) float32: required with FP8 D, otherwise ignored (an error with BF16 operands).
    Options: FP8 operands need V = 32, BF16 the default 16.
        c_dtype: bfloat16 (default), float16, float32; or FP8 with block-scaled operands.
        d_dtype: bfloat16 (default), float16, float32; or FP8 for FP8 operands.
        act_func: "swiglu", "geglu" or "situglu". linear_offset: None is 1.0 for geglu.
        generate_c: whether BF16 operands give C; block-scaled ones always do.
        use_single_group_runtime_offsets: one expert, whose end is M (block-scaled operands).
        acc_dtype (float32), cd_major ("n") and m_aligned (256) have one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict, in order:
        c_tensor (M, N, 1) in c_dtype, None with BF16 operands unless generate_c. d_tensor (M, N/2, 1) in d_dtype.
        Rows past padded_offsets[-1] are zero in every output.
        d_col_tensor: FP8 D quantised along m, otherwise None.
        amax_tensor (L, 1) float32, max |D| per expert, -inf without rows; None unless the operands are block-scaled and D is
        bfloat16 or float16.
        sfd_row_tensor (32, 4, ceil(M/128), 4, ceil(ceil(N/2/32)/4), 1) and
        sfd_col_tensor (32, 4, ceil(N/2/128), 4, ceil(ceil(M/32)/4), 1) in SFA's dtype; None unless D is FP8.
    Where C is given, it and a D that is not FP8 are differentiable in prob and bias, with BF16 operands also in A and B.

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
        "act_func": act_func,
        "linear_offset": linear_offset,
        "geglu_alpha": geglu_alpha,
        "glu_clamp_max": glu_clamp_max,
        "glu_clamp_min": glu_clamp_min,
        "situ_beta1": situ_beta1,
        "situ_beta2": situ_beta2,
        "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
        "generate_c": generate_c,
    }
    constants = {"acc_dtype": acc_dtype, "cd_major": cd_major, "m_aligned": m_aligned}
    check_call(tensors, _required(a_tensor), options, constants)
    options["generate_c"] = generate_c or not is_bf16(a_tensor)
    return named(run_forward("glu", tensors, options, current_stream, _run))


class GroupedGemmGluSm100(ForwardOperation):
    """Grouped GEMM + GLU into caller-owned outputs; see ``grouped_gemm_glu_wrapper_sm100`` for the mathematics.

    The samples have the shapes and dtypes of the tensors that ``execute`` will get (M may differ); meta tensors will do.
    Weights: sample_b and sample_sfb (dense), or num_experts, b_shape=(N, K) and b_dtype (discrete); both or neither is a
    ValueError. For packed FP4, K of b_shape may be the logical or the visible (packed) one.

    C, D, D_col and the scale factors are overwritten; D_col is needed with FP8 D, and a copy of another D. C may be left out
    with BF16 operands, unless generate_c. amax (L, 1) float32 takes the maximum with what it holds: the caller sets it to
    -inf. It may go with any D dtype of block-scaled operands. BF16 operands take no D_col, amax and scale factors.
    The activation's constants are given to ``execute``.
    """

    operator = "glu"

    def __init__(
        self,
        sample_a=None,
        sample_c=None,
        sample_d=None,
        sample_sfa=None,
        sample_padded_offsets=None,
        sample_alpha=None,
        sample_d_col=None,
        sample_b=None,
        sample_sfb=None,
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
        act_func="swiglu",
        situ_beta1=4.0,
        b_major="k",
        use_dynamic_sched=False,
        use_single_group_runtime_offsets=False,
        generate_c=False,
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
            "act_func": act_func,
            "situ_beta1": situ_beta1,
            "use_single_group_runtime_offsets": use_single_group_runtime_offsets,
            "generate_c": generate_c,
        }
        constants = {"acc_dtype": acc_dtype, "m_aligned": m_aligned}
        self.required = _required(sample_a)
        self.outputs = ("d",) if is_bf16(sample_a) and generate_c is False else ("c", "d")
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
        linear_offset=None,
        geglu_alpha=1.702,
        glu_clamp_max=7.0,
        glu_clamp_min=-7.0,
        situ_beta1=None,
        situ_beta2=25.0,
        current_stream=None,
    ):
        """Run into the given outputs; situ_beta1=None is the constructor's.

        RuntimeError before ``compile()``; ValueError if a tensor is not as compiled.
        """
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
        options = {
            "linear_offset": linear_offset,
            "geglu_alpha": geglu_alpha,
            "glu_clamp_max": glu_clamp_max,
            "glu_clamp_min": glu_clamp_min,
            "situ_beta1": self._options["situ_beta1"] if situ_beta1 is None else situ_beta1,
            "situ_beta2": situ_beta2,
        }
        check_options(options)
        self._execute(tensors, current_stream, options)

    def _resolve(self, options):
        return {name: value for name, value in options.items() if name != "generate_c"}

    def _operands(self, tensors, name_of):
        return super()._operands(_float_prob(tensors), name_of)
