"""Trains a small mixture-of-experts model in JAX on real text, with the experts in BF16, MXFP8 or NVFP4.

    python examples/jax_moe.py --recipe mxfp8      # 100 steps, about a minute on two cores

Predicts the next byte from the bytes before it: embeddings, a layer of routed experts (``cudnn_grouped.jax.grouped_mlp``)
and a linear head, with Adam. One jitted step, whose parameters are donated; the router, the permutation of tokens to
padded expert rows and back, and both GEMMs of every expert are inside it. Runs on JAX's default device.
"""

import argparse
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_grouped.jax import grouped_mlp
from cudnn_grouped.nn.grouped_mlp import ACTIVATIONS

ALIGNMENT = 256  # an expert's rows


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=["bf16", "mxfp8", "nvfp4"], default="mxfp8")
    parser.add_argument("--activation", choices=list(ACTIVATIONS), default="swiglu")
    parser.add_argument("--text", type=Path, help="a file to learn; this Python's argparse module by default")
    sizes = {"steps": 100, "batch": 512, "context": 8, "width": 32, "ffn": 256, "experts": 8, "top_k": 2, "seed": 0}
    for name, value in sizes.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, metavar="N", help=f"default {value}"
        )
    parser.add_argument("--learning-rate", type=float, default=3e-3, metavar="R", help="default 3e-3")
    return parser.parse_args(argv)


def plan(experts, num_experts):
    """Where each copy of a token goes: its row (T, k), the token of each row (M,), T for padding, and padded_offsets (L,).

    M depends on shapes alone: room for all copies and to pad every expert to a multiple of 256 rows.
    """
    tokens, slots = experts.shape
    flat = experts.reshape(-1)
    counts = jnp.bincount(flat, length=num_experts)
    padded = -(-counts // ALIGNMENT) * ALIGNMENT
    ends = jnp.cumsum(padded)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    row = (ends - padded)[expert] + jnp.arange(flat.size) - (jnp.cumsum(counts) - counts)[expert]
    rows = (-(-flat.size // ALIGNMENT) + num_experts) * ALIGNMENT
    token_of_row = jnp.full(rows, tokens).at[row].set(order // slots)
    return jnp.zeros_like(row).at[order].set(row).reshape(tokens, slots), token_of_row, ends.astype(jnp.int32)


def moe(parameters, x, options):
    """x (T, H) through the top-k experts of each token; and the load-balancing loss (Switch Transformer, eq. 4)."""
    router_prob = jax.nn.softmax(x @ parameters["router"])
    prob, experts = jax.lax.top_k(router_prob, options.top_k)
    prob = prob / prob.sum(-1, keepdims=True)
    row_of, token_of_row, padded_offsets = plan(experts, options.experts)
    rows = jnp.concatenate([x, jnp.zeros_like(x[:1])])[token_of_row]
    row_prob = jnp.zeros(rows.shape[0]).at[row_of].set(prob)
    y = grouped_mlp(
        rows, padded_offsets, row_prob, parameters["fc1"], parameters["fc2"],
        activation=options.activation, recipe=options.recipe,
    )  # fmt: skip
    load = jnp.bincount(experts.reshape(-1), length=options.experts) / experts.size
    return y[row_of].sum(1), options.experts * (load * router_prob.mean(0)).sum()


def loss_of(parameters, windows, options):
    """Cross entropy of the last byte of each window (T, context + 1), in nats, plus the balance loss."""
    x = parameters["embedding"][windows[:, :-1]].reshape(len(windows), -1)
    normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    y, balance = moe(parameters, normal, options)
    log_prob = jax.nn.log_softmax((x + y) @ parameters["head"])
    cross_entropy = -jnp.take_along_axis(log_prob, windows[:, -1:], axis=1).mean()
    return cross_entropy + 0.01 * balance, cross_entropy


def initial_parameters(options):
    hidden, keys = options.context * options.width, jax.random.split(jax.random.key(options.seed), 5)
    columns = options.ffn * ACTIVATIONS[options.activation].width
    shapes = {
        "embedding": ((256, options.width), 1.0),
        "router": ((hidden, options.experts), hidden**-0.5),
        "fc1": ((options.experts, columns, hidden), hidden**-0.5),
        "fc2": ((options.experts, hidden, options.ffn), options.ffn**-0.5),
        "head": ((hidden, 256), hidden**-0.5),
    }
    return {name: std * jax.random.normal(key, shape) for key, (name, (shape, std)) in zip(keys, shapes.items())}


def make_step(options):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, windows):
        parameters, mean, square, count = state
        gradients, cross_entropy = jax.grad(loss_of, has_aux=True)(parameters, windows, options)
        count += 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradients)
        parameters = jax.tree.map(
            lambda p, m, s: p - options.learning_rate * m / (1 - 0.9**count) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8),
            parameters, mean, square,
        )  # fmt: skip
        return (parameters, mean, square, count), cross_entropy

    return step


def main(argv=None):
    """Train; returns the cross entropy of every step, the same numbers in every run with the same arguments."""
    options = parse_arguments(argv)
    text = np.frombuffer((options.text or Path(argparse.__file__)).read_bytes(), np.uint8)
    if len(text) <= options.context:
        raise ValueError(f"text: expected more than {options.context} bytes, got {len(text)}")
    random = np.random.default_rng(options.seed)
    parameters = initial_parameters(options)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = (parameters, zeros, jax.tree.map(jnp.zeros_like, parameters), jnp.zeros(()))
    step, losses = make_step(options), []
    for number in range(1, options.steps + 1):
        starts = random.integers(0, len(text) - options.context, options.batch)
        windows = text[starts[:, None] + np.arange(options.context + 1)].astype(np.int32)
        state, cross_entropy = step(state, windows)
        losses.append(float(cross_entropy))
        if number % 10 == 0 or number == options.steps:
            print(f"step {number:4}  {np.mean(losses[-10:]) / np.log(2):.3f} bits per byte", flush=True)
    return losses


if __name__ == "__main__":
    main(sys.argv[1:])
