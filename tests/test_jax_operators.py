"""The operators on JAX arrays give the torch operators' bits, eagerly and under jit, call after call."""

import functools
from concurrent.futures import ThreadPoolExecutor

import cases
import numpy as np
import pytest
import torch
from cases import Case
from jax_values import (
    assert_same,
    bits,
    jax,
    jax_arguments,
    jnp,
    on_jax,
    options_of,
    split,
    to_jax,
    to_numpy,
    torch_results,
)

import cudnn_grouped
from cudnn_grouped.quantize import FORMATS

GEGLU = {"act_func": "dgeglu", "linear_offset": 0.5, "geglu_alpha": 1.25, "glu_clamp_max": 3.0, "glu_clamp_min": -2.0}
CASES = [
    Case(),
    Case(d="e4m3", dbias=True, discrete_col_sfd=True, c="f32", norm=0.7),
    Case(d="e4m3", discrete_col_sfd=True, n=160),  # above 128 columns the two forms of sfd_col differ
    Case(d="e5m2", ab="e5m2", c="e4m3", offsets=(256, 256, 768), m=1024, poison=True, sf_form="flat"),
    Case(d="f32", weights="dense_n", rank=2, n=96),
    Case(d="fp16", weights="list_k", sf_form="physical", options={"c_role": "preactivation", "tanh_clamp_scale": 2.0}),
    Case(d="e4m3", weights="list_n", offsets=(0, 512), dbias=True),
    Case(d="e4m3", weights="ptrs_k", offsets=(0, 256, 512), dbias=True),
    Case(d="bf16", weights="ptrs_n", offsets=(0, 256, 256)),  # amax of an expert without rows is -inf
    Case(ab="uint8", sf="e4m3", vec=16, d="f32", dbias=True),
    Case(ab="uint8", vec=32, d="bf16", weights="ptrs_k"),
    Case(ab="bf16", d="bf16", dbias=True),
    Case(ab="bf16", d="f32", weights="dense_n", c="f32"),
    Case(offsets=(0, 0), d="e4m3", dbias=True),
    Case(op="dglu", ab="bf16", d="bf16", dbias=True),
    Case(op="dglu", ab="bf16", d="bf16", weights="ptrs_k", dbias=True, options=GEGLU),
    Case(
        op="dglu",
        d="e4m3",
        dbias=True,
        discrete_col_sfd=True,
        options={"act_func": "dsituglu", "situ_beta1": 3.0, "situ_beta2": 20.0},
    ),
    Case(op="dglu", d="bf16", dbias=True, options={"epilogue_op": "relu", **GEGLU}),
    Case(op="dglu", ab="uint8", sf="e4m3", vec=16, d="bf16", offsets=(256, 256, 768), m=1024),
    Case(op="dglu", ab="uint8", vec=16, d="fp16", weights="list_k", options={"vector_f32": True}),
    Case(
        op="dglu",
        d="e5m2",
        weights="ptrs_n",
        rank=2,
        offsets=(256,),  # not read
        m=512,
        options={"use_single_group_runtime_offsets": True},
    ),
]


def expected(case):
    built = cases.build(case)
    return built, torch_results(built)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_torch_operator(case):
    built, want = expected(case)
    arrays, rest = split(jax_arguments(built))
    run = functools.partial(on_jax.operator, case.op, **rest, **options_of(case))
    jitted = jax.jit(lambda arrays: run(**arrays))
    for call in (lambda: run(**arrays), lambda: jitted(arrays)):
        first = call()
        assert_same(first, want)
        assert_same(call(), want)  # a second call starts from clean accumulators
        assert_same(first, want)


def test_results_do_not_depend_on_threads():
    """XLA gives the engine its threads; the bits are those of one thread."""
    case = Case(op="dglu", ab="bf16", offsets=(256, 1024), n=256, dbias=True)
    built, _ = expected(case)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        want = torch_results(built)
    finally:
        torch.set_num_threads(threads)
    assert_same(on_jax.operator(case.op, **jax_arguments(built), **options_of(case)), want)


def test_constants_of_a_jitted_function():
    """Operands that are constants of the program lie where XLA puts them."""
    built, want = expected(CASES[1])
    arguments = jax_arguments(built)
    assert_same(jax.jit(lambda: on_jax.operator("dsrelu", **arguments, **options_of(CASES[1])))(), want)


def test_offsets_are_an_argument_of_the_compiled_program():
    case, other = Case(d="e4m3", dbias=True, offsets=(256, 512)), Case(d="e4m3", dbias=True, offsets=(512, 512))
    traces = []

    @jax.jit
    def run(arrays):
        traces.append(None)
        return on_jax.operator("dsrelu", **arrays, sf_vec_size=32, **options_of(case))

    for one in (case, other, case):
        built, want = expected(one)
        assert_same(run(split(jax_arguments(built))[0]), want)
    assert len(traces) == 1


def test_donated_arguments_and_cleared_caches():
    built, want = expected(CASES[1])
    arrays, rest = split(jax_arguments(built))
    run = jax.jit(
        lambda c, others: on_jax.operator("dsrelu", c=c, **others, **rest, **options_of(CASES[1])), donate_argnums=0
    )
    for _ in range(2):
        others = {name: value for name, value in arrays.items() if name != "c"}
        c = jnp.array(arrays["c"])  # a copy to give away
        assert_same(run(c, others), want)
        jax.clear_caches()


def from_threads(run):
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run) for _ in range(8)]:
            result = future.result()
    return result


def within(context):
    def wrapped(run):
        with context():
            return run()

    return wrapped


SURROUNDINGS = {
    "threads": from_threads,
    "debug_nans": within(lambda: jax.debug_nans(True)),
    "disable_jit": within(jax.disable_jit),
    "checking_leaks": within(jax.checking_leaks),
    "transfer_guard": within(lambda: jax.transfer_guard("disallow")),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings(name):
    """Several threads; JAX's settings for debugging."""
    built, want = expected(CASES[1])
    arrays, rest = split(jax_arguments(built))
    run = functools.partial(on_jax.operator, "dsrelu", **rest, **options_of(CASES[1]))
    assert_same(SURROUNDINGS[name](lambda: run(**arrays)), want)
    assert_same(SURROUNDINGS[name](lambda: jax.jit(lambda arrays: run(**arrays))(arrays)), want)


def test_control_flow_and_pmap():
    built, want = expected(CASES[1])
    arrays, rest = split(jax_arguments(built))

    def run(arrays):
        return on_jax.operator("dsrelu", **arrays, **rest, **options_of(CASES[1]))

    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
    chosen = jax.lax.cond(True, run, lambda arrays: jax.tree.map(jnp.zeros_like, run(arrays)), arrays)
    scanned = jax.lax.scan(lambda _, arrays: (None, run(arrays)), None, stacked)[1]
    mapped = jax.pmap(run, devices=jax.local_devices(backend="cpu"))(stacked)
    assert_same(chosen, want)
    for results in (scanned, mapped):
        for index in range(2):
            # NumPy's index: XLA's, on an array of two devices, adds zeros, and so changes -0 and scales of 0x00.
            assert_same({n: None if r is None else np.asarray(r)[index] for n, r in results.items()}, want)


def test_ahead_of_time_and_export():
    built, want = expected(CASES[1])
    arrays, rest = split(jax_arguments(built))
    run = jax.jit(lambda arrays: on_jax.operator("dsrelu", **arrays, **rest, **options_of(CASES[1])))
    assert_same(run.lower(arrays).compile()(arrays), want)
    check = jax.export.DisabledSafetyCheck.custom_call("cudnn_grouped_dsrelu")
    exported = jax.export.export(run, platforms=["cpu", "cuda"], disabled_checks=[check])(arrays)
    assert_same(exported.call(arrays), want)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_results_may_take_the_place_of_donated_arguments():
    """D over C and A, which have its shape and dtype: XLA may not let them meet within a call."""
    case = Case(op="dsrelu", ab="bf16", n=64, k=64, dbias=True)
    built, want = expected(case)
    arrays, rest = split(jax_arguments(built))
    run = jax.jit(lambda arrays: on_jax.operator("dsrelu", **arrays, **rest, **options_of(case)), donate_argnums=0)
    for _ in range(2):
        given = jax.tree.map(jnp.array, arrays)
        assert_same(run(given), want)


# Forward operators, weight gradient, dact, quantisers ------------------------------------------------------------

OFFSETS = (256, 256, 768)


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(operation, torch_arguments, jax_arguments):
    outputs = getattr(torch.ops.cudnn_grouped, operation).default(**torch_arguments)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    names = on_jax.call.schema(operation)[2]
    want = {n: None if tuple(o.shape) == (0,) else o for n, o in zip(names, outputs, strict=True)}
    if operation in ("quantize", "dequantize"):
        want = {n: o.permute(2, 0, 1) if o.dim() == 3 else o for n, o in want.items()}
        if "scales" in want:
            want["sfd_row"] = want.pop("scales")
    arrays, rest = split(jax_arguments)
    for run in (
        on_jax.operator,
        jax.jit(lambda operation, **a: on_jax.operator(operation, **a, **rest), static_argnums=0),
    ):
        got = run(operation, **arrays, **({} if run is not on_jax.operator else rest))
        if "scales" in got:
            got["sfd_row"] = got.pop("scales")
        assert_same(got, want)


@pytest.mark.parametrize("operation", ["srelu", "glu", "mm"])
@pytest.mark.parametrize("scaled", [False, True])
def test_forward_operators(operation, scaled):
    a, w, offsets = normal(1024, 64), normal(3, 128, 64, seed=1), torch.tensor(OFFSETS, dtype=torch.int32)
    bias, prob, alpha = normal(3, 128, seed=2), torch.rand(1024), torch.tensor([1.5, -1.0, 0.5])
    common = {"sf_vec_size": 32, "d_dtype": torch.float8_e4m3fn, "discrete_col_sfd": True} if scaled else {}
    common |= {"generate_c": True, "c_dtype": torch.float32}
    tensors = {"padded_offsets": offsets, "alpha": alpha, "prob": prob, "bias": bias}
    arrays = {name: to_jax(tensor) for name, tensor in tensors.items()}
    if scaled:
        (a, sfa), (b, sfb) = cudnn_grouped.quantize(a), cudnn_grouped.quantize(w.permute(1, 2, 0))
        norm = torch.tensor([0.5])
        tensors |= {"a": a, "b": [b], "sfa": sfa, "sfb": [sfb], "norm_const": norm}
        (ja, jsfa), (jb, jsfb) = on_jax.quantize(to_jax(normal(1024, 64))), on_jax.quantize(to_jax(w))
        arrays |= {"a": ja, "b": jb, "sfa": jsfa, "sfb": jsfb, "norm_const": to_jax(norm)}
    else:
        tensors |= {"a": a, "b": [w.permute(1, 2, 0)]}
        arrays |= {"a": to_jax(a), "b": to_jax(w)}
    check(operation, tensors | common, arrays | common)


def test_dact():
    r, c, offsets = normal(1024, 64), normal(1024, 128, seed=1), torch.tensor(OFFSETS, dtype=torch.int32)
    tensors = {"r": r, "c": c, "padded_offsets": offsets, "prob": torch.rand(1024)}
    common = {"act_func": "dgeglu", "generate_dbias": True, "d_dtype": torch.float32, "linear_offset": 1}
    check("dact", tensors | common, {name: to_jax(tensor) for name, tensor in tensors.items()} | common)


def test_dact_without_d():
    r, c, offsets = normal(1024, 64), normal(3, 64, seed=1), torch.tensor(OFFSETS, dtype=torch.int32)
    tensors = {"r": r, "c": c, "padded_offsets": offsets, "prob": torch.rand(1024)}
    common = {"act_func": "identity", "generate_dbias": True, "generate_d": False, "c_per_expert": True}
    check("dact", tensors | common, {name: to_jax(tensor) for name, tensor in tensors.items()} | common)


def test_dequantized_weights():
    """BF16 weights beside a block-scaled A."""
    w, offsets = normal(3, 128, 64, seed=1), torch.tensor(OFFSETS, dtype=torch.int32)
    a, sfa = cudnn_grouped.quantize(normal(1024, 64))
    ja, jsfa = on_jax.quantize(to_jax(normal(1024, 64)))
    tensors = {"a": a, "b": [w.permute(1, 2, 0)], "sfa": sfa, "padded_offsets": offsets}
    arrays = {"a": ja, "b": to_jax(w), "sfa": jsfa, "padded_offsets": to_jax(offsets)}
    check("mm", tensors | {"sf_vec_size": 32}, arrays | {"sf_vec_size": 32})


@pytest.mark.parametrize("format", [None, "mxfp8", "mxfp4"])
def test_weight_gradient(format):
    """b has more than 128 columns: below, the scales of each expert lie where those of all rows do."""
    a, b, offsets = normal(1024, 64), normal(1024, 160, seed=1), torch.tensor(OFFSETS, dtype=torch.int32)
    tensors = {
        "padded_offsets": offsets,
        "global_scale_a": torch.tensor([0.5, 2.0, -1.0]),
        "global_scale_b": torch.tensor([3.0, 0.25, 1.5]),
    }
    arrays = {name: to_jax(tensor) for name, tensor in tensors.items()}
    common = {"d_dtype": torch.float32}
    if format is None:
        tensors |= {"a": a.t(), "b": b}
        arrays |= {"a": to_jax(a), "b": to_jax(b)}
    else:
        common["sf_vec_size"] = 32
        packed = format == "mxfp4"
        for name, x in (("a", a), ("b", b)):
            data, scales = cudnn_grouped.quantize(x, format, axis="col", padded_offsets=offsets)
            turned = (name == "a") != packed  # FP4 comes transposed: pairs along the tokens
            tensors |= {name: data.t() if turned else data, f"sf{name}": scales}
            data, scales = on_jax.quantize(to_jax(x), format, axis="col", padded_offsets=arrays["padded_offsets"])
            arrays |= {name: data, f"sf{name}": scales}
    check("wgrad", tensors | common, arrays | common)


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("rank", [2, 3])
def test_quantize_and_dequantize(axis, format, rank):
    x = normal(3, 64, 96, dtype=torch.float32) if rank == 3 else normal(64, 96)
    view = x.permute(1, 2, 0) if rank == 3 else x
    norm = torch.tensor([1.25])
    options = {**FORMATS[format]._asdict(), "axis": axis}
    check(
        "quantize", {"x": view, "norm_const": norm, **options}, {"x": to_jax(x), "norm_const": to_jax(norm), **options}
    )
    data, scales = cudnn_grouped.quantize(view, format, axis=axis, norm_const=norm)
    options = {"sf_vec_size": FORMATS[format].sf_vec_size, "axis": axis, "dtype": torch.bfloat16}
    got = on_jax.quantize(to_jax(x), format, axis=axis, norm_const=to_jax(norm))
    arrays = {"data": got[0], "scales": got[1], "norm_const": to_jax(norm)}
    check("dequantize", {"data": data, "scales": scales, "norm_const": norm, **options}, arrays | options)
    back = on_jax.dequantize(*got, format, axis=axis, norm_const=to_jax(norm))
    want = cudnn_grouped.dequantize(data, scales, format, axis=axis, norm_const=norm)
    want = want.permute(2, 0, 1) if rank == 3 else want
    assert back.shape == x.shape and back.dtype == np.float32
    assert (bits(back) == bits(to_numpy(want))).all()
