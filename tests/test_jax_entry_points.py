"""The documents' entry points on JAX arrays: signatures, returns, pointer tables, and the wrappers' bits."""

import inspect

import cases
import numpy as np
import pytest
import torch
from cases import Case
from jax.experimental.layout import Format, Layout
from jax_values import assert_same, bits, in_memory_order, jax, jax_arguments, jnp, on_jax, split, to_jax, to_numpy

import cudnn_grouped
from cudnn_grouped import TupleDict
from cudnn_grouped.api.arguments import call_name
from cudnn_grouped.api.operation import OUTPUTS
from cudnn_grouped.jax.call import schema

WRAPPERS = {
    "dsrelu": cudnn_grouped.grouped_gemm_dsrelu_wrapper_sm100,
    "dglu": cudnn_grouped.grouped_gemm_dglu_wrapper_sm100,
}
ENTRY_POINTS = {"dsrelu": on_jax.grouped_gemm_dsrelu_jax_sm100, "dglu": on_jax.grouped_gemm_dglu_jax_sm100}
# Names of the entry points that are not the operator's.
NAMES = {
    "dsrelu": {"b": "b_tensor", "sfb": "sfb_tensor"},
    "dglu": {name: f"{name}_tensor" for name in ("b", "sfa", "sfb", "norm_const")},
}
CASES = [
    Case(d="e4m3", weights="ptrs_k", dbias=True, offsets=(0, 256, 512)),  # the document's JAX configuration
    Case(op="dglu", ab="bf16", weights="ptrs_k", dbias=True, options={"act_func": "dswiglu"}),  # and dGLU's
    Case(op="dglu", ab="bf16", weights="ptrs_k", dbias=True, options={"act_func": "dgeglu"}),
    Case(d="e4m3", discrete_col_sfd=True, dbias=True, offsets=(256, 512), m=768),
    Case(d="bf16", weights="dense_n"),
    Case(ab="bf16", d="f32"),
    Case(ab="uint8", sf="e4m3", vec=16, d="bf16", dbias=True),
    Case(op="dglu", d="e4m3", dbias=True, options={"act_func": "dsituglu"}),
    Case(op="dglu", d="e4m3", weights="ptrs_n"),
    Case(op="dglu", ab="uint8", sf="e8m0", vec=32, d="fp16", options={"act_func": "dgeglu"}),
    Case(op="dglu", ab="bf16", d="bf16", weights="list_k", rank=2),
]
pytestmark = pytest.mark.filterwarnings("ignore:dGeGLU on BF16 operands")


def torch_wrapper(built, **more):
    """The documented wrapper on torch tensors: {name: tensor or None} without the suffix."""
    case = built.case
    named = dict(zip(schema(case.op)[0], built.positional)) | built.keywords
    for name in ("b", "sfb"):
        value = named.get(name)
        named[name] = value[0] if value and case.weights.startswith("dense") else value or None
    arguments = {call_name(name): value for name, value in named.items()}
    result = WRAPPERS[case.op](**arguments, d_dtype=cases.DTYPES[case.d], generate_dbias=case.dbias, **more)
    return {name: result[f"{name}_tensor"] for name in OUTPUTS}


def entry_arguments(built):
    """(arrays, options) of the entry point."""
    case = built.case
    arguments = {NAMES[case.op].get(name, name): value for name, value in jax_arguments(built).items()}
    arrays, options = split({name: value for name, value in arguments.items() if value is not None})
    if case.op == "dsrelu" and not case.scaled:
        arrays["sfa"] = None  # it has no default: it comes before parameters that have none
    return arrays, options | {
        "d_dtype": jnp.dtype(str(cases.DTYPES[case.d]).split(".")[1]),
        "generate_dbias": case.dbias,
    }


def plain(result):
    return {name: result[f"{name}_tensor"] for name in OUTPUTS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_torch_wrapper(case):
    built = cases.build(case)
    want = torch_wrapper(built)
    arrays, options = entry_arguments(built)
    entry = ENTRY_POINTS[case.op]
    jitted = jax.jit(lambda arrays: entry(**arrays, **options))
    for call in (lambda: entry(**arrays, **options), lambda: jitted(arrays)):
        for _ in range(2):
            result = call()
            assert isinstance(result, TupleDict) and list(result.keys()) == [f"{name}_tensor" for name in OUTPUTS]
            assert_same(plain(result), want)
    # The documented wrapper takes the same arrays, by its own names.
    named = {call_name(name): value for name, value in jax_arguments(built).items()}
    for _ in range(2):
        result = WRAPPERS[case.op](**named, d_dtype=cases.DTYPES[case.d], generate_dbias=case.dbias)
        assert isinstance(result, TupleDict) and list(result.keys()) == [f"{name}_tensor" for name in OUTPUTS]
        assert_same(plain(result), want)


def test_defaults():
    """d_dtype follows the operands in dsReLU and is bfloat16 in dGLU; sf_vec_size is 32 with scale factors."""
    for case, dtype in ((Case(d="e4m3"), jnp.float8_e4m3fn), (Case(ab="bf16"), jnp.bfloat16)):
        built = cases.build(case)
        arrays, options = entry_arguments(built)
        chosen = {n: v for n, v in options.items() if n not in ("d_dtype", "sf_vec_size")}
        result = on_jax.grouped_gemm_dsrelu_jax_sm100(**arrays, **chosen)
        assert result["d_row_tensor"].dtype == dtype
        assert_same(plain(result), torch_wrapper(built))
    built = cases.build(Case(op="dglu"))
    arrays, options = entry_arguments(built)
    chosen = {n: v for n, v in options.items() if n not in ("d_dtype", "sf_vec_size")}
    assert_same(plain(on_jax.grouped_gemm_dglu_jax_sm100(**arrays, **chosen)), torch_wrapper(built))


POSITIONAL = {
    "dsrelu": "a c sfa padded_offsets alpha prob b_ptrs sfb_ptrs n norm_const b_dtype b_major d_dtype acc_dtype "
    "generate_dbias mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 discrete_col_sfd use_dynamic_sched "
    "use_dsrelu_reuse",
    "dglu": "a c padded_offsets alpha beta b_ptrs n prob d_dtype acc_dtype mma_tiler_mn cluster_shape_mn vector_f32 "
    "act_func linear_offset generate_dbias use_dynamic_sched",
}


@pytest.mark.parametrize("op", ENTRY_POINTS)
def test_signature(op):
    parameters = inspect.signature(ENTRY_POINTS[op]).parameters.values()
    assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == POSITIONAL[op].split()
    name = f"grouped_gemm_{op}_jax_sm100"
    assert getattr(cudnn_grouped, name) is ENTRY_POINTS[op] and name in dir(cudnn_grouped)


def pointer_case():
    built = cases.build(CASES[0])
    return entry_arguments(built), torch_wrapper(built), built


def test_pointer_tables_as_int64():
    (arrays, options), want, built = pointer_case()
    with jax.enable_x64():
        for name in ("b_ptrs", "sfb_ptrs"):
            arrays[name] = jnp.asarray(built.keywords[name].numpy())
            assert arrays[name].dtype == np.int64
        run = jax.jit(lambda arrays: on_jax.grouped_gemm_dsrelu_jax_sm100(**arrays, **options))
        assert_same(plain(run(arrays)), want)
        assert_same(plain(on_jax.grouped_gemm_dsrelu_jax_sm100(**arrays, **options)), want)


def test_numpy_pointer_tables_keep_their_upper_half():
    (arrays, options), want, built = pointer_case()
    for name in ("b_ptrs", "sfb_ptrs"):
        arrays[name] = built.keywords[name].numpy()
    assert_same(plain(on_jax.grouped_gemm_dsrelu_jax_sm100(**arrays, **options)), want)


def test_pointer_table_of_jax_arrays():
    case = CASES[0]
    (arrays, options), want, built = pointer_case()
    weights = [to_jax(tensor) for tensor in built.alive[: case.experts]]
    scales = [to_jax(in_memory_order("sfb", tensor)) for tensor in built.alive[case.experts :]]
    arrays["b_ptrs"] = on_jax.pointer_table([None, *weights[1:]])  # the first expert has no rows
    arrays["sfb_ptrs"] = on_jax.pointer_table([None, *scales[1:]])
    assert arrays["b_ptrs"].dtype == np.uint8 and arrays["b_ptrs"].shape == (8 * case.experts,)
    addresses = np.asarray(arrays["b_ptrs"]).view(np.int64)
    assert addresses.tolist() == [0, *(weight.unsafe_buffer_pointer() for weight in weights[1:])]
    assert_same(plain(on_jax.grouped_gemm_dsrelu_jax_sm100(**arrays, **options)), want)
    # An expert without rows may point anywhere.
    stale = np.array([0xDEAD, *addresses[1:]])
    assert_same(plain(on_jax.grouped_gemm_dsrelu_jax_sm100(**arrays | {"b_ptrs": stale}, **options)), want)


def test_pointer_table_refuses_what_the_operators_would_misread():
    x = jnp.ones((32, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"^arrays\[0\]: expected a concrete JAX array or None, got"):
        jax.jit(lambda x: on_jax.pointer_table([x]))(x)
    # Iterating these makes arrays whose memory is free at once.
    for one in (jnp.stack([x, x]), (2 * x for _ in range(2)), None):
        with pytest.raises(ValueError, match="^arrays: expected a list of arrays that stay alive, got"):
            on_jax.pointer_table(one)
    first, second = jax.local_devices(backend="cpu")
    with pytest.raises(ValueError, match=rf"^arrays\[1\]: expected an array on {first}, like .*, got {second}"):
        on_jax.pointer_table([x, jax.device_put(x, second)])
    mesh = jax.make_mesh((2,), ("x",), devices=[first, second])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(ValueError, match=rf"^arrays\[0\]: expected an array on one device, got {first}, {second}"):
        on_jax.pointer_table([jax.device_put(x, sharding)])
    with pytest.raises(ValueError, match=r"^arrays\[0\]: expected FP4 as uint8"):
        on_jax.pointer_table([x.astype(jnp.float4_e2m1fn)])
    turned = jax.device_put(x, Format(Layout((1, 0)), x.sharding))
    with pytest.raises(ValueError, match=r"^arrays\[0\]: expected row-major memory, got layout \(1, 0\)"):
        on_jax.pointer_table([turned])
    turned.delete()
    with pytest.raises(ValueError, match=r"^arrays\[0\]: expected an array, got one that is deleted"):
        on_jax.pointer_table([turned])


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_given_dprob_is_accumulated_onto(case):
    """Against the torch wrapper, which adds in place; the JAX argument stays as it was."""
    built = cases.build(case)
    start = torch.randn(case.rows, 1, 1)
    named = {call_name(name): value for name, value in jax_arguments(built).items()}
    dprob = to_jax(start)
    result = WRAPPERS[case.op](**named, dprob_tensor=dprob, d_dtype=cases.DTYPES[case.d])
    assert (bits(dprob) == bits(to_numpy(start))).all()
    want = start + torch_wrapper(built)["dprob"]
    want[case.offsets[-1] :] = 0.0
    assert (bits(result["dprob_tensor"]) == bits(to_numpy(want))).all()


def test_given_dprob_of_a_single_group():
    """The one expert owns all rows, whatever padded_offsets says: from JAX and from torch."""
    case = Case(op="dglu", d="bf16", offsets=(256,), m=512, options={"use_single_group_runtime_offsets": True})
    built = cases.build(case)
    start = torch.randn(512, 1, 1)
    want = start + torch_wrapper(built)["dprob"]
    named = {call_name(name): value for name, value in jax_arguments(built).items()}
    result = WRAPPERS["dglu"](**named, dprob_tensor=to_jax(start))
    assert (bits(result["dprob_tensor"]) == bits(to_numpy(want))).all()
    assert (torch_wrapper(built, dprob_tensor=start)["dprob"] == want).all() and bool((want != 0).all())


def test_tuple_dict_is_a_pytree():
    result = TupleDict(d_row_tensor=jnp.ones(2), d_col_tensor=None)
    doubled = jax.tree.map(lambda x: 2 * x, result)
    assert isinstance(doubled, TupleDict) and list(doubled.keys()) == list(result.keys())
    assert doubled[0].tolist() == [2, 2] and doubled["d_col_tensor"] is None
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(result)
    assert jax.tree_util.keystr(path) == "['d_row_tensor']"


def test_value_filter_of_bf16_dgeglu_warns_and_mask_is_the_derivative():
    built = cases.build(CASES[2])
    arrays, options = entry_arguments(built)
    masked = on_jax.grouped_gemm_dglu_jax_sm100(**arrays, **options, clamp_grad="mask")
    by_value = on_jax.grouped_gemm_dglu_jax_sm100(**arrays, **options)
    assert (bits(masked[0]) != bits(by_value[0])).any()
    assert (bits(masked["dprob_tensor"]) == bits(by_value["dprob_tensor"])).all()
