"""The experts' feed-forward of a mixture-of-experts layer in JAX, forward and backward by the fused operators."""

import functools

import jax
import jax.numpy as jnp

from ..nn.grouped_mlp import ACTIVATIONS
from .call import same_manual_axes
from .operators import operator
from .recipes import RECIPES, TokenOperand, gemm, plain, weight_gradient

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64)


def grouped_mlp(x, padded_offsets, prob, w1, w2, b1=None, b2=None, *, activation="swiglu", recipe="bf16"):
    """Two grouped GEMMs with the activation and the routing probability between: of every expert's rows,

        y = (prob * act(x @ w1.T + b1)) @ w2.T + prob * b2

    x (M, H), rows sorted by expert, M a multiple of 256. padded_offsets (L,) int32 ends, multiples of 256. prob (M,).
    w1 (L, F, H), gated (L, 2F, H) with gate and up rows in alternating blocks of 32; w2 (L, H, F); b1 (L, F or 2F) and
    b2 (L, H) or None. H and F are multiples of 32.
    activation: "srelu" | "swiglu" | "geglu" | "clamped_swiglu" | "situglu". recipe: "bf16" | "mxfp8" | "nvfp4".

    Returns (M, H) in the dtype of x; rows that belong to no expert are zero. Computed in BF16 or the recipe's formats:
    the numbers of ``cudnn_grouped.nn.GroupedMLP``. Differentiable once (``jax.custom_vjp``) with respect to x, prob,
    weights and biases; the backward is the fused operators too. Under ``shard_map`` over experts each device takes its
    own experts, rows and offsets. ValueError for a bad argument; vmap raises NotImplementedError.
    """
    _check(x, padded_offsets, prob, w1, w2, b1, b2, activation, recipe)
    arrays = [x.astype(jnp.bfloat16), padded_offsets, prob.astype(jnp.float32), w1, w2, b1, b2]
    # Here, where JAX can differentiate it: within shard_map the gradient of a replicated weight is a sum over devices.
    same, _ = same_manual_axes([array for array in arrays if array is not None])
    same = iter(same)
    return _mlp((activation, recipe), *(None if array is None else next(same) for array in arrays)).astype(x.dtype)


def _check(x, padded_offsets, prob, w1, w2, b1, b2, activation, recipe):
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}")
    arrays = {"x": x, "padded_offsets": padded_offsets, "prob": prob, "w1": w1, "w2": w2, "b1": b1, "b2": b2}
    for name, array in arrays.items():
        missing = array is None and name in ("b1", "b2")
        if not missing and not (hasattr(array, "shape") and hasattr(array, "astype")):
            raise ValueError(f"{name}: expected a JAX array, got {type(array).__name__}")
    if x.ndim != 2 or x.shape[0] % 256:
        raise ValueError(f"x: expected shape (M, H), M a multiple of 256, got {tuple(x.shape)}")
    if padded_offsets.ndim != 1 or padded_offsets.dtype != jnp.int32:
        got = f"{padded_offsets.dtype} of shape {tuple(padded_offsets.shape)}"
        raise ValueError(f"padded_offsets: expected int32 of shape (L,), got {got}")
    if w2.ndim != 3:
        raise ValueError(f"w2: expected shape (L, H, F), got {tuple(w2.shape)}")
    experts, hidden, ffn = padded_offsets.shape[0], x.shape[1], w2.shape[2]
    columns = ffn * ACTIVATIONS[activation].width
    expected = {
        "prob": (x.shape[0],), "w1": (experts, columns, hidden), "w2": (experts, hidden, ffn),
        "b1": (experts, columns), "b2": (experts, hidden),
    }  # fmt: skip
    for name, shape in expected.items():
        array = arrays[name]
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(array.shape)}")
    for name, array in arrays.items():
        if array is not None and name != "padded_offsets" and array.dtype not in _DTYPES:
            names = ", ".join(str(jnp.dtype(dtype)) for dtype in _DTYPES)
            raise ValueError(f"{name}: expected dtype {names}, got {array.dtype}")
    for name, size in (("w2", ffn), ("x", hidden)):
        if size % 32 or not size:
            raise ValueError(f"{name}: expected {'F' if name == 'w2' else 'H'} a multiple of 32 above 0, got {size}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(config, x, padded_offsets, prob, w1, w2, b1, b2):
    return _forward(config, x, padded_offsets, prob, w1, w2, b1, b2)[0]


def _forward(config, x, padded_offsets, prob, w1, w2, b1, b2):
    activation, recipe = ACTIVATIONS[config[0]], RECIPES[config[1]]
    fused = _first_layer_options(recipe) | {"c_dtype": jnp.bfloat16, "prob": prob}
    if activation.act_func is not None:
        fused |= {"act_func": activation.act_func, **activation.parameters}
    outputs = gemm(
        "srelu" if activation.act_func is None else "glu", recipe, recipe.rows(x, padded_offsets), recipe.weight(w1),
        padded_offsets, bias=None if b1 is None else plain(b1), **fused,
    )  # fmt: skip
    hidden, hidden_tokens = recipe.from_gemm(outputs, padded_offsets)
    bias = {} if b2 is None else {"prob": prob, "bias": plain(b2)}
    y = gemm("mm", recipe, hidden, recipe.weight(w2), padded_offsets, **bias)["d"]
    x_tokens = recipe.tokens(x, padded_offsets)
    return y, (x_tokens, hidden_tokens, outputs["c"], padded_offsets, prob, w1, w2, b1, b2)


def _backward(config, saved, dy):
    activation, recipe = ACTIVATIONS[config[0]], RECIPES[config[1]]
    x_tokens, hidden_tokens, c, padded_offsets, prob, w1, w2, b1, b2 = saved
    fused = _first_layer_options(recipe) | {"c": c, "prob": prob, "generate_dbias": b1 is not None}
    gated = activation.act_func is not None
    if gated:
        fused |= {"act_func": "d" + activation.act_func, **activation.parameters}
        fused["beta"] = jnp.ones(padded_offsets.shape, jnp.float32)
    else:
        fused["c_role"] = "preactivation"
    outputs = gemm(
        "dglu" if gated else "dsrelu", recipe, recipe.rows(dy, padded_offsets), recipe.weight_transposed(w2),
        padded_offsets, squared=gated, **fused,
    )  # fmt: skip
    dc, dc_tokens = recipe.from_gemm(outputs, padded_offsets)
    dx = gemm("mm", recipe, dc, recipe.weight_transposed(w1), padded_offsets)["d"]
    dw1 = weight_gradient(dc_tokens, TokenOperand(*x_tokens), padded_offsets, w1.dtype)
    dw2 = weight_gradient(recipe.tokens(dy, padded_offsets), TokenOperand(*hidden_tokens), padded_offsets, w2.dtype)
    dprob, db1, db2 = outputs["dprob"], None, None
    if b1 is not None:
        db1 = outputs["dbias"].reshape(b1.shape).astype(b1.dtype)
    if b2 is not None:
        of_bias, db2 = _bias_sums(dy, b2, padded_offsets, prob)
        dprob = dprob + of_bias
    return dx, None, dprob, dw1, dw2, db1, db2


def _bias_sums(dy, bias, padded_offsets, prob):
    """Of prob * bias in y: the sums of dy * bias along rows, (M,), and of prob * dy over each expert's rows, (L, H)."""
    outputs = operator(
        "dact", r=dy, c=plain(bias), padded_offsets=padded_offsets, prob=prob, generate_dbias=True, generate_d=False,
        c_per_expert=True, act_func="identity",
    )  # fmt: skip
    return outputs["dprob"], outputs["dbias"].reshape(bias.shape).astype(bias.dtype)


def _first_layer_options(recipe):
    options = {"d_dtype": recipe.hidden_dtype, "discrete_col_sfd": recipe.options.get("discrete_col_sfd", False)}
    return options | ({"norm_const": jnp.ones(1, jnp.float32)} if recipe.hidden_dtype == jnp.float8_e4m3fn else {})


_mlp.defvjp(_forward, _backward)
