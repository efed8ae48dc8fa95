"""JAX on a GPU: the bits of the torch operators there, and one GPU and one process for JAX and torch."""

import functools
import threading
from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from cases import Case
from gpu_device import DEVICE, DRY_RUN, Moved, synchronize
from jax_values import assert_same, bits, jax, jax_arguments, jnp, on_jax, options_of, split, to_jax, to_numpy
from test_jax_errors import XLA_ERRORS
from test_jax_mlp import assert_bits, forward_and_backward
from test_jax_operators import CASES, torch_results

from cudnn_grouped.nn import GroupedMLP

pytestmark = pytest.mark.gpu


@functools.cache
def device_or_reason():
    if DRY_RUN:
        return jax.local_devices(backend="cpu")[0]
    try:
        return jax.devices("cuda")[DEVICE.index or 0]
    except RuntimeError as error:
        return f"JAX has no CUDA backend: {str(error).splitlines()[0]}"


@pytest.fixture
def device():
    """JAX's name of the tests' GPU, as its default device."""
    found = device_or_reason()
    if isinstance(found, str):
        pytest.skip(found)
    with jax.default_device(found):
        yield found


def on_device(case, device):
    """(torch results on the GPU, arguments of the JAX operator there, what must stay alive)."""
    built = cases.build(case)
    moved = Moved(pointed=built.alive)
    positional, keywords = moved.tree((built.positional, built.keywords))
    there = replace(built, positional=positional, keywords=keywords)
    tables = {name: keywords[name].cpu() for name in ("b_ptrs", "sfb_ptrs") if name in keywords}
    arguments = jax_arguments(replace(built, keywords=built.keywords | tables), device)
    want = torch_results(there)
    synchronize()
    return want, arguments, moved


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_torch_operator(case, device):
    want, arguments, _alive = on_device(case, device)
    arrays, rest = split(arguments)
    run = functools.partial(on_jax.operator, case.op, **rest, **options_of(case))
    jitted = jax.jit(lambda arrays: run(**arrays))
    for call in (lambda: run(**arrays), lambda: jitted(arrays)):
        for _ in range(2):
            got = call()
            assert got["dprob"].devices() == {device}
            assert_same(got, want)


@pytest.mark.parametrize(
    "recipe, activation",
    [("bf16", "swiglu"), ("bf16", "srelu"), ("mxfp8", "geglu"), ("nvfp4", "swiglu"), ("nvfp4", "srelu")],
)
def test_bits_of_grouped_mlp(recipe, activation, device):
    torch.manual_seed(0)
    layer = GroupedMLP(3, 256, 128, activation=activation, recipe=recipe, bias=True, device=DEVICE)
    offsets = torch.tensor([256, 256, 768], dtype=torch.int32, device=DEVICE)
    x, dy = torch.randn(1024, 256, device=DEVICE, requires_grad=True), torch.randn(1024, 256, device=DEVICE)
    prob = torch.rand(1024, device=DEVICE, requires_grad=True)
    y = layer(x, offsets, prob)
    y.backward(dy)
    parameters = [layer.fc1_weight, layer.fc2_weight, layer.fc1_bias, layer.fc2_bias]
    want = {"y": y, "dx": x.grad, "dprob": prob.grad} | {f"d{i}": p.grad for i, p in enumerate(parameters)}
    arguments = [to_jax(tensor, device) for tensor in (x, prob, *parameters)]
    run = jax.jit(functools.partial(forward_and_backward, activation, recipe))
    for _ in range(2):
        assert_bits(run(to_jax(offsets, device), arguments, to_jax(dy, device)), want)
        jax.clear_caches()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_training_step_lowers_the_loss(recipe, device):
    keys = jax.random.split(jax.random.key(0), 4)
    x, target = (jax.random.normal(key, (1024, 256)) for key in keys[:2])
    weights = [jax.random.normal(keys[2], (4, 256, 256)) / 16, jax.random.normal(keys[3], (4, 256, 128)) / 12]
    offsets, prob = jnp.array([256, 512, 512, 1024], jnp.int32), jnp.ones(1024)

    def loss(weights):
        return jnp.square(on_jax.grouped_mlp(x, offsets, prob, *weights, recipe=recipe) - target).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights):
        value, gradients = jax.value_and_grad(loss)(weights)
        return value, [w - 30.0 * g for w, g in zip(weights, gradients)]

    losses = []
    for _ in range(10):
        value, weights = step(weights)
        losses.append(float(value))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def late(x):
    """x, when the stream has worked for a while."""
    total = jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), jnp.eye(512))
    return x + (total[0, 1] * 0.0).astype(x.dtype)


def test_order_within_a_program(device):
    """Inputs that the program itself makes, and results that it uses, are ordered with the call on XLA's stream."""
    case = Case(d="e4m3", dbias=True, discrete_col_sfd=True, n=256, k=512, offsets=(256, 2048))
    want, arguments, _alive = on_device(case, device)
    arrays, rest = split(arguments)

    @jax.jit
    def run(c, others):
        got = on_jax.operator("dsrelu", c=late(c), **others, **rest, **options_of(case))
        return got, got["dprob"] * 2

    others = {name: value for name, value in arrays.items() if name != "c"}
    for _ in range(3):
        got, doubled = run(arrays["c"], others)
        assert_same(got, want)
        assert (bits(doubled) == bits(2 * np.asarray(got["dprob"]))).all()


def test_values_are_checked_on_request(device, monkeypatch):
    want, arguments, _alive = on_device(CASES[1], device)
    arrays, rest = split(arguments)

    @jax.jit
    def run(arrays):
        offsets = late(arrays["padded_offsets"])  # to be read on XLA's stream, not before
        return on_jax.operator("dsrelu", **arrays | {"padded_offsets": offsets}, **rest, **options_of(CASES[1]))

    monkeypatch.setenv("CUDNN_GROUPED_VALIDATE", "1")
    bad = arrays | {"padded_offsets": jax.device_put(np.array([100, 512], np.int32), device)}
    for _ in range(2):
        with pytest.raises(XLA_ERRORS, match=r"padded_offsets\[0\]: expected a multiple of 256, got 100"):
            jax.block_until_ready(run(bad))
        assert_same(run(arrays), want)


def test_memory_of_torch_as_an_operand(device):
    """Through DLPack, without a copy."""
    case = Case(op="dglu", ab="bf16", dbias=True)
    want, arguments, moved = on_device(case, device)
    built = cases.build(case)
    a = Moved()(built.positional[0]).contiguous()
    synchronize()
    shared = jnp.from_dlpack(a)
    assert shared.unsafe_buffer_pointer() == a.data_ptr() and shared.devices() == {device}
    assert_same(on_jax.operator("dglu", **arguments | {"a": shared}, **options_of(case)), want)


def test_torch_and_jax_share_the_gpu_and_the_process(device):
    """Turn by turn and at once from two threads: both keep their bits, and torch its current stream and device."""
    case = Case(d="e4m3", dbias=True, n=128, k=256, offsets=(256, 1024))
    want, arguments, _alive = on_device(case, device)
    arrays, rest = split(arguments)
    run = jax.jit(lambda arrays: on_jax.operator("dsrelu", **arrays, **rest, **options_of(case)))
    built = cases.build(case)
    positional, keywords = Moved().tree((built.positional, built.keywords))
    there = replace(built, positional=positional, keywords=keywords)
    before = None if DRY_RUN else (torch.cuda.current_device(), torch.cuda.current_stream())

    def torch_turn():
        got = torch_results(there)
        synchronize()
        for name, tensor in want.items():
            assert tensor is None or (bits(to_numpy(got[name])) == bits(to_numpy(tensor))).all(), name

    def jax_turn():
        assert_same(run(arrays), want)

    for _ in range(3):
        jax_turn()
        torch_turn()
    failures = []

    def many(turn):
        try:
            for _ in range(20):
                turn()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=many, args=(turn,)) for turn in (jax_turn, torch_turn, jax_turn, torch_turn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    if not DRY_RUN:
        assert before == (torch.cuda.current_device(), torch.cuda.current_stream())
        assert torch.ones(8, device=DEVICE).sum().item() == 8


def test_large_workspaces_come_and_go(device):
    """XLA's allocator gives the scratch memory; many calls in flight need no more than one call's at a time."""
    case = Case(d="bf16", n=1024, k=2048, offsets=(512, 2048))
    want, arguments, _alive = on_device(case, device)
    arrays, rest = split(arguments)
    run = jax.jit(lambda arrays: on_jax.operator("dsrelu", **arrays, **rest, **options_of(case)))
    for got in [run(arrays) for _ in range(20)]:
        assert_same(got, want)
