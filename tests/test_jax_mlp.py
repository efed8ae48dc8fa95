"""The differentiable feed-forward in JAX: the bits of nn.GroupedMLP forward and backward, and shard_map over experts."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from jax_values import bits, jax, jnp, on_jax, to_jax, to_numpy

from cudnn_grouped.nn import GroupedMLP
from cudnn_grouped.nn.grouped_mlp import ACTIVATIONS

HIDDEN, FFN, OFFSETS, ROWS = 64, 96, (256, 256, 768), 1024
NAMES = ("y", "dx", "dprob", "dw1", "dw2", "db1", "db2")


def problem(activation, recipe, bias=True, dtype=torch.float32, seed=0):
    """(torch results by name, JAX arguments, dy)."""
    torch.manual_seed(seed)
    layer = GroupedMLP(len(OFFSETS), HIDDEN, FFN, activation=activation, recipe=recipe, bias=bias, dtype=dtype)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    x, prob = torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True), torch.rand(ROWS, requires_grad=True)
    dy = torch.randn(ROWS, HIDDEN, dtype=dtype)
    y = layer(x, offsets, prob)
    y.backward(dy)
    parameters = [layer.fc1_weight, layer.fc2_weight, *([layer.fc1_bias, layer.fc2_bias] if bias else [])]
    results = [y, x.grad, prob.grad, *(parameter.grad for parameter in parameters)]
    arguments = [to_jax(x), to_jax(prob), *map(to_jax, parameters)]
    return dict(zip(NAMES, results)), to_jax(offsets), arguments, to_jax(dy)


def forward_and_backward(activation, recipe, offsets, arguments, dy):
    def layer(x, prob, *parameters):
        return on_jax.grouped_mlp(x, offsets, prob, *parameters, activation=activation, recipe=recipe)

    y, backward = jax.vjp(layer, *arguments)
    return y, *backward(dy)


def assert_bits(got, want):
    for (name, tensor), array in zip(want.items(), got, strict=True):
        expected = to_numpy(tensor)
        assert array.shape == expected.shape and array.dtype == expected.dtype, name
        assert (bits(array) == bits(expected)).all(), name


COMBINATIONS = [
    *(("bf16", activation) for activation in ACTIVATIONS),
    *(("mxfp8", activation) for activation in ("srelu", "swiglu", "situglu")),
    *(("nvfp4", activation) for activation in ("srelu", "situglu")),
]


@pytest.mark.parametrize("recipe, activation", COMBINATIONS)
def test_bits_of_grouped_mlp(recipe, activation):
    want, offsets, arguments, dy = problem(activation, recipe)
    run = jax.jit(functools.partial(forward_and_backward, activation, recipe))
    for _ in range(2):
        assert_bits(run(offsets, arguments, dy), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagerly_and_without_biases(dtype):
    want, offsets, arguments, dy = problem("swiglu", "mxfp8", bias=False, dtype=dtype)
    assert_bits(forward_and_backward("swiglu", "mxfp8", offsets, arguments, dy), want)


def test_donated_parameters_and_cleared_caches():
    """A training step that gives its parameters away, twice over, with the caches cleared between."""
    want, offsets, arguments, dy = problem("swiglu", "bf16")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(parameters, x, prob):
        def loss(parameters):
            return (on_jax.grouped_mlp(x, offsets, prob, *parameters) * dy).sum()

        gradients = jax.grad(loss)(parameters)
        return [p - 0.5 * g for p, g in zip(parameters, gradients)], gradients

    x, prob, *parameters = arguments
    for _ in range(2):
        _, gradients = step([jnp.array(p) for p in parameters], x, prob)
        assert_bits(gradients, {name: want[name] for name in NAMES[3:]})
        jax.clear_caches()


def test_checkpointed_layers_in_a_scan():
    """jax.checkpoint recomputes the forward, lax.scan carries it: the gradients stay the same."""
    _, offsets, (x, prob, *parameters), dy = problem("swiglu", "bf16", bias=False)
    layers = [jnp.stack([p, p]) for p in parameters]

    def loss(layers, wrap):
        def body(x, layer):
            return on_jax.grouped_mlp(x, offsets, prob, *layer), None

        return (jax.lax.scan(wrap(body), x, layers)[0] * dy).sum()

    plain = jax.jit(jax.grad(lambda layers: loss(layers, lambda f: f)))(layers)
    again = jax.jit(jax.grad(lambda layers: loss(layers, jax.checkpoint)))(layers)
    for one, other in zip(plain, again):
        assert (bits(one) == bits(other)).all() and np.isfinite(one).all() and np.asarray(one).any()


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_experts(check_vma):
    """Two devices, each with half of the experts and their rows: the bits of one device with all of them."""
    half = (256, 512)
    torch.manual_seed(0)
    layer = GroupedMLP(4, HIDDEN, FFN, bias=True)
    parameters = [to_jax(p) for p in (layer.fc1_weight, layer.fc2_weight, layer.fc1_bias, layer.fc2_bias)]
    x, dy = to_jax(torch.randn(2 * 768, HIDDEN)), to_jax(torch.randn(2 * 768, HIDDEN))
    prob = to_jax(torch.rand(2 * 768))
    offsets = jnp.array([*half, *half], jnp.int32)  # each device's own, from its first row

    mesh = jax.make_mesh((2,), ("expert",), devices=jax.local_devices(backend="cpu"))
    over_experts = jax.sharding.PartitionSpec("expert")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=over_experts, out_specs=over_experts, check_vma=check_vma)
    def both(offsets, arguments, dy):
        return forward_and_backward("swiglu", "mxfp8", offsets, arguments, dy)

    sharding = jax.sharding.NamedSharding(mesh, over_experts)
    shared = jax.device_put((offsets, [x, prob, *parameters], dy), sharding)
    for _ in range(2):
        got = jax.jit(both)(*shared)
        assert {d.id for d in got[0].devices()} == {d.id for d in mesh.devices.flat}
        for index, rows in enumerate((slice(0, 768), slice(768, None))):
            experts = slice(2 * index, 2 * index + 2)
            own = [x[rows], prob[rows], *(p[experts] for p in parameters)]
            want = forward_and_backward("swiglu", "mxfp8", jnp.array(half, jnp.int32), own, dy[rows])
            for name, one, other in zip(NAMES, got, want, strict=True):
                part = rows if name in ("y", "dx", "dprob") else experts
                assert (bits(np.asarray(one)[part]) == bits(other)).all(), name


def test_more_devices_than_threads():
    """Handlers that occupy all of XLA's threads must not wait for one another: here four on one core."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import jax, jax.numpy as jnp\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "from cudnn_grouped.jax import operator\n"
        "mesh, P = jax.make_mesh((4,), ('rows',)), jax.sharding.PartitionSpec('rows')\n"
        "split = lambda *shape: jax.device_put(jnp.ones(shape, jnp.bfloat16), jax.sharding.NamedSharding(mesh, P))\n"
        "offsets = jnp.array([512], jnp.int32)\n"
        "run = lambda a, b: operator('mm', a=a, b=b, padded_offsets=offsets)['d']\n"
        "run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P, P), out_specs=P))\n"
        "for _ in range(20): d = run(split(2048, 64), split(4, 256, 64))\n"
        "print(float(d.min()), float(d.max()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["64.0", "64.0"], result.stderr


def test_replicated_weights_within_shard_map():
    """Data parallel: rows are split, weights are not, and their gradients are the sums over the devices."""
    _, offsets, (x, prob, *parameters), dy = problem("swiglu", "bf16")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.local_devices(backend="cpu"))
    P = jax.sharding.PartitionSpec

    def loss(parameters, x, prob, dy):
        return (on_jax.grouped_mlp(x, offsets, prob, *parameters) * dy).sum()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data"), P("data")), out_specs=P())
    def gradients(parameters, x, prob, dy):
        return jax.grad(loss)(parameters, x, prob, dy)

    twice = lambda a: jnp.concatenate([a, a])  # noqa: E731
    rows = jax.device_put([twice(x), twice(prob), twice(dy)], jax.sharding.NamedSharding(mesh, P("data")))
    got = jax.jit(gradients)(jax.device_put(parameters, jax.sharding.NamedSharding(mesh, P())), *rows)
    want = jax.grad(loss)(parameters, x, prob, dy)
    for one, other in zip(got, want):
        assert (bits(one) == bits(2 * other)).all() and np.asarray(other).any()


def test_second_derivatives_are_refused():
    _, offsets, (x, prob, *parameters), _ = problem("swiglu", "bf16")

    def loss(x):
        return on_jax.grouped_mlp(x, offsets, prob, *parameters).sum()

    with pytest.raises(NotImplementedError, match="the operator has no derivative"):
        jax.grad(lambda x: jnp.square(jax.grad(loss)(x)).sum())(x)


def test_vmap_is_refused():
    _, offsets, (x, prob, *parameters), _ = problem("swiglu", "bf16")
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        jax.vmap(lambda x: on_jax.grouped_mlp(x, offsets, prob, *parameters))(jnp.stack([x, x]))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation": "gelu"}, "^activation: expected one of srelu"),
        ({"recipe": "int8"}, "^recipe: expected one of bf16, mxfp8, nvfp4"),
        ({"x": np.zeros((1000, HIDDEN), np.float32)}, "^x: expected shape"),
        ({"x": np.zeros((ROWS, HIDDEN), np.int32)}, "^x: expected dtype float32, .*, got int32"),
        (
            {"w1": np.zeros((3, 2 * FFN, HIDDEN), jnp.float8_e4m3fn)},
            "^w1: expected dtype float32, .*, got float8_e4m3fn",
        ),
        ({"activation": ["srelu"]}, r"^activation: expected one of srelu, .*, got \['srelu'\]"),
        ({"recipe": None}, "^recipe: expected one of bf16, .*, got None"),
        (
            {"w1": np.zeros((3, 0, HIDDEN), np.float32), "w2": np.zeros((3, HIDDEN, 0), np.float32)},
            "^w2: expected F a multiple of 32 above 0, got 0",
        ),
        ({"x": [1.0]}, "^x: expected a JAX array, got list"),
        ({"padded_offsets": np.zeros(3, np.float32)}, r"^padded_offsets: expected int32 of shape \(L,\), got float32"),
        ({"padded_offsets": np.zeros(4, np.int32)}, "^w1: expected shape"),
        ({"prob": np.zeros((ROWS, 1), np.float32)}, "^prob: expected shape"),
        ({"w1": np.zeros((3, FFN, HIDDEN), np.float32)}, r"^w1: expected shape \(3, 192, 64\), got \(3, 96, 64\)"),
        ({"w2": np.zeros((HIDDEN, FFN), np.float32)}, r"^w2: expected shape \(L, H, F\)"),
        (
            {"w1": np.zeros((3, 80, HIDDEN), np.float32), "w2": np.zeros((3, HIDDEN, 40), np.float32)},
            "^w2: expected F a multiple of 32",
        ),
        ({"b2": np.zeros((3, FFN), np.float32)}, "^b2: expected shape"),
    ],
)
def test_bad_argument(changes, message):
    arguments = {
        "x": jnp.zeros((ROWS, HIDDEN)), "padded_offsets": jnp.array(OFFSETS, jnp.int32), "prob": jnp.zeros(ROWS),
        "w1": jnp.zeros((3, 2 * FFN, HIDDEN)), "w2": jnp.zeros((3, HIDDEN, FFN)),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        on_jax.grouped_mlp(**arguments | changes)
