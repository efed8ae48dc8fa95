"""Autograd of the forward operators, by the fused backward operators; version counters of what operators write into.

srelu: dsrelu recomputes the pre-activation. glu: dact at the saved C. mm: a GEMM with the transposed weights.
Then, in all three, the gradient of A is a GEMM with the transposed weights and that of B is wgrad. Block-scaled operands
are constants here: only prob and bias have gradients then. alpha is a constant always.
"""

import torch
from torch.utils._pytree import tree_map_only

_OPS = torch.ops.cudnn_grouped
_ACTIVATION = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "situ_beta1", "situ_beta2")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Saved:
    """What a backward needs of its forward call, through ctx.save_for_backward."""

    @staticmethod
    def keep(ctx, inputs, keywords, output, with_c):
        a, b, padded_offsets, alpha, prob, bias, sfa, sfb = inputs[:8]
        c, d = output[0], output[1]
        if with_c and c.dim() == 1:
            raise RuntimeError("generate_c: expected True for gradients (the saved C is needed), got False")
        if alpha is not None and alpha.requires_grad:
            raise RuntimeError(
                "alpha: expected a tensor that needs no gradient (a constant), got one that requires grad"
            )
        if a.dtype == torch.bfloat16 and b and b[0].shape[0] % 8:
            raise RuntimeError(f"b: expected N a multiple of 8 for gradients (rows of 16 bytes), got {b[0].shape[0]}")
        if a.dtype != torch.bfloat16 and any(w.requires_grad and w.dtype == torch.bfloat16 for w in b):
            raise RuntimeError(
                "b: expected tensors that need no gradient with a block-scaled a, got one that requires grad"
            )
        if not b and (a.dtype == torch.bfloat16 or not with_c):  # at a saved C, prob and bias need no weights
            raise RuntimeError("b: expected tensors for gradients, got b_ptrs")
        constants = [x for x in (c, d) if x.dtype in _FP8 or x.dim() == 1]
        ctx.mark_non_differentiable(*output[2:], *constants)
        ctx.set_materialize_grads(False)
        ctx.counts = (len(b), None if sfb is None else len(sfb))
        ctx.options = keywords
        ctx.save_for_backward(a, padded_offsets, alpha, prob, bias, c if with_c else None, sfa, *b, *(sfb or []))

    def __init__(self, ctx):
        tensors = ctx.saved_tensors
        self.a, self.padded_offsets, self.alpha, self.prob, self.bias, self.c, self.sfa = tensors[:7]
        experts, scales = ctx.counts
        self.b, self.sfb = list(tensors[7 : 7 + experts]), None if scales is None else list(tensors[7 + experts :])
        self.options = ctx.options
        self.differentiable = self.a.dtype == torch.bfloat16


def _rows(x):
    return x.reshape(x.shape[0], x.shape[1])


def _of_a(saved, dx):
    """Gradient of A: alpha * dx @ B."""
    transposed = [weight.transpose(0, 1) for weight in saved.b]
    return _OPS.mm(dx, transposed, saved.padded_offsets, saved.alpha, d_dtype=saved.a.dtype)[1]


def _of_b(saved, dx):
    """Gradients of B: alpha * dx.T @ A of each expert."""
    gradients = _OPS.wgrad(dx.t(), _rows(saved.a), saved.padded_offsets, global_scale_a=saved.alpha)
    if len(saved.b) == 1 and saved.b[0].dim() == 3:
        return [gradients.permute(1, 2, 0)]
    return [gradient.view(weight.shape) for gradient, weight in zip(gradients.unbind(0), saved.b, strict=True)]


def _sums(saved, x, other=None, prob=None):
    """In a fixed order: (M,) float32 sums of x * other along rows, zero for a row without an expert, and (L, N, 1)
    bfloat16 sums of prob * x over each expert's rows. other (M, N), None: x."""
    x = x.contiguous()
    other = x if other is None else other
    options = {"generate_dbias": True, "generate_d": False, "act_func": "identity"}
    return _OPS.dact(x, other, saved.padded_offsets, prob, **options)[1:]


def bias_sums(x, bias, padded_offsets, prob):
    """Of prob * bias in y: from x, the gradient of y, dprob (M,) float32 and dbias (L, N, 1) bfloat16."""
    # bias may lie anywhere, and a c may not: its copy is small.
    options = {"generate_dbias": True, "generate_d": False, "c_per_expert": True, "act_func": "identity"}
    return _OPS.dact(x, bias.clone(), padded_offsets, prob, **options)[1:]


def _of_inputs(ctx, a=None, b=None, prob=None, bias=None):
    """Gradients in the order of the operators' tensors, as many as the call gave: torch drops trailing defaults."""
    experts, scales = ctx.counts
    sfb = None if scales is None else [None] * scales
    gradients = (a, b or [None] * experts, None, None, prob, bias, None, sfb, None, None, None)
    return gradients[: len(ctx.needs_input_grad)]


def _gradients(ctx, saved, dx, dprob, dbias):
    """All gradients in the order of the inputs, from that of x = alpha * A @ B.T + bias, (M, N) bfloat16."""
    da = db = None
    if saved.differentiable and ctx.needs_input_grad[0]:
        da = _of_a(saved, dx).view(saved.a.shape)
    if saved.differentiable and any(ctx.needs_input_grad[1]):
        db = _of_b(saved, dx)
    dprob = dprob.view(saved.prob.shape) if saved.prob is not None and dprob is not None else None
    dbias = dbias.view(saved.bias.shape).to(saved.bias.dtype) if saved.bias is not None and dbias is not None else None
    return _of_inputs(ctx, da, db, dprob, dbias)


def _activation_backward(ctx, dc, dd, run):
    """srelu and glu. run(saved, dd) gives the gradient of x by way of D, dprob and dbias; dc comes by way of C."""
    if dc is None and dd is None:
        return _of_inputs(ctx)
    saved = _Saved(ctx)
    dx = dprob = dbias = None
    if dd is not None:
        dx, dprob, dbias = run(saved, dd)
        dx = _rows(dx)
    if dc is not None:
        dx = (_rows(dc).to(torch.bfloat16) if dx is None else dx + _rows(dc).to(dx.dtype)).contiguous()
        if saved.bias is not None:
            direct = _sums(saved, dc)[1]
            dbias = direct if dbias is None else dbias + direct
    return _gradients(ctx, saved, dx, dprob, dbias)


def _srelu_backward(ctx, dc, dd, *_):
    def run(saved, dd):
        ones = saved.padded_offsets.new_ones
        alpha = ones(saved.padded_offsets.shape, dtype=torch.float32) if saved.alpha is None else saved.alpha
        prob = ones(saved.a.shape[:1], dtype=torch.float32) if saved.prob is None else saved.prob
        options = {
            name: value for name, value in saved.options.items() if name not in ("c_dtype", "d_dtype", "generate_c")
        }
        outputs = _OPS.dsrelu(
            saved.a, saved.b, dd.contiguous(), saved.padded_offsets, alpha, prob,
            sfa=saved.sfa, sfb=saved.sfb, bias=saved.bias, generate_dbias=saved.bias is not None, **options,
        )  # fmt: skip
        return outputs[0], outputs[2], outputs[3]

    return _activation_backward(ctx, dc, dd, run)


def _glu_backward(ctx, dc, dd, *_):
    def run(saved, dd):
        parameters = {name: saved.options[name] for name in _ACTIVATION}
        return _OPS.dact(
            dd.contiguous(), saved.c, saved.padded_offsets, saved.prob,
            generate_dbias=saved.bias is not None, act_func="d" + saved.options["act_func"], **parameters,
        )  # fmt: skip

    return _activation_backward(ctx, dc, dd, run)


def _mm_backward(ctx, dc, dd, *_):
    """D = prob * x, or x + prob * bias with a bias, x = alpha * A @ B.T; C = D with a bias, else x."""
    if dc is None and dd is None:
        return _of_inputs(ctx)
    saved = _Saved(ctx)
    da = db = dprob = dbias = None
    dd = None if dd is None else _rows(dd)
    dc = None if dc is None else _rows(dc)
    if saved.bias is not None:
        total = dd if dc is None else dc if dd is None else dd + dc
        dx = total
        prob = None if saved.prob is None else saved.prob.view(-1)
        dprob, dbias = bias_sums(total.contiguous(), saved.bias, saved.padded_offsets, prob)
    else:
        weighted = dd if dd is None or saved.prob is None else dd.float() * saved.prob.view(-1, 1)
        dx = weighted if dc is None else dc if weighted is None else weighted + dc
    dx = dx.to(torch.bfloat16).contiguous()
    if saved.differentiable and ctx.needs_input_grad[0]:
        da = _of_a(saved, dx).view(saved.a.shape)
    if saved.differentiable and any(ctx.needs_input_grad[1]):
        db = _of_b(saved, dx)
    if saved.bias is None and saved.prob is not None and dd is not None and ctx.needs_input_grad[4]:
        # dprob = <dd, x>: one more GEMM, and no x kept from the forward
        x = _OPS.mm(saved.a, saved.b, saved.padded_offsets, saved.alpha, sfa=saved.sfa, sfb=saved.sfb,
                    sf_vec_size=saved.options["sf_vec_size"], d_dtype=torch.float32)[1]  # fmt: skip
        dprob = _sums(saved, dd, _rows(x))[0]
    dprob = None if dprob is None or saved.prob is None else dprob.view(saved.prob.shape)
    dbias = None if dbias is None else dbias.view(saved.bias.shape).to(saved.bias.dtype)
    return _of_inputs(ctx, da, db, dprob, dbias)


def _once_differentiable(name, backward):
    """torch.autograd.function.once_differentiable for gradients that are in lists too."""

    def run(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        refuse = torch._C._functions.DelayedError(f"cudnn_grouped::{name} has no second derivatives", 1)
        return tree_map_only(torch.Tensor, lambda x: refuse(x.requires_grad_()), results)

    return run


def _register(name, backward, with_c):
    def setup_context(ctx, inputs, keyword_only_inputs, output):
        _Saved.keep(ctx, inputs, keyword_only_inputs, output, with_c)

    backward = _once_differentiable(name, backward)
    torch.library.register_autograd(f"cudnn_grouped::{name}", backward, setup_context=setup_context)


_register("srelu", _srelu_backward, with_c=False)
_register("glu", _glu_backward, with_c=True)
_register("mm", _mm_backward, with_c=False)


_LIBRARY = torch.library.Library("cudnn_grouped", "IMPL")


def _count_writes(name):
    """Make autograd see what an operator writes into, as torch does for its own in-place operators."""
    operator = getattr(torch.ops.cudnn_grouped, name).default
    arguments = operator._schema.arguments
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def run(keyset, *args, **kwargs):
        graded, outputs = torch.is_grad_enabled(), []
        for position, name in written:
            value = kwargs.get(name) if position >= len(args) else args[position]
            if value is None:
                continue
            for one in value if isinstance(value, list) else (value,):
                if graded and one.requires_grad:
                    raise RuntimeError(f"{name}: expected a tensor that needs no gradient, got one that requires grad")
                outputs.append(one)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        torch.autograd.graph.increment_version(outputs)

    _LIBRARY.impl(name, run, "ADInplaceOrView", with_keyset=True)


for _name in ("dsrelu_out", "dglu_out", "srelu_out", "glu_out", "mm_out", "wgrad_out", "reduce_dbias"):
    _count_writes(_name)
