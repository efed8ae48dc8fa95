"""Grouped GEMM + dsReLU: the documented wrapper and class."""

import torch

from .. import library
from ..errors import translated_errors
from .arguments import check_options, check_tensors
from .operation import GroupedGemmOperation, run_wrapper
from .stream import launch_stream

REQUIRED = ("a", "c", "padded_offsets", "alpha", "prob")
_BLOCK_ROWS = 128  # rows per dbias workspace slot


def grouped_gemm_dsrelu_wrapper_sm100(
    a_tensor=None,
    b_tensor=None,
    c_tensor=None,
    sfa_tensor=None,
    sfb_tensor=None,
    padded_offsets=None,
    alpha_tensor=None,
    prob_tensor=None,
    dprob_tensor=None,
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
    use_dynamic_sched=False,
    deterministic=None,
    tanh_clamp_scale=None,
    current_stream=None,
    *,
    c_role="grad_output",
):
    """Grouped GEMM with the squared-ReLU backward epilogue.

    For the rows m of expert g, G = alpha[g] * dequantize(A) @ dequantize(B[g]).T, and

        c_role="grad_output" (the document's equations)   D = prob * 2 * C * relu(G)    dprob = sum_n C * relu(G)^2
        c_role="preactivation" (C is the saved input)      D = prob * 2 * relu(C) * G    dprob = sum_n relu(C)^2 * G

    With ``tanh_clamp_scale=s`` (finite, > 0) relu(x) becomes s*t, t = tanh(relu(x)/s), and D gains the factor 1 - t^2.

    Inputs (M rows of all experts, K reduction, N columns, L experts, V = sf_vec_size; a trailing 1 may be left out):
        a_tensor (M, K, 1), k-major: bfloat16; or float4_e2m1fn_x2, uint8 (packed, K/2 bytes), float8_e4m3fn, float8_e5m2.
        b_tensor (N, K, L) or a list of L tensors (N, K): as A; k-major, for FP8 also n-major. Or, discrete:
        b_ptrs (L,) int64 addresses of the experts' weights, with n=N, b_dtype and b_major "k" or "n" (FP8).
        c_tensor (M, N, 1), n-major: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.
        sfa_tensor (32, 4, ceil(M/128), 4, ceil(ceil(K/V)/4), 1): float8_e8m0fnu, or float8_e4m3fn with V = 16.
        sfb_tensor (32, 4, ceil(N/128), 4, ceil(ceil(K/V)/4), L), a list, or sfb_ptrs (L,) int64 beside b_ptrs.
        None with BF16 weights, which may stand beside a block-scaled A too: dequantize_weights.
        padded_offsets (L,) int32 cumulative ends, multiples of 256. alpha_tensor (L,) and prob_tensor (M, 1, 1) float32.
        norm_const_tensor (1,) float32: required with FP8 D, None with BF16 operands, otherwise ignored.
        dprob_tensor (M, 1, 1) float32: accumulated onto and returned; a zeroed one is made when None.
    Options: FP8 operands need V = 32. d_dtype: bfloat16 (default), float16, float32, or FP8 for FP8 operands.
        deterministic: bit-equal dprob and dbias from run to run; None follows torch.use_deterministic_algorithms.
        acc_dtype (float32), cd_major ("n") and m_aligned (256) have one legal value.
        current_stream: None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream.

    Returns a TupleDict, in order:
        d_row_tensor (M, N, 1) in d_dtype. Rows past padded_offsets[-1] are zero in every output.
        d_col_tensor: FP8 D quantised along m; otherwise the same tensor as d_row_tensor, None with BF16 operands.
        dprob_tensor (M, 1, 1) float32. dbias_tensor (L, N, 1) bfloat16, None unless generate_dbias.
        amax_tensor (L, 1) float32, max |D| per expert, -inf without rows; None unless D is bfloat16 or float16 of
        block-scaled operands.
        sfd_row_tensor (32, 4, ceil(M/128), 4, ceil(ceil(N/32)/4), 1) and
        sfd_col_tensor (32, 4, ceil(N/128), 4, ceil(ceil(M/32)/4), 1) in SFA's dtype; None unless D is FP8.

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
        "c_role": c_role,
        "tanh_clamp_scale": tanh_clamp_scale,
    }
    constants = {"acc_dtype": acc_dtype, "cd_major": cd_major, "m_aligned": m_aligned}
    return run_wrapper("dsrelu", tensors, REQUIRED, options, constants, dprob_tensor, current_stream)


class GroupedGemmDsreluSm100(GroupedGemmOperation):
    """Grouped GEMM + dsReLU into caller-owned outputs; see ``grouped_gemm_dsrelu_wrapper_sm100`` for the mathematics.

    The samples have the shapes and dtypes of the tensors that ``execute`` will get (M may differ); meta tensors will do.
    Weights: sample_b and sample_sfb (dense), or num_experts, b_shape=(N, K) and b_dtype (discrete); both or neither is a
    ValueError. For packed FP4, K of b_shape may be the logical or the visible (packed) one.

    D, D_col and the scale factors are overwritten. dprob (M, 1, 1) float32, dbias (L, N, 1) bfloat16 and amax (L, 1)
    float32 are accumulated onto (sum, sum, max): the caller sets them to 0, 0 and -inf. amax may go with any D dtype.
    With deterministic=True the caller also gives dprob_workspace (``dprob_workspace_shape``, float32) and, with dbias,
    dbias_workspace (``dbias_workspace_shape``, bfloat16); ``execute`` then leaves dprob and dbias alone, and
    ``reduce_dprob_workspace`` and ``reduce_dbias_workspace`` complete them.
    """

    operator = "dsrelu"
    required = REQUIRED

    def __init__(
        self,
        sample_a=None,
        sample_b=None,
        sample_c=None,
        sample_d_row=None,
        sample_d_col=None,
        sample_sfa=None,
        sample_sfb=None,
        sample_padded_offsets=None,
        sample_alpha=None,
        sample_prob=None,
        sample_dprob=None,
        sample_dbias=None,
        sample_dprob_workspace=None,
        sample_dbias_workspace=None,
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
        b_major="k",
        use_dynamic_sched=False,
        deterministic=False,
        tanh_clamp_scale=None,
        *,
        c_role="grad_output",
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
            "prob": sample_prob,
            "dprob": sample_dprob,
            "dbias": sample_dbias,
            "dprob_workspace": sample_dprob_workspace,
            "dbias_workspace": sample_dbias_workspace,
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
            "c_role": c_role,
            "tanh_clamp_scale": tanh_clamp_scale,
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
        prob_tensor,
        dprob_tensor,
        b_tensor=None,
        sfb_tensor=None,
        dbias_tensor=None,
        dprob_workspace_tensor=None,
        dbias_workspace_tensor=None,
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
            "dprob_workspace": dprob_workspace_tensor,
            "dbias_workspace": dbias_workspace_tensor,
        }
        self._execute(tensors, current_stream)

    def _check_samples(self):
        deterministic = self._resolve(self._options)["deterministic"]
        if deterministic and self._samples["dprob_workspace"] is None:
            raise ValueError("sample_dprob_workspace: expected a tensor (required with deterministic=True), got None")

    @staticmethod
    def dprob_workspace_shape(valid_m, n, mma_tiler_mn=(256, 256), cluster_shape_mn=None):
        """(valid_m, grid_n, 1), float32: a slot per row and N tile; grid_n = ceil(n / (TILE_N * cluster_n)) * cluster_n."""
        check_options({"mma_tiler_mn": mma_tiler_mn, "cluster_shape_mn": cluster_shape_mn})
        cluster_n = 1 if cluster_shape_mn is None else cluster_shape_mn[1]
        return (valid_m, library.C.grid_n(n, mma_tiler_mn[1], cluster_n), 1)

    @staticmethod
    def dbias_workspace_shape(valid_m, n, mma_tiler_mn=(256, 256)):
        """(ceil(valid_m / 128), n, 1), bfloat16: a slot per block of 128 rows and column, for either TILE_M."""
        return ((valid_m + _BLOCK_ROWS - 1) // _BLOCK_ROWS, n, 1)

    @staticmethod
    def reduce_dprob_workspace(ws, dprob=None, current_stream=None):
        """Sum the slots (M, grid_n, 1) in fixed order, add them onto ``dprob`` (M, 1, 1) (or zeros) and return that."""
        check_tensors({"ws": ws, "dprob": dprob}, ("ws",), str)
        with launch_stream(current_stream, ws.device) as record:
            total = ws.sum(dim=1, keepdim=True)
            result = total if dprob is None else dprob.add_(total.view(dprob.shape))
            record([ws], [result])
        return result

    @staticmethod
    def reduce_dbias_workspace(ws, padded_offsets, dbias=None, mma_tiler_mn=(256, 256), current_stream=None):
        """Sum each expert's slots (M/128, N, 1) in fixed order in FP32, add onto ``dbias`` (L, N, 1) (or zeros), return it."""
        tensors = {"ws": ws, "padded_offsets": padded_offsets, "dbias": dbias}
        check_tensors(tensors, ("ws", "padded_offsets"), str)
        names = {"slots": "ws"}
        with launch_stream(current_stream, ws.device) as record, translated_errors(lambda name: names.get(name, name)):
            if dbias is None:
                dbias = ws.new_zeros((padded_offsets.shape[0], ws.shape[1], 1), dtype=torch.bfloat16)
            torch.ops.cudnn_grouped.reduce_dbias(ws, padded_offsets, dbias)
            record([ws, padded_offsets], [dbias])
        return dbias
