"""The experts' feed-forward of a mixture-of-experts layer, forward and backward by the fused operators."""

import math
from typing import NamedTuple

import torch

from ..autograd import bias_sums
from .recipes import RECIPES, TokenOperand, alpha_of, gemm_arguments, ones_of, plain, weight_gradient

_OPS = torch.ops.cudnn_grouped


class Activation(NamedTuple):
    """``act_func`` of the gated operators, None for squared ReLU; and the parameters that both directions share."""

    act_func: str | None
    parameters: dict

    @property
    def width(self):
        return 1 if self.act_func is None else 2


ACTIVATIONS = {
    "srelu": Activation(None, {}),
    "swiglu": Activation("swiglu", {}),
    "geglu": Activation(
        "geglu", {"geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0, "linear_offset": 1.0}
    ),
    "clamped_swiglu": Activation(
        "geglu", {"geglu_alpha": 1.0, "glu_clamp_max": 10.0, "glu_clamp_min": -10.0, "linear_offset": 0.0}
    ),
    "situglu": Activation("situglu", {"situ_beta1": 4.0, "situ_beta2": 25.0}),
}


class _Config(NamedTuple):
    activation: str
    recipe: str


def _first_layer(recipe, activation, a, b, padded_offsets, prob, bias, norm_const):
    """C, the saved pre-activation, and D = prob * activation(C) as the recipe's operands."""
    options = {**recipe.options, **gemm_arguments(a, b), "d_dtype": recipe.hidden_dtype, "norm_const": norm_const}
    alpha = alpha_of(a, b, padded_offsets)
    if activation.act_func is None:
        outputs = _OPS.srelu(a.data, [b.data], padded_offsets, alpha, prob, bias, **options)
    else:
        options |= {"act_func": activation.act_func, **activation.parameters}
        outputs = _OPS.glu(a.data, [b.data], padded_offsets, alpha, prob, bias, **options)
    c, d, d_col, _, sfd_row, sfd_col = outputs
    return c, *recipe.from_gemm(d, d_col, sfd_row, sfd_col, padded_offsets)


def _first_layer_backward(recipe, activation, a, b, c, padded_offsets, prob, with_bias, norm_const):
    """The gradient of C as the recipe's operands, dprob (M,), dbias (L, N or 2N) or None."""
    options = {**recipe.options, **gemm_arguments(a, b), "d_dtype": recipe.hidden_dtype, "norm_const": norm_const}
    options["generate_dbias"] = with_bias
    ones = ones_of(padded_offsets)  # the backward operators take no None
    alpha = alpha_of(a, b, padded_offsets, squared=activation.act_func is not None)
    alpha = ones if alpha is None else alpha
    if activation.act_func is None:
        options["c_role"] = "preactivation"
        outputs = _OPS.dsrelu(a.data, [b.data], c, padded_offsets, alpha, prob, **options)
    else:
        options |= {"act_func": "d" + activation.act_func, **activation.parameters}
        outputs = _OPS.dglu(a.data, [b.data], c, padded_offsets, alpha, ones, prob, **options)
    d, d_col, dprob, dbias, _, sfd_row, sfd_col = outputs
    dbias = dbias.view(dbias.shape[0], -1) if with_bias else None
    return *recipe.from_gemm(d, d_col, sfd_row, sfd_col, padded_offsets), dprob, dbias


def _gemm(recipe, a, b, padded_offsets, prob=None, bias=None):
    """(M, N) bfloat16: a @ b.T, plus prob * bias."""
    options = {"sf_vec_size": recipe.options["sf_vec_size"]} if "sf_vec_size" in recipe.options else {}
    alpha = alpha_of(a, b, padded_offsets)
    return _OPS.mm(a.data, [b.data], padded_offsets, alpha, prob, bias, **gemm_arguments(a, b), **options)[1]


def _norm_const(recipe, x):
    return x.new_ones(1, dtype=torch.float32) if recipe.hidden_dtype == torch.float8_e4m3fn else None


class _GroupedMLP(torch.autograd.Function):
    """Saved: x by tokens, C, D by tokens, prob, and the parameters."""

    @staticmethod
    def forward(ctx, x, padded_offsets, prob, w1, w2, b1, b2, config):
        recipe, activation = RECIPES[config.recipe], ACTIVATIONS[config.activation]
        norm_const = _norm_const(recipe, x)
        a = recipe.rows(x, padded_offsets)
        c, hidden, hidden_tokens = _first_layer(
            recipe,
            activation,
            a,
            recipe.weight(w1),
            padded_offsets,
            prob,
            None if b1 is None else plain(b1),
            norm_const,
        )
        bias = (None, None) if b2 is None else (prob, plain(b2))
        y = _gemm(recipe, hidden, recipe.weight(w2), padded_offsets, *bias)
        ctx.config = config
        x_tokens = recipe.tokens(x, padded_offsets) if ctx.needs_input_grad[3] else TokenOperand(None)
        if not ctx.needs_input_grad[4]:
            hidden_tokens = TokenOperand(None)
        ctx.save_for_backward(*x_tokens, *hidden_tokens, c, padded_offsets, prob, w1, w2, b1, b2)
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError("GroupedMLP has no second derivatives")
        recipe, activation = RECIPES[ctx.config.recipe], ACTIVATIONS[ctx.config.activation]
        x_data, x_scales, hidden_data, hidden_scales, c, padded_offsets, prob, w1, w2, b1, b2 = ctx.saved_tensors
        # One node has the whole backward, so what it saved would live to its end. Unless the graph is kept, only these
        # names hold it now; a compiled graph frees by last use itself. The peak is then y, the gradients and dC.
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        needs_x, _, needs_prob, needs_w1, needs_w2, needs_b1, needs_b2, _ = ctx.needs_input_grad
        dx = dw1 = dw2 = db2 = None
        dy = dy.contiguous()
        dc, dc_tokens, dprob, db1 = _first_layer_backward(
            recipe, activation, recipe.rows(dy, padded_offsets), recipe.weight_transposed(w2), c, padded_offsets, prob,
            needs_b1, _norm_const(recipe, dy),
        )  # fmt: skip
        del c
        if b2 is not None and (needs_b2 or needs_prob):
            of_bias, db2 = bias_sums(dy, plain(b2), padded_offsets, prob)
            dprob, db2 = dprob + of_bias, db2.view(b2.shape).to(b2.dtype)
            del of_bias
        if needs_w2:
            dy_tokens = recipe.tokens(dy, padded_offsets)
            dw2 = weight_gradient(dy_tokens, TokenOperand(hidden_data, hidden_scales), padded_offsets, w2.dtype)
            del dy_tokens
        del hidden_data, hidden_scales
        if needs_w1:
            dw1 = weight_gradient(dc_tokens, TokenOperand(x_data, x_scales), padded_offsets, w1.dtype)
        del dc_tokens, x_data, x_scales
        if needs_x:
            dx = _gemm(recipe, dc, recipe.weight_transposed(w1), padded_offsets)
        return dx, None, dprob, dw1, dw2, None if db1 is None else db1.to(b1.dtype), db2, None


class GroupedMLP(torch.nn.Module):
    """Two grouped GEMMs with the activation and the routing probability between: of every expert's rows,

        y = (prob * act(x @ fc1_weight.T + fc1_bias)) @ fc2_weight.T + prob * fc2_bias

    num_experts L up to 1024, hidden_size H and ffn_size F, multiples of 32.
    activation: "srelu" | "swiglu" | "geglu" | "clamped_swiglu" | "situglu". Gated ones have a gate and an up matrix, whose
        rows alternate in blocks of 32 in fc1_weight.
    recipe: "bf16" | "mxfp8" | "nvfp4". Parameters keep their own dtype and are cast or quantised in each call.
    Parameters: fc1_weight (L, F or 2F, H), fc2_weight (L, H, F), and with bias=True fc1_bias (L, F or 2F), fc2_bias (L, H).

    The backward is the fused operators too. Saved per row: C in BF16 (2F or 4F bytes), x (2H bytes; H * 33/32 with mxfp8)
    and D (2F; F * 33/32 with mxfp8), and the probability.
    """

    def __init__(
        self,
        num_experts,
        hidden_size,
        ffn_size,
        activation="swiglu",
        recipe="bf16",
        bias=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if recipe not in RECIPES:
            raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {recipe!r}")
        for name, size in (("num_experts", num_experts), ("hidden_size", hidden_size), ("ffn_size", ffn_size)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: expected an int above 0, got {size!r}")
        if num_experts > 1024:
            raise ValueError(f"num_experts: expected at most 1024, got {num_experts}")
        for name, size in (("hidden_size", hidden_size), ("ffn_size", ffn_size)):
            if size % 32:
                raise ValueError(f"{name}: expected a multiple of 32, got {size}")
        self.num_experts, self.hidden_size, self.ffn_size = num_experts, hidden_size, ffn_size
        self.config = _Config(activation, recipe)
        columns = ffn_size * ACTIVATIONS[activation].width
        factory = {"device": device, "dtype": dtype}
        self.fc1_weight = torch.nn.Parameter(torch.empty(num_experts, columns, hidden_size, **factory))
        self.fc2_weight = torch.nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size, **factory))
        self.fc1_bias = torch.nn.Parameter(torch.empty(num_experts, columns, **factory)) if bias else None
        self.fc2_bias = torch.nn.Parameter(torch.empty(num_experts, hidden_size, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """Uniform in +-1/sqrt(fan in), as torch.nn.Linear."""
        for weight, bias in ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias)):
            bound = 1 / math.sqrt(weight.shape[-1])
            torch.nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                torch.nn.init.uniform_(bias, -bound, bound)

    def forward(self, x, padded_offsets, prob):
        """x (M, H) rows sorted by expert, padded_offsets (L,) int32 ends, prob (M,) float32: see ``permute``.

        Returns (M, H) in the dtype of x; rows that belong to no expert are zero. Computed in BF16 or the recipe's formats.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(f"x: expected shape (M, {self.hidden_size}), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"x: expected a floating-point dtype, got {x.dtype}")
        if x.shape[0] % 256:
            raise ValueError(f"x: expected M a multiple of 256 (see permute), got {x.shape[0]}")
        if padded_offsets.dtype != torch.int32 or tuple(padded_offsets.shape) != (self.num_experts,):
            got = f"{padded_offsets.dtype} of shape {tuple(padded_offsets.shape)}"
            raise ValueError(f"padded_offsets: expected int32 of shape ({self.num_experts},), got {got}")
        if prob.shape != x.shape[:1] or not prob.is_floating_point():
            raise ValueError(f"prob: expected float32 of shape (M,), got {prob.dtype} of shape {tuple(prob.shape)}")
        y = _GroupedMLP.apply(
            x.to(torch.bfloat16).contiguous(), padded_offsets.contiguous(), prob.float().contiguous(),
            self.fc1_weight, self.fc2_weight, self.fc1_bias, self.fc2_bias, self.config,
        )  # fmt: skip
        return y.to(x.dtype)

    def extra_repr(self):
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.ffn_size}"
        return f"{sizes}, activation={self.config.activation!r}, recipe={self.config.recipe!r}"
