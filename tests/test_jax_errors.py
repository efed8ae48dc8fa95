"""Bad arguments on JAX arrays: an error that names the argument, traced or not, and never a crash."""

import cases
import numpy as np
import pytest
import torch
from cases import Case
from jax_values import assert_same, jax, jax_arguments, jnp, on_jax, split
from test_jax_entry_points import ENTRY_POINTS, WRAPPERS, entry_arguments, plain, torch_wrapper

import cudnn_grouped
from cudnn_grouped.api.arguments import call_name

MXFP8 = Case(d="e4m3", dbias=True)
PTRS = Case(d="e4m3", weights="ptrs_k")
BF16 = Case(op="dglu", ab="bf16")
BF16_PTRS = Case(op="dglu", ab="bf16", weights="ptrs_k")
FP4 = Case(op="dglu", ab="uint8", sf="e4m3", vec=16)
XLA_ERRORS = (ValueError, jax.errors.JaxRuntimeError)


def zeros(*shape, dtype=np.float32):
    """A NumPy array: tables of arguments are made before any JAX backend may start."""
    return np.zeros(shape, dtype)


def on_device(arguments):
    return {
        n: jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, v) for n, v in arguments.items()
    }


# (case, changed arguments of the entry point, argument named, expected, got)
BAD = [
    (MXFP8, {"a": None}, "a", "an array", "None"),
    (MXFP8, {"a": [1.0]}, "a", "a JAX array", "list"),
    (MXFP8, {"c": torch.zeros(512, 64, 1)}, "c", "a JAX array", "Tensor"),
    (MXFP8, {"b_major": None}, "b_major", "a str", "None"),
    (MXFP8, {"generate_dbias": None}, "generate_dbias", "a bool", "None"),
    (MXFP8, {"a": zeros(512, dtype=jnp.float8_e4m3fn)}, "a", "shape", "shape (512,)"),
    (MXFP8, {"a": zeros(500, 64, 1, dtype=jnp.float8_e4m3fn)}, "a", "M, its number of rows, a multiple of 256", "500"),
    (MXFP8, {"a": zeros(512, 64, 1, dtype=jnp.float4_e2m1fn)}, "a", "dtype bfloat16 or float8_e4m3fn", "float4_e2m1fn"),
    (MXFP8, {"a": zeros(512, 64, 1, dtype=jnp.int8)}, "a", "dtype bfloat16 or float8_e4m3fn", "int8"),
    (MXFP8, {"b_tensor": None}, "b_tensor", "either b_tensor (dense) or b_ptrs (discrete)", "neither"),
    (MXFP8, {"b_tensor": zeros(2, 64, 32, dtype=jnp.float8_e4m3fn)}, "b_tensor", "(N, K, L)", "holds it as (L, N, K)"),
    (MXFP8, {"b_tensor": zeros(2, 64, 64, dtype=jnp.float8_e5m2)}, "b_tensor", "the dtype of a", "float8_e5m2"),
    (MXFP8, {"b_tensor": [zeros(64, 64, dtype=jnp.float8_e4m3fn)]}, "b_tensor", "one tensor per expert, 2", "1"),
    (MXFP8, {"sfb_tensor": None}, "sfb_tensor", "the scale factors of b", "None"),
    (
        MXFP8,
        {"sfa": zeros(512, 2, dtype=jnp.float8_e8m0fnu)},
        "sfa",
        "contiguous of shape (1, 4, 1, 32, 4, 4)",
        "(512, 2)",
    ),
    (MXFP8, {"sfa": zeros(1, 4, 1, 32, 4, 4)}, "sfa", "dtype float8_e8m0fnu or float8_e4m3fn", "float32"),
    (MXFP8, {"sf_vec_size": 16}, "sf_vec_size", "32 with float8_e8m0fnu", "FP8 operands need sf_vec_size=32"),
    (MXFP8, {"c": zeros(512, 32, 1)}, "c", "shape (M, N, 1) = (512, 64, 1)", "shape (512, 32, 1)"),
    (MXFP8, {"c": zeros(512, 64, 1, dtype=jnp.int8)}, "c", "dtype float32", "int8"),
    (MXFP8, {"c": zeros(512, 64, 1, dtype=jnp.float8_e4m3fn), "vector_f32": True}, "vector_f32", "False", "True"),
    (MXFP8, {"padded_offsets": zeros(2)}, "padded_offsets", "dtype int32", "float32"),
    (MXFP8, {"padded_offsets": zeros(0, dtype=jnp.int32)}, "padded_offsets", "1 to 1024 experts", "0"),
    (MXFP8, {"padded_offsets": zeros(1025, dtype=jnp.int32)}, "padded_offsets", "1 to 1024 experts", "1025"),
    (MXFP8, {"alpha": zeros(3)}, "alpha", "shape (L,) = (2,)", "shape (3,)"),
    (MXFP8, {"prob": zeros(512, 1, 1, dtype=jnp.bfloat16)}, "prob", "dtype float32", "bfloat16"),
    (MXFP8, {"norm_const": None}, "norm_const", "a (1,) float32 tensor", "None"),
    (MXFP8, {"norm_const": zeros(2)}, "norm_const", "shape (1,)", "shape (2,)"),
    (MXFP8, {"d_dtype": jnp.int32}, "d_dtype", "dtype float32", "int32"),
    (MXFP8, {"d_dtype": "no dtype"}, "d_dtype", "a dtype that the operators know", "no dtype"),
    (MXFP8, {"acc_dtype": jnp.float16}, "acc_dtype", "torch.float32", "torch.float16"),
    (MXFP8, {"mma_tiler_mn": (64, 256)}, "mma_tiler_mn", "(128 or 256, 128 or 256)", "(64, 256)"),
    (MXFP8, {"cluster_shape_mn": (3, 1)}, "cluster_shape_mn", "powers of two", "(3, 1)"),
    (MXFP8, {"generate_dbias": 1}, "generate_dbias", "a bool", "1"),
    (MXFP8, {"use_dsrelu_reuse": True}, "use_dsrelu_reuse", "False", "True"),
    (MXFP8, {"tanh_clamp_scale": 0.0}, "tanh_clamp_scale", "above 0", "0"),
    (MXFP8, {"c_role": "other"}, "c_role", "grad_output", "other"),
    (MXFP8, {"b_ptrs": zeros(16, dtype=jnp.uint8)}, "b_tensor", "either b_tensor", "both"),
    (MXFP8, {"sfb_ptrs": zeros(16, dtype=jnp.uint8)}, "sfb_ptrs", "None with b_tensor", "a tensor"),
    (PTRS, {"n": None}, "n", "a value (required without b_tensor)", "None"),
    (PTRS, {"n": 0}, "n", "N above 0", "0"),
    (PTRS, {"n": "64"}, "n", "an int", "'64'"),
    (PTRS, {"b_dtype": None}, "b_dtype", "a value (required without b_tensor)", "None"),
    (PTRS, {"b_dtype": jnp.float8_e5m2}, "b_dtype", "the dtype of a, float8_e4m3fn", "float8_e5m2"),
    (PTRS, {"b_major": "m"}, "b_major", '"k" or "n"', '"m"'),
    (PTRS, {"b_ptrs": zeros(2, dtype=jnp.int32)}, "b_ptrs", "int64 (x64 mode) or packed uint8", "int32"),
    (PTRS, {"b_ptrs": zeros(12, dtype=jnp.uint8)}, "b_ptrs", "packed uint8 of shape (8 L,)", "shape (12,)"),
    (PTRS, {"b_ptrs": zeros(24, dtype=jnp.uint8)}, "b_ptrs", "shape (L,) = (2,)", "shape (3,)"),
    (PTRS, {"sfb_ptrs": None}, "sfb_ptrs", "the scale factors of b", "None"),
    (BF16, {"beta": None}, "beta", "an array", "None"),
    (BF16, {"act_func": "dgelu"}, "act_func", "dswiglu", "dgelu"),
    (BF16, {"act_func": "dswiglu", "linear_offset": 2.0}, "linear_offset", "None or 0", "2"),
    (
        BF16,
        {"sfa_tensor": zeros(1, 4, 1, 32, 4, 4, dtype=jnp.float8_e8m0fnu)},
        "sfa_tensor",
        "None with BF16",
        "a tensor",
    ),
    (BF16, {"norm_const_tensor": zeros(1)}, "norm_const_tensor", "None with BF16 operands", "a tensor"),
    (BF16, {"sf_vec_size": 32}, "sf_vec_size", "16 with BF16 operands", "32"),
    (BF16, {"discrete_col_sfd": True}, "discrete_col_sfd", "False with BF16 operands", "True"),
    (BF16, {"epilogue_op": "relu"}, "epilogue_op", "None or", "relu"),
    (BF16, {"d_dtype": jnp.float8_e4m3fn}, "d_dtype", "dtype bfloat16 or float16 or float32", "float8_e4m3fn"),
    (BF16, {"mma_tiler_mn": (256, 128)}, "mma_tiler_mn", "(128 or 256, 256)", "(256, 128)"),
    (BF16, {"c": zeros(512, 64, 1)}, "c", "shape (M, 2N, 1) = (512, 128, 1)", "shape (512, 64, 1)"),
    (BF16_PTRS, {"n": 48}, "n", "N a multiple of 32", "48"),
    (FP4, {"d_dtype": jnp.float8_e4m3fn}, "d_dtype", "dtype bfloat16", "float8_e4m3fn"),
    (FP4, {"sf_vec_size": 32}, "sf_vec_size", "16 with float8_e4m3fn", "32 with float8_e4m3fn"),
    (FP4, {"b_major": "n", "b_tensor": zeros(2, 32, 64, dtype=jnp.uint8)}, "b_tensor", "K-major", "(1, 64, 2048)"),
    (FP4, {"use_single_group_runtime_offsets": True}, "use_single_group_runtime_offsets", "exactly one expert", "2"),
]


def failing_call(case, changes):
    arrays, options = entry_arguments(cases.build(case))
    options = {"b_major": "k", **options} if "b_major" in changes else options
    return ENTRY_POINTS[case.op], {**arrays, **options, **on_device(changes)}


def is_array(value):
    return isinstance(value, jax.Array) or (isinstance(value, list) and all(isinstance(v, jax.Array) for v in value))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case, changes, argument, expected, got", BAD, ids=lambda value: "")
def test_bad_argument(case, changes, argument, expected, got, traced):
    entry, arguments = failing_call(case, changes)
    arrays = {name: value for name, value in arguments.items() if is_array(value)}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    with pytest.raises(ValueError) as caught:
        if traced:
            jax.jit(lambda arrays: entry(**arrays, **rest))(arrays)
        else:
            entry(**arguments)
    text = str(caught.value)
    assert text.startswith((f"{argument}: ", f"{argument}[")), text
    assert expected in text and got in text, text


# Values ----------------------------------------------------------------------------------------------------------

NULL = np.zeros(2, np.int64).view(np.uint8)
ODD = np.array([8, 8]).view(np.uint8)
BAD_VALUES = [
    (MXFP8, {"padded_offsets": [100, 512]}, r"padded_offsets\[0\]: expected a multiple of 256, got 100"),
    (MXFP8, {"padded_offsets": [512, 256]}, r"padded_offsets\[1\]: expected"),
    (MXFP8, {"padded_offsets": [256, 768]}, r"padded_offsets\[1\]: expected"),
    (MXFP8, {"padded_offsets": [-256, 512]}, r"padded_offsets\[0\]: expected"),
    (MXFP8, {"norm_const": [0.0]}, "norm_const: expected"),
    (MXFP8, {"norm_const": [np.nan]}, "norm_const: expected"),
    (PTRS, {"b_ptrs": NULL}, r"b_ptrs\[0\]: expected a 16-byte aligned address, not null, got 0x0"),
    (PTRS, {"sfb_ptrs": ODD}, r"sfb_ptrs\[0\]: expected a 16-byte aligned address, not null, got 0x8"),
]


@pytest.mark.parametrize("case, changes, message", BAD_VALUES, ids=lambda value: "")
def test_bad_value(case, changes, message):
    """Of a jitted function: an error of its execution, after which it works. Outside jit: a ValueError at once."""
    built = cases.build(case)
    arrays, options = entry_arguments(built)
    bad = arrays | {name: jnp.asarray(value, arrays[name].dtype) for name, value in changes.items()}
    run = jax.jit(lambda arrays: ENTRY_POINTS[case.op](**arrays, **options))
    for _ in range(2):
        with pytest.raises(XLA_ERRORS, match=message):
            jax.block_until_ready(run(bad))
    assert_same(plain(run(arrays)), torch_wrapper(built))
    with pytest.raises(ValueError, match="^" + message):
        ENTRY_POINTS[case.op](**bad, **options)
    named = {call_name(name): value for name, value in jax_arguments(built).items()}
    named |= {call_name(name): bad[name] for name in changes}
    message = "^" + message.replace("norm_const:", "norm_const_tensor:")
    with pytest.raises(ValueError, match=message):
        WRAPPERS[case.op](**named, d_dtype=cases.DTYPES[case.d])


def wrapper_arguments():
    named = {call_name(name): value for name, value in jax_arguments(cases.build(MXFP8)).items()}
    return named | {"d_dtype": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"current_stream": 0}, "^current_stream: expected None with JAX arrays"),
        ({"cd_major": "m"}, "^cd_major: expected 'n', got 'm'"),
        ({"m_aligned": 128}, "^m_aligned: expected 256, got 128"),
        ({"sfa_tensor": None}, "^sfa_tensor: expected the scale factors of a, got None"),
        ({"prob_tensor": None}, r"^prob_tensor: expected an array \(required\), got None"),
        ({"c_tensor": torch.zeros(512, 64, 1)}, "^c_tensor: expected a JAX array, got Tensor"),
        ({"alpha_tensor": zeros(3)}, "^alpha_tensor: expected shape"),
        ({"dprob_tensor": zeros(3)}, "^dprob_tensor: expected float32 of shape"),
        ({"dprob_tensor": zeros(2, 256)}, r"^dprob_tensor: expected float32 of shape \(512, 1, 1\) or \(512,\), got"),
        ({"dprob_tensor": zeros(512, 1, 1, dtype=jnp.bfloat16)}, "^dprob_tensor: expected float32 of shape"),
    ],
)
def test_wrapper_names_its_own_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        cudnn_grouped.grouped_gemm_dsrelu_wrapper_sm100(**wrapper_arguments() | on_device(changes))


def test_deterministic_is_honoured_not_refused():
    run = cudnn_grouped.grouped_gemm_dsrelu_wrapper_sm100
    assert_same(plain(run(**wrapper_arguments(), deterministic=True)), torch_wrapper(cases.build(Case(d="e4m3"))))


def test_class_takes_no_jax_arrays():
    arguments = wrapper_arguments()
    with pytest.raises(ValueError, match="^sample_a: expected a torch.Tensor, got"):
        cudnn_grouped.GroupedGemmDsreluSm100(
            sample_a=arguments["a_tensor"], sample_b=arguments["b_tensor"], sample_sfb=arguments["sfb_tensor"],
            sample_c=arguments["c_tensor"], sample_d_row=arguments["c_tensor"], sample_sfa=arguments["sfa_tensor"],
            sample_padded_offsets=arguments["padded_offsets"], sample_alpha=arguments["alpha_tensor"],
            sample_prob=arguments["prob_tensor"], sample_dprob=arguments["prob_tensor"],
        ).check_support()  # fmt: skip


# Transformations -------------------------------------------------------------------------------------------------


def test_vmap_and_differentiation_are_refused():
    arrays, options = entry_arguments(cases.build(MXFP8))

    def run(c):
        return on_jax.grouped_gemm_dsrelu_jax_sm100(**{**arrays, "c": c}, **options)["dprob_tensor"]

    for transformed in (jax.vmap(run), jax.jit(jax.vmap(run))):
        with pytest.raises(NotImplementedError, match="dsrelu: vmap is not supported"):
            transformed(jnp.stack([arrays["c"], arrays["c"]]))
    for transform in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        with pytest.raises(NotImplementedError, match="dsrelu: the operator has no derivative"):
            transform(lambda c: run(c).sum())(arrays["c"])


@pytest.mark.parametrize(
    "array, got",
    [
        (np.array([256, 512 + 2**32]), r"int64 \(JAX without x64 mode makes it int32\)"),
        (np.array([256.0, 512.0]), r"float64 \(JAX without x64 mode makes it float32\)"),
        (np.array([256, None]), "dtype object"),
        (np.array(["256", "512"]), "dtype <U3"),
    ],
)
def test_numpy_array_that_jax_would_change(array, got):
    """JAX would cut the int64 offsets to legal ones."""
    x = jnp.zeros((512, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"^padded_offsets: expected .*, got {got}$"):
        on_jax.operator("wgrad", a=x, b=x, padded_offsets=array)


def test_int64_offsets_in_x64_mode():
    x = jnp.zeros((512, 64), jnp.bfloat16)
    with jax.enable_x64(), pytest.raises(ValueError, match="^padded_offsets: expected dtype int32, got int64"):
        on_jax.operator("wgrad", a=x, b=x, padded_offsets=np.array([256, 512]))


def test_deleted_array():
    x, offsets = jnp.zeros((512, 64), jnp.bfloat16), jnp.array([256, 512], jnp.int32)
    offsets.delete()
    with pytest.raises(ValueError, match="^padded_offsets: expected an array, got one that is deleted or was donated"):
        on_jax.operator("wgrad", a=x, b=x, padded_offsets=offsets)


def test_symbolic_shape():
    (rows,) = jax.export.symbolic_shape("m")
    export = jax.export.export(jax.jit(on_jax.quantize))
    with pytest.raises(
        NotImplementedError, match=r"^x: expected sizes that are known when traced, got shape \(m, 64\)"
    ):
        export(jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16))


def test_unknown_argument():
    for name in ("gemm", "dsrelu_out", "default", None, ["mm"]):
        with pytest.raises(ValueError, match="^operation: expected one of dsrelu, .*, got "):
            on_jax.operator(name)
    with pytest.raises(TypeError, match="^wgrad: expected arguments a, b, padded_offsets, .*, got beta"):
        on_jax.operator("wgrad", beta=jnp.ones(1))
    with pytest.raises(ValueError, match="^format: expected one of"):
        on_jax.quantize(jnp.ones((32, 32)), "int8")


@pytest.mark.parametrize(
    "operation, arguments, message",
    [
        ("quantize", {"x": zeros(64, 60, dtype=jnp.int32)}, "^x: expected dtype float32"),
        ("quantize", {"x": zeros(4)}, "^x: expected shape"),
        ("quantize", {"x": zeros(64, 64), "axis": "rows"}, '^axis: expected "row" or "col"'),
        ("quantize", {"x": zeros(64, 64), "axis": 0}, "^axis: expected a str, got 0"),
        ("quantize", {"x": zeros(64, 64), "sf_dtype": None}, "^sf_dtype: expected a torch.dtype, got None"),
        ("wgrad", {"a": zeros(300, 64, dtype=jnp.bfloat16)}, "^a: expected T, its tokens, a multiple of 256"),
        ("wgrad", {"b": zeros(256, 64, dtype=jnp.float16)}, "^b: expected dtype bfloat16"),
        ("mm", {"b": zeros(2, 64, 32, dtype=jnp.bfloat16)}, r"^b: expected shape \(N, K, L\)"),
        ("dact", {"r": None}, "^r: expected a tensor, got None"),
    ],
)
def test_bad_argument_of_an_operator(operation, arguments, message):
    offsets = jnp.array([256, 512], jnp.int32)
    a = zeros(512, 64, dtype=jnp.bfloat16)
    good = {
        "quantize": {"dtype": jnp.float8_e4m3fn, "sf_dtype": jnp.float8_e8m0fnu, "sf_vec_size": 32},
        "wgrad": {"a": a, "b": a, "padded_offsets": offsets},
        "mm": {"a": a, "b": zeros(2, 64, 64, dtype=jnp.bfloat16), "padded_offsets": offsets},
        "dact": {"r": a, "c": a, "padded_offsets": offsets},
    }[operation]
    given = on_device(good | arguments)
    with pytest.raises(ValueError, match=message):
        on_jax.operator(operation, **given)
    arrays, rest = split(given)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda arrays: on_jax.operator(operation, **arrays, **rest))(arrays)


@pytest.mark.parametrize("operation", ["wgrad", "quantize"])
def test_bad_offsets_of_the_other_operators(operation):
    offsets, x = jnp.array([100, 512], jnp.int32), jnp.zeros((512, 64), jnp.bfloat16)
    arguments = {"a": x, "b": x} if operation == "wgrad" else {"x": x, "axis": "col", "sf_vec_size": 32}
    if operation == "quantize":
        arguments |= {"dtype": torch.float8_e4m3fn, "sf_dtype": torch.float8_e8m0fnu}
    with pytest.raises(ValueError, match=r"^padded_offsets\[0\]: expected a multiple of 256"):
        on_jax.operator(operation, **arguments, padded_offsets=offsets)
    with pytest.raises(XLA_ERRORS, match=r"padded_offsets\[0\]: expected a multiple of 256"):
        jax.block_until_ready(jax.jit(lambda o: on_jax.operator(operation, **arguments, padded_offsets=o))(offsets))


# The handler, called past the Python layer -----------------------------------------------------------------------

GOOD = {
    "operation": "mm",
    "operands": "a b[1,2,0] padded_offsets",
    "results": "d",
}
BAD_DESCRIPTIONS = [
    ({"operation": "no"}, "operation: expected dsrelu"),
    ({"operation": None}, "operation"),
    ({"operands": "a b[1,2,0]"}, "buffers: expected a"),
    ({"operands": "a b[1,2,0] padded_offsets c"}, "buffers: expected a"),
    ({"operands": "a b[1,2] padded_offsets"}, "b: expected 2 dimensions, got 3"),
    ({"operands": "a b[1,2,7] padded_offsets"}, "b: expected axes of the buffer, got 7"),
    ({"operands": "a b[1,1,1] padded_offsets"}, "b: expected"),
    ({"operands": "a b[1,2,0] other"}, "other: expected an argument of the operator"),
    ({"operands": "a b[1,2,0] padded_offsets:int64"}, "padded_offsets: expected dtype int32, got int64"),
    ({"operands": "a b[1,2,0] padded_offsets:nothing"}, "padded_offsets: expected"),
    ({"operands": ""}, "buffers: expected"),
    ({"results": "dprob"}, "d: expected a tensor, got None"),
    ({"results": "a"}, "a: expected a result of the operator"),
    ({"operands": "a b[1,2,0] d"}, "d: expected an argument of the operator"),
    ({"operands": "a b[1,2,0] c"}, "c: expected an argument of the operator"),
    ({"operands": "a b[1,2,0] dprob_workspace"}, "dprob_workspace: expected an argument of the operator"),
    ({"results": "dbias"}, "d: expected a tensor, got None"),
    ({"generate_d": False}, "generate_d: expected the default with another operator than dact, got False"),
    ({"c_per_expert": True}, "c_per_expert: expected the default with another operator than dact, got True"),
    ({"no_option": 1}, "options: expected options of the operator alone"),
    ({"b_major": 1}, "b_major"),
    ({"sf_vec_size": "sixteen"}, "sf_vec_size"),
    ({"mma_tiler_mn": 256}, "mma_tiler_mn"),
    ({"operation": "wgrad", "operands": "a b padded_offsets"}, "b: expected"),
    ({"operation": "quantize"}, "a: expected an argument of the operator"),
]


def raw_call(shape, **attributes):
    a, b = zeros(256, 64, dtype=jnp.bfloat16), zeros(1, 32, 64, dtype=jnp.bfloat16)
    attributes = {name: value for name, value in (GOOD | attributes).items() if value is not None}
    call = jax.ffi.ffi_call("cudnn_grouped_mm", [jax.ShapeDtypeStruct(shape, jnp.bfloat16)])
    return jax.block_until_ready(call(a, b, jnp.array([256], jnp.int32), **attributes))


@pytest.mark.parametrize("attributes, message", BAD_DESCRIPTIONS, ids=lambda value: "")
def test_description_that_does_not_fit(attributes, message):
    assert raw_call((256, 32))[0].shape == (256, 32)
    with pytest.raises(XLA_ERRORS, match=message):
        raw_call((256, 32), **attributes)


@pytest.mark.parametrize("shape", [(256, 31), (255, 32), (256, 32, 2), (8192,), (1, 1, 1, 1, 1, 1, 8192)])
def test_result_of_another_size(shape):
    with pytest.raises(XLA_ERRORS, match="d: expected shape"):
        raw_call(shape)


@pytest.mark.parametrize(
    "operation, operands, shapes, results, message",
    [
        ("quantize", "x", [(64, 32), (1, 1, 1, 32, 4, 4)], "data scales", "data: expected 4096 bytes, got 2048"),
        ("quantize", "x", [(64, 64), (1, 1, 1, 32, 4, 2)], "data scales", "scales: expected 512 bytes, got 256"),
        ("quantize", "x", [(64, 64), (1, 1, 1, 32, 4, 4)], "data other", "scales: expected a buffer, got none"),
        ("dequantize", "data scales", [(64, 63)], "x", "x: expected 16384 bytes, got 4032"),
        ("wgrad", "a b padded_offsets", [(1, 64, 63)], "out", "out: expected 8192 bytes, got 4032"),
    ],
)
def test_result_of_another_size_of_the_other_operators(operation, operands, shapes, results, message):
    arrays = {
        "x": zeros(64, 64), "data": zeros(64, 64, dtype=jnp.float8_e4m3fn), "a": zeros(64, 256, dtype=jnp.bfloat16),
        "scales": zeros(1, 1, 1, 32, 4, 4, dtype=jnp.float8_e8m0fnu), "b": zeros(256, 64, dtype=jnp.bfloat16),
        "padded_offsets": jnp.array([256], jnp.int32),
    }  # fmt: skip
    options = {"sf_vec_size": 16 if operation == "wgrad" else 32}
    if operation == "quantize":
        options |= {"dtype": "float8_e4m3fn", "sf_dtype": "float8_e8m0fnu"}
    call = jax.ffi.ffi_call("cudnn_grouped_mm", [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes])
    given = [arrays[name] for name in operands.split()]
    with pytest.raises(XLA_ERRORS, match=message):
        jax.block_until_ready(call(*given, operation=operation, operands=operands, results=results, **options))
