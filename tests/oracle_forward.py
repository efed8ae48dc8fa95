"""FP64 oracle of the forward operators, of the weight gradient and of dact, on the arithmetic and bounds of oracle.py.

The activations are written with the methods of `Arithmetic` alone, so that test_forward.py can run the same text on
torch tensors and differentiate it.
"""

from dataclasses import dataclass

import numpy as np
import oracle
from oracle import Approx, f32, gate_columns, gemm


class Arithmetic(oracle.Arithmetic):
    def clip(self, x: Approx, low: float, high: float) -> Approx:
        """min and max round nothing and are monotone: the ends of the interval move with the value."""
        value = np.clip(x.value, low, high)
        return Approx(value, np.maximum(np.clip(x.high, low, high) - value, value - np.clip(x.low, low, high)))


@dataclass
class Problem:
    """Decoded operands (float64) and options of srelu, glu or mm."""

    operation: str
    a: np.ndarray  # (M, K)
    b: list  # one (N, K) per expert
    offsets: list
    alpha: np.ndarray | None  # (L,)
    prob: np.ndarray | None  # (M,)
    bias: np.ndarray | None  # (L, N)
    tanh_clamp_scale: float | None = None
    act_func: str = "swiglu"
    linear_offset: float | None = None
    geglu_alpha: float = 1.702
    glu_clamp_max: float = 7.0
    glu_clamp_min: float = -7.0
    situ_beta1: float = 4.0
    situ_beta2: float = 25.0

    @property
    def width(self) -> int:
        return 2 if self.operation == "glu" else 1


@dataclass
class Expected:
    c: Approx  # (M, N), what is saved, before its rounding
    d: Approx  # (M, N / width)
    amax: Approx  # (L, 1), -inf for an expert without rows


# Activations of x, a list of `width` column blocks ---------------------------------------------------------------


def srelu(ar, x, p):
    relu = ar.clip(x[0], 0.0, np.inf)
    if p.tanh_clamp_scale is None:
        return ar.mul(relu, relu)
    scale = f32(p.tanh_clamp_scale)
    b = ar.mul(scale, ar.tanh(relu, scale)[0])
    return ar.mul(b, b)


def swiglu(ar, x, p):
    gate, up = x
    return ar.mul(gate, ar.logistic(gate), up)


def geglu(ar, x, p):
    """The gate has no lower clamp."""
    top, bottom, alpha = f32(p.glu_clamp_max), f32(p.glu_clamp_min), f32(p.geglu_alpha)
    offset = f32(1.0 if p.linear_offset is None else p.linear_offset)
    gate, up = ar.clip(x[0], -np.inf, top), ar.clip(x[1], bottom, top)
    return ar.mul(gate, ar.logistic(ar.mul(alpha, gate)), ar.add(up, offset))


def situglu(ar, x, p):
    b1, b2 = f32(p.situ_beta1), f32(p.situ_beta2)
    return ar.mul(b1, ar.tanh(x[0], b1)[0], ar.logistic(x[0]), b2, ar.tanh(x[1], b2)[0])


GLU = {"swiglu": swiglu, "geglu": geglu, "situglu": situglu}


def activation(ar, x, p):
    if p.operation == "mm":
        return x[0]
    return srelu(ar, x, p) if p.operation == "srelu" else GLU[p.act_func](ar, x, p)


def column_blocks(n: int, width: int) -> list[np.ndarray]:
    """Columns of the operands of an activation: all of them, or the gates and the ups."""
    return [np.arange(n)] if width == 1 else [gate_columns(n // 2), gate_columns(n // 2) + 32]


# Forward operators -----------------------------------------------------------------------------------------------


def preactivation(ar, accumulator: Approx, alpha, bias, bias_factor=None) -> Approx:
    """alpha * accumulator + bias; bias_factor * bias in mm."""
    x = accumulator if alpha is None else ar.settle(ar.mul(accumulator, f32(alpha)))
    if bias is None:
        return x
    return ar.settle(ar.add(x, bias if bias_factor is None else ar.mul(bias_factor, bias)))


def spans(offsets) -> list:
    """(expert, its rows) of the experts that have any."""
    starts = [0, *offsets[:-1]]
    return [(e, slice(s, end)) for e, (s, end) in enumerate(zip(starts, offsets, strict=True)) if end > s]


def put(into: Approx, where, part: Approx) -> None:
    into.value[where], into.error[where] = part.value, part.error


def largest(d: Approx) -> Approx:
    """max |d|."""
    size = np.abs(d.value)
    top = np.max(size)
    return Approx(top, max(np.max(size + d.error) - top, top - np.max(size - d.error)))


def expected(p: Problem, exact: bool = False) -> Expected:
    ar = Arithmetic(exact)
    m, n = p.a.shape[0], p.b[0].shape[0]
    blocks = column_blocks(n, p.width)
    c, d = ar.number(np.zeros((m, n))), ar.number(np.zeros((m, n // p.width)))
    amax = ar.number(np.full((len(p.offsets), 1), -np.inf))
    for e, rows in spans(p.offsets):
        accumulator, _ = gemm(ar, p.a[rows], p.b[e])
        prob = None if p.prob is None else f32(p.prob[rows, None])
        bias = None if p.bias is None else p.bias[e]
        # mm with a bias: prob multiplies the bias, since it is in A already.
        on_bias = prob if p.operation == "mm" else None
        x = preactivation(ar, accumulator, None if p.alpha is None else p.alpha[e], bias, on_bias)
        y = activation(ar, [x[:, columns] for columns in blocks], p)
        if prob is not None and not (p.operation == "mm" and bias is not None):
            y = ar.mul(prob, y)
        y = ar.settle(y)
        put(c, rows, x)
        put(d, rows, y)
        put(amax, (e, 0), largest(y))
    return Expected(c, d, amax)


# Weight gradient -------------------------------------------------------------------------------------------------


@dataclass
class WeightGradient:
    a: np.ndarray  # (m, T)
    b: np.ndarray  # (n, T)
    offsets: list
    scale_a: np.ndarray | None  # (L,)
    scale_b: np.ndarray | None


def weight_gradient(p: WeightGradient, old: list | None = None, exact: bool = False) -> list[Approx]:
    """One (m, n) per expert, before the rounding to the output's dtype."""
    ar = Arithmetic(exact)
    shape = (p.a.shape[0], p.b.shape[0])
    out = [ar.number(np.zeros(shape)) for _ in p.offsets]
    for e, tokens in spans(p.offsets):
        accumulator, _ = gemm(ar, p.a[:, tokens], p.b[:, tokens])
        scales = [f32(s[e]) for s in (p.scale_a, p.scale_b) if s is not None]
        out[e] = ar.settle(ar.mul(accumulator, *scales) if scales else accumulator)
        if old is not None:
            out[e] = ar.settle(ar.add(out[e], old[e]))
    if old is not None:
        for e in set(range(len(p.offsets))) - {e for e, _ in spans(p.offsets)}:
            out[e] = ar.number(old[e])
    return out


# Backward epilogue on a given value of the GEMM --------------------------------------------------------------------


def gradients(ar, r: Approx, c, prob, p: oracle.Problem):
    if p.act_func == "identity":
        return [ar.mul(r, prob)], ar.mul(r, c)
    if p.width == 1:
        return oracle.dsrelu(ar, r, c, prob, p)
    gates, ups = column_blocks(c.shape[1], 2)
    return oracle.GLU[p.act_func](ar, r, c[:, gates], c[:, ups], prob, p)


def backward(p: oracle.Problem, value_of, exact: bool = False) -> oracle.Expected:
    """The backward operators behind the GEMM. value_of(ar, expert, rows) is the GEMM's value R, or G with its bias.

    No beta: C is the pre-activation itself.
    """
    ar = Arithmetic(exact)
    m, w = p.c.shape
    experts = len(p.offsets)
    d, dprob, dbias = (ar.number(np.zeros(shape)) for shape in ((m, w), m, (experts, w)))
    amax = ar.number(np.full((experts, p.width), -np.inf))
    blocks = column_blocks(w, p.width)
    for e, rows in spans(p.offsets):
        r = ar.settle(value_of(ar, e, rows))
        parts, terms = gradients(ar, r, p.c[rows], f32(p.prob[rows, None]), p)
        put(dprob, rows, ar.total(ar.settle(terms), 1))
        for half, (part, columns) in enumerate(zip(parts, blocks, strict=True)):
            part = ar.settle(part)
            put(d, (rows, columns), part)
            put(dbias, (e, columns), ar.total(part, 0))
            put(amax, (e, half), largest(part))
    return oracle.Expected(d, dprob, dbias, amax, {})
