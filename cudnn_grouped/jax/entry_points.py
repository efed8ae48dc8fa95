"""The documents' entry points on JAX arrays: the wrappers' JAX branch and ``grouped_gemm_*_jax_sm100`` for ``jax.jit``."""

import jax
import jax.numpy as jnp

from ..api.arguments import call_name, check_constants, check_weights
from ..api.dglu import REQUIRED as DGLU_REQUIRED
from ..api.dglu import resolve_clamp_grad
from ..api.dsrelu import REQUIRED as DSRELU_REQUIRED
from ..api.operation import OUTPUTS
from ..api.tuple_dict import TupleDict
from .call import as_array, call, torch_dtype
from .operators import operands_of

_DTYPES = ("b_dtype", "d_dtype")


def grouped_gemm_dsrelu_jax_sm100(
    a,
    c,
    sfa,
    padded_offsets,
    alpha,
    prob,
    b_ptrs=None,
    sfb_ptrs=None,
    n=None,
    norm_const=None,
    b_dtype=None,
    b_major="k",
    d_dtype=None,
    acc_dtype=None,
    generate_dbias=False,
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=None,
    vector_f32=False,
    discrete_col_sfd=False,
    use_dynamic_sched=False,
    use_dsrelu_reuse=False,
    *,
    b_tensor=None,
    sfb_tensor=None,
    deterministic=None,
    tanh_clamp_scale=None,
    c_role="grad_output",
):
    """``grouped_gemm_dsrelu_wrapper_sm100`` for programs under ``jax.jit``; the mathematics and the options are there.

    Inputs (M rows of all experts, K reduction, N columns, L experts, V = sf_vec_size; a trailing 1 may be left out):
        a (M, K, 1) float8_e4m3fn or float8_e5m2; packed FP4 as uint8 (M, K/2, 1); bfloat16 without scale factors.
        c (M, N, 1) float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.
        sfa (1, ceil(M/128), ceil(ceil(K/V)/4), 32, 4, 4), physical: float8_e8m0fnu, or float8_e4m3fn with V = 16. None
        with bfloat16 operands.
        padded_offsets (L,) int32 cumulative ends, multiples of 256. alpha (L,) and prob (M, 1, 1) float32.
        norm_const (1,) float32: required with FP8 D.
        Discrete weights: b_ptrs and sfb_ptrs, tables of the experts' addresses, int64 (L,) in x64 mode or packed uint8
        (8 L,) (``pointer_table``), with n=N, b_dtype (uint8 for FP4) and b_major "k" or "n".
        Dense weights: b_tensor (L, N, K), with b_major="n" (L, K, N), FP4 uint8 (L, N, K/2), or a list of L matrices;
        sfb_tensor (L, ceil(N/128), ceil(ceil(K/V)/4), 32, 4, 4), or a list.
    Options: d_dtype None is float8_e4m3fn with FP8 operands and bfloat16 otherwise. sf_vec_size None is 32, and 16 with
        bfloat16 operands. acc_dtype (float32) and use_dsrelu_reuse (False) have one legal value.

    Returns the TupleDict of the wrapper, a pytree: d_row_tensor, d_col_tensor, dprob_tensor, dbias_tensor (None unless
    generate_dbias), amax_tensor, sfd_row_tensor, sfd_col_tensor; scale factors in physical form. All are new and
    initialised on every execution; rows past padded_offsets[-1] are zero.

    ValueError or NotImplementedError for a bad argument when the call is traced. Values of padded_offsets, norm_const and
    pointer tables cannot be checked then: on the CPU the execution fails (``jax.errors.JaxRuntimeError`` with the same
    text), on a GPU only with CUDNN_GROUPED_VALIDATE=1. The memory behind pointer tables must stay alive and unmoved for
    every execution.
    """
    _check_one_legal_value("use_dsrelu_reuse", use_dsrelu_reuse, False)
    tensors = {
        "a": a,
        "b": b_tensor,
        "c": c,
        "sfa": sfa,
        "sfb": sfb_tensor,
        "padded_offsets": padded_offsets,
        "alpha": alpha,
        "prob": prob,
        "norm_const": norm_const,
        "b_ptrs": b_ptrs,
        "sfb_ptrs": sfb_ptrs,
    }
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": b_major,
        "d_dtype": d_dtype,
        "generate_dbias": generate_dbias,
        "sf_vec_size": _block_length(sf_vec_size, sfa),
        "discrete_col_sfd": discrete_col_sfd,
        "deterministic": deterministic,
        "mma_tiler_mn": mma_tiler_mn,
        "cluster_shape_mn": cluster_shape_mn,
        "vector_f32": vector_f32,
        "use_dynamic_sched": use_dynamic_sched,
        "c_role": c_role,
        "tanh_clamp_scale": tanh_clamp_scale,
    }
    if d_dtype is None and str(getattr(a, "dtype", "")).startswith("float8"):
        options["d_dtype"] = jnp.float8_e4m3fn
    names = {"b": "b_tensor", "sfb": "sfb_tensor"}
    return _run("dsrelu", tensors, DSRELU_REQUIRED, options, acc_dtype, lambda name: names.get(name, name))


def grouped_gemm_dglu_jax_sm100(
    a,
    c,
    padded_offsets,
    alpha,
    beta,
    b_ptrs=None,
    n=None,
    prob=None,
    d_dtype=jnp.bfloat16,
    acc_dtype=None,
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    vector_f32=False,
    act_func="dswiglu",
    linear_offset=None,
    generate_dbias=False,
    use_dynamic_sched=False,
    *,
    b_tensor=None,
    sfa_tensor=None,
    sfb_tensor=None,
    norm_const_tensor=None,
    discrete_col_sfd=False,
    geglu_alpha=1.702,
    glu_clamp_max=7.0,
    glu_clamp_min=-7.0,
    sf_vec_size=None,
    sfb_ptrs=None,
    b_dtype=None,
    b_major="k",
    situ_beta1=4.0,
    situ_beta2=25.0,
    epilogue_op=None,
    use_single_group_runtime_offsets=False,
    deterministic=None,
    clamp_grad=None,
):
    """``grouped_gemm_dglu_wrapper_sm100`` for programs under ``jax.jit``; the mathematics and the options are there.

    Inputs, results and errors as in ``grouped_gemm_dsrelu_jax_sm100``, with N the compact width, c (M, 2N, 1), beta (L,)
    float32, D (M, 2N, 1) in d_dtype and dbias (L, 2N, 1). Discrete weights: b_dtype None is the dtype of a. sf_vec_size
    None is 32, and 16 with bfloat16 operands. The activation's parameters are honoured for every operand format.
    """
    tensors = {
        "a": a,
        "b": b_tensor,
        "c": c,
        "sfa": sfa_tensor,
        "sfb": sfb_tensor,
        "padded_offsets": padded_offsets,
        "alpha": alpha,
        "beta": beta,
        "prob": prob,
        "norm_const": norm_const_tensor,
        "b_ptrs": b_ptrs,
        "sfb_ptrs": sfb_ptrs,
    }
    if b_ptrs is not None and b_dtype is None:
        b_dtype = getattr(a, "dtype", None)
    options = {
        "n": n,
        "b_dtype": b_dtype,
        "b_major": b_major,
        "d_dtype": d_dtype,
        "generate_dbias": generate_dbias,
        "sf_vec_size": _block_length(sf_vec_size, sfa_tensor),
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
    options = resolve_clamp_grad(options, a)
    names = {name: f"{name}_tensor" for name in ("b", "sfa", "sfb", "norm_const")}
    return _run("dglu", tensors, DGLU_REQUIRED, options, acc_dtype, lambda name: names.get(name, name))


def run_wrapper(operation, tensors, required, options, constants, dprob, current_stream):
    """The documents' wrappers on JAX arrays: see ``api.operation.run_wrapper``, which calls this.

    XLA orders the call with what makes its inputs and uses its results: no stream, nothing to synchronise. A given dprob
    is added to the new one; JAX arrays are immutable, so the sum comes back and the argument stays as it was.
    """
    if current_stream is not None:
        raise ValueError(
            f"current_stream: expected None with JAX arrays (XLA chooses the stream), got {current_stream!r}"
        )
    acc_dtype = constants.pop("acc_dtype")
    check_constants(constants)
    if dprob is not None:
        dprob = as_array("dprob_tensor", dprob)
    result = _run(operation, tensors, required, options, acc_dtype, call_name, dprob)
    if dprob is not None:
        offsets = as_array("padded_offsets", tensors["padded_offsets"])
        end = dprob.size if options.get("use_single_group_runtime_offsets") else offsets[-1]
        result["dprob_tensor"] = _accumulated(dprob, result["dprob_tensor"], end)
    return result


@jax.jit
def _accumulated(dprob, new, end):
    """dprob + new; rows from ``end`` on belong to no expert and are zero."""
    owned = (jnp.arange(dprob.size) < end).reshape(dprob.shape)
    return jnp.where(owned, dprob + new.reshape(dprob.shape), 0.0)


def _run(operation, tensors, required, options, acc_dtype, name_of, dprob=None):
    for name in required:
        if tensors[name] is None:
            raise ValueError(f"{name_of(name)}: expected an array (required), got None")
    check_constants({"acc_dtype": torch_dtype("acc_dtype", acc_dtype)})
    options = {name: torch_dtype(name, value) if name in _DTYPES else value for name, value in options.items()}
    discrete = {name: (tensors | options)[name] for name in ("b_ptrs", "sfb_ptrs", "n", "b_dtype")}
    check_weights(tensors, discrete, name_of)
    operands = operands_of(operation, tensors, options, name_of)
    outputs = call(operation, operands, options, name_of)
    rows = outputs["dprob"].size
    if dprob is not None and (dprob.dtype != jnp.float32 or dprob.shape not in ((rows, 1, 1), (rows,))):
        got = f"{dprob.dtype} of shape {dprob.shape}"
        raise ValueError(f"{name_of('dprob')}: expected float32 of shape ({rows}, 1, 1) or ({rows},), got {got}")
    if outputs["d_col"] is None and tensors["a"].dtype != jnp.bfloat16:
        outputs["d_col"] = outputs["d_row"]
    return TupleDict({f"{name}_tensor": outputs[name] for name in OUTPUTS})


def _block_length(sf_vec_size, sfa):
    return (16 if sfa is None else 32) if sf_vec_size is None else sf_vec_size


def _check_one_legal_value(name, value, legal):
    if value is not legal:
        raise ValueError(f"{name}: expected {legal!r}, got {value!r}")


jax.tree_util.register_pytree_with_keys(
    TupleDict,
    lambda result: (
        tuple((jax.tree_util.DictKey(name), value) for name, value in result.items()),
        tuple(result.keys()),
    ),
    lambda names, values: TupleDict(zip(names, values)),
)
