"""Calls of srelu, glu and mm, and their gradients by torch autograd in FP64 with a bound on the operators' error.

A bound is the sum of the roundings on the way, each named where it is added: FP32 sums of n terms are off by at most
gamma(n) * sum|terms| (oracle.py), a rounding to BF16 by 2^-8 of the value. glu's derivative is that at the saved C, so
the reference takes the operator's C for the pre-activation and passes its gradient on unchanged.
"""

from dataclasses import dataclass
from functools import partial

import torch
from activation_reference import UNITS, activate, fp32_bound, spread
from oracle import U, gamma

import cudnn_grouped
from cudnn_grouped.quantize import FORMATS

OPS = torch.ops.cudnn_grouped
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LOW = 2.0**-8  # unit roundoff of BF16: half of its spacing at 1

ROWS = 768
EXPERTS = (slice(0, 256), slice(256, 256), slice(256, 512))  # one has no rows; the last 256 rows have no expert
K, COLUMNS = 64, 64
SRELU, GLU = ("srelu", "clamped_srelu"), ("swiglu", "geglu", "situglu")
PARAMETERS = {
    "clamped_srelu": {"tanh_clamp_scale": 1.5},
    "geglu": {"geglu_alpha": 1.5, "glu_clamp_max": 2.5, "glu_clamp_min": -1.5, "linear_offset": 0.5},
    "situglu": {"situ_beta1": 1.5, "situ_beta2": 2.5},
}


@dataclass(frozen=True)
class Case:
    activation: str  # one of SRELU or GLU, or "mm"
    bias: torch.dtype | None = None
    weights: str = "dense_k"  # dense_k, dense_n, list_k, list_n
    through: str = "d"  # the outputs that have a gradient: d, c, dc
    c_dtype: torch.dtype | None = BF16  # None: generate_c=False
    d_dtype: torch.dtype = BF16
    rank: int = 2
    alpha: bool = True
    prob: bool = True
    scaled: str | None = None  # a format of cudnn_grouped.quantize

    def __str__(self):
        default = Case("")
        return ", ".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k))

    @property
    def gated(self) -> bool:
        return self.activation in GLU

    @property
    def function(self) -> str:
        return {"clamped_srelu": "srelu", "mm": "identity"}.get(self.activation, self.activation)

    @property
    def parameters(self) -> dict:
        return PARAMETERS.get(self.activation, {})

    @property
    def n(self) -> int:
        return COLUMNS * (2 if self.gated else 1)


@dataclass
class Inputs:
    case: Case
    positional: list
    keywords: dict
    leaves: dict  # the tensors that want gradients
    a: torch.Tensor  # (M, K) values
    b: list  # (N, K) values of each expert
    gradients: dict  # of the outputs c and d


def shaped(case: Case, x):
    return x if case.rank == 2 else x.unsqueeze(-1)


def build(case: Case) -> Inputs:
    """O(1) data, prob and alpha of both signs, NaN in the rows without an expert."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    a, w = normal(ROWS, K).to(BF16), (normal(len(EXPERTS), case.n, K) * 1.5 * K**-0.5).to(BF16)
    prob = torch.rand(ROWS, generator=generator) * 2.5 - 1 if case.prob else None
    bias = None if case.bias is None else normal(len(EXPERTS), case.n).to(case.bias)
    gradients = {"c": normal(ROWS, case.n).to(case.c_dtype or BF16), "d": normal(ROWS, COLUMNS).to(case.d_dtype)}
    for rows in (a, prob, *gradients.values()):
        if rows is not None:
            rows[EXPERTS[-1].stop :] = float("nan")
    keywords, leaves = {}, {}
    if case.d_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        keywords["norm_const"] = torch.ones(1)
    if case.scaled:
        dense = w.permute(1, 2, 0)
        (a_data, sfa), (b_data, sfb) = (cudnn_grouped.quantize(x, case.scaled) for x in (a, dense))
        keywords |= {"sfa": sfa, "sfb": [sfb], "sf_vec_size": FORMATS[case.scaled].sf_vec_size}
        a64 = cudnn_grouped.dequantize(a_data, sfa, case.scaled).double()
        b64 = list(cudnn_grouped.dequantize(b_data, sfb, case.scaled).double().unbind(-1))
        a, b = shaped(case, a_data), [b_data]
    else:
        a64, b64 = a.double(), list(w.double())
        kind, major = case.weights.split("_")
        stored = w if major == "k" else w.transpose(1, 2).contiguous().transpose(1, 2)
        b = [stored.permute(1, 2, 0)] if kind == "dense" else list(stored)
        a = shaped(case, a)
        leaves = {"a": a, **{f"b[{i}]": x for i, x in enumerate(b)}}
    if prob is not None:
        prob = leaves["prob"] = prob if case.rank == 2 else prob.view(-1, 1, 1)
    if bias is not None:
        leaves["bias"] = bias
    for leaf in leaves.values():
        leaf.requires_grad_()
    offsets = torch.tensor([rows.stop for rows in EXPERTS], dtype=torch.int32)
    alpha = torch.tensor([1.25, 0.5, -0.75]) if case.alpha else None
    return Inputs(case, [a, b, offsets, alpha, prob, bias], keywords, leaves, a64, b64, gradients)


def arguments(inputs: Inputs):
    """(operator, positional, keywords) of the call."""
    case = inputs.case
    options = {"d_dtype": case.d_dtype, "generate_c": case.c_dtype is not None, **case.parameters}
    if case.c_dtype is not None:
        options["c_dtype"] = case.c_dtype
    if case.gated:
        options["act_func"] = case.activation
    operator = OPS.glu if case.gated else OPS.mm if case.activation == "mm" else OPS.srelu
    return operator.default, inputs.positional, {**inputs.keywords, **options}


def call(inputs: Inputs):
    """The operator's outputs."""
    operator, positional, keywords = arguments(inputs)
    return operator(*positional, **keywords)


def run(inputs: Inputs):
    """(C, the operator's gradients by leaf; zero for a leaf that no gradient reaches)."""
    c, d, *_ = call(inputs)
    outputs = [{"c": c, "d": d}[name] for name in inputs.case.through]
    gradients = [shaped(inputs.case, inputs.gradients[name]) for name in inputs.case.through]
    got = torch.autograd.grad(outputs, list(inputs.leaves.values()), gradients, materialize_grads=True)
    return c.detach(), dict(zip(inputs.leaves, got, strict=True))


# The reference -------------------------------------------------------------------------------------------------


def differentiate(output, inputs, gradient):
    """Gradients, zero where there is no way."""
    if gradient is None:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(output, inputs, gradient, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def reference(inputs: Inputs, c, expert: int) -> dict:
    """{"a" | "b" | "prob" | "bias": (gradient, bound)} of one expert; those of a and prob for its rows."""
    case, rows = inputs.case, EXPERTS[expert]
    _, _, _, alpha, prob, bias = inputs.positional
    leaf = lambda t: t.detach().double().requires_grad_()  # noqa: E731
    a, b = leaf(inputs.a[rows]), leaf(inputs.b[expert])
    p = leaf(torch.ones(a.shape[0], 1) if prob is None else prob.reshape(-1, 1)[rows])
    offset = leaf(torch.zeros(case.n) if bias is None else bias[expert])
    alpha = 1.0 if alpha is None else alpha[expert].item()
    dd, dc = (inputs.gradients[name][rows].double() if name in case.through else None for name in "dc")
    if case.activation == "mm":
        x = alpha * (a @ b.T) + p * offset
        at, d = x, p * x if bias is None else x
    else:
        x = alpha * (a @ b.T) + offset
        at = x + (c.reshape(ROWS, -1)[rows].double() - x).detach() if case.gated else x
        d = p * activate(case.function, at, case.parameters)
    by_d, by_c = (differentiate(y, (x, a, b, p, offset), g) for y, g in ((d, dd), (x, dc)))
    with torch.no_grad():
        bounds = mm_bounds if case.activation == "mm" else activation_bounds
        x_bound = gamma(K + 3, U) * (abs(alpha) * (a.abs() @ b.abs().T) + (p * offset).abs() + offset.abs())
        dd = torch.zeros(x.shape[0], COLUMNS, dtype=torch.float64) if dd is None else dd
        dx_bound, p_bound, offset_bound = bounds(case, by_d, by_c, dd, x_bound, at, p, offset)
        dx, da, db, dp, doffset = (one + other for one, other in zip(by_d, by_c, strict=True))

        def gemm_bound(dx, dx_bound, other, result):
            """A GEMM of FP32 sums, then alpha; the result is rounded to BF16."""
            terms = gamma(dx.shape[1] + 2, U) * (dx.abs() + dx_bound) + dx_bound
            bound = abs(alpha) * (terms @ other.abs())
            return result, bound + LOW * (result.abs() + bound)

        return {
            "a": gemm_bound(dx, dx_bound, b, da),
            "b": gemm_bound(dx.T, dx_bound.T, a, db),
            "prob": (dp[:, 0], p_bound),
            "bias": (doffset, offset_bound),
        }


SECOND_ORDER = 1 + 4 * LOW  # roundings of rounded values


def activation_bounds(case, by_d, by_c, dd, x_bound, at, p, offset):
    """Bounds of the gradient of x as the GEMMs read it, of dprob and of dbias."""
    rows, dx_d, dx_c = dd.shape[0], by_d[0].abs(), by_c[0].abs()
    # FP32 arithmetic of the activation; squared ReLU's x is recomputed, its slope changes by less than 3 for each unit of x
    x_bound = torch.zeros_like(x_bound) if case.gated else x_bound
    arithmetic = fp32_bound(case.function, at)
    fp32 = spread(dd.abs(), case.n) * p.abs() * (spread(arithmetic, case.n) + 3 * x_bound)
    # dx by way of D is rounded to BF16; dC is too, and then their sum
    both = dx_d + dx_c + (by_d[0] + by_c[0]).abs() if case.through == "dc" else dx_d + dx_c
    dx_bound = SECOND_ORDER * (fp32 + LOW * both)
    p_terms = (1 + COLUMNS / UNITS) * arithmetic + (0 if case.gated else 2 * at.abs() * x_bound)
    # column sums in FP32 by way of D and of C, each rounded to BF16, and so is their sum
    sums = by_d[4].abs() + by_c[4].abs() + (by_d[4] + by_c[4]).abs()
    offset_bound = fp32.sum(0) + gamma(rows, U) * (dx_d + dx_c).sum(0) + LOW * sums
    return dx_bound, (dd.abs() * p_terms).sum(1), SECOND_ORDER * offset_bound


def mm_bounds(case, by_d, by_c, dd, x_bound, x, p, offset):
    rows, dx = dd.shape[0], (by_d[0] + by_c[0]).abs()
    dx_bound = (LOW + 2 * U) * dx
    if not offset.any():
        return dx_bound, (dd.abs() * (gamma(COLUMNS, U) * x.abs() + x_bound)).sum(1), torch.zeros_like(offset)
    total = (LOW if case.through == "dc" else 0) * dx  # dD + dC is rounded before all uses
    p_bound = ((total + gamma(COLUMNS, U) * dx) * offset.abs()).sum(1)
    offset_bound = ((total + gamma(rows + 2, U) * dx) * p.abs()).sum(0) + LOW * (by_d[4] + by_c[4]).abs()
    return SECOND_ORDER * (dx_bound + total), SECOND_ORDER * p_bound, SECOND_ORDER * offset_bound


def check(inputs: Inputs, c, got: dict) -> None:
    """Every gradient within its bound, and zero for the rows without an expert."""
    for name, gradient in got.items():
        assert gradient.shape == inputs.leaves[name].shape, name
        assert gradient.dtype == inputs.leaves[name].dtype, name
    for name in got.keys() & {"a", "prob"}:
        assert not got[name][EXPERTS[-1].stop :].any(), f"{name} has a gradient in rows without an expert"
    for expert, rows in enumerate(EXPERTS):
        found = {name: got[name].reshape(ROWS, -1)[rows].squeeze(-1) for name in got.keys() & {"a", "prob"}}
        if "bias" in got:
            found["bias"] = got["bias"][expert]
        if "b[0]" in got:
            found["b"] = got["b[0]"][..., expert] if "b[1]" not in got else got[f"b[{expert}]"]
        expected = reference(inputs, c, expert)
        for name, value in found.items():
            want, bound = expected[name]
            excess = (value.double() - want).abs() - bound
            wrong = ~(excess <= 0)  # NaN is wrong
            assert not wrong.any(), (
                f"{name}, expert {expert}: {wrong.sum()} of {wrong.numel()} off, by {excess.max():.3g}"
            )
