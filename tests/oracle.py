"""FP64 oracle of the two backward operators. Shares no code with the product.

Every result is a float64 value with a bound on how far FP32 arithmetic may be from it, whatever the order of sums and
products. The bounds are the usual running error analysis (Higham, Accuracy and Stability, ch. 3): a rounding is a
factor within 1 +- u, n of them within 1 +- gamma(n), and errors of operands are carried through each operation. So
they are c * eps * sum|terms|, propagated. In exact mode there is no error at all: the oracle then proves that every
intermediate is an FP32 number and every sum is exact in any order, and results are compared to the bit.
"""

from dataclasses import dataclass

import numpy as np

U = 2.0**-24  # unit roundoff of FP32
# What underflow can lose in one operation: FP32's smallest normal number is 2^-126, and exp(x) may be 0 from x = -87
# down, which is 2^-125.5, or 2^-123.5 in 4 exp(x).
TINY = 2.0**-123

# Relative errors of the elementary functions in units of U, from the promise "good to about 2 ulp" (1 ulp <= 2 U) of
# exp: logistic = 1/(1+e) adds two roundings; tanh = m/(m+2) with m = e-1 uses m twice and adds a few, and
# 1-tanh^2 = 4(m+1)/(m+2)^2 three times. CUDA's expf and expm1f are within 2 ulp too.
EXP_UNITS = 4
LOGISTIC_UNITS = EXP_UNITS + 2
TANH_UNITS = 2 * (EXP_UNITS + 2) + 4
TANH_SLOPE_UNITS = 3 * (EXP_UNITS + 2) + 6


def gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)


@dataclass
class Approx:
    """A float64 array and a bound on the error of FP32 arithmetic against it."""

    value: np.ndarray
    error: np.ndarray

    def __getitem__(self, index):
        return Approx(self.value[index], self.error[index])

    @property
    def low(self) -> np.ndarray:
        return self.value - self.error

    @property
    def high(self) -> np.ndarray:
        return self.value + self.error


class Arithmetic:
    """FP32 operations on Approx values; `exact` has no rounding and checks that none was needed."""

    def __init__(self, exact: bool):
        self.exact = exact
        self.u = 0.0 if exact else U
        self.tiny = 0.0 if exact else TINY

    def number(self, x) -> Approx:
        x = np.asarray(x, dtype=np.float64)
        return Approx(x, np.zeros_like(x))

    def mul(self, *factors) -> Approx:
        """Product in any association."""
        factors = [f if isinstance(f, Approx) else self.number(f) for f in factors]
        value, size, reach = 1.0, 1.0, 1.0
        for f in factors:
            value = value * f.value
            size = size * np.abs(f.value)
            reach = reach * (np.abs(f.value) + f.error)
        rounding = gamma(len(factors) - 1, self.u)
        # reach * (1 + rounding) - size, written so that equal operands give exactly reach * rounding.
        return Approx(value, (reach - size) + reach * rounding + self.tiny * (reach > 0))

    def add(self, a, b) -> Approx:
        a, b = (x if isinstance(x, Approx) else self.number(x) for x in (a, b))
        value, error = a.value + b.value, a.error + b.error
        return Approx(value, error + self.u * (np.abs(value) + error))

    def total(self, a: Approx, axis: int) -> Approx:
        """Sum along an axis in any order."""
        size = (np.abs(a.value) + a.error).sum(axis)
        if self.exact:
            assert_exact_sum(a.value, np.abs(a.value).sum(axis))
        return Approx(a.value.sum(axis), a.error.sum(axis) + gamma(a.value.shape[axis], self.u) * size)

    def function(self, x: Approx, value, slope, relative_units, argument_units=0) -> Approx:
        """f(x) computed to `relative_units` U. `slope` bounds |f'| near x: the error of x comes in through it, and so
        do `argument_units` roundings in forming the argument."""
        spread = slope * (x.error + argument_units * self.u * np.abs(x.value))
        reach = np.abs(value) + spread
        return Approx(value, spread + relative_units * self.u * reach + self.tiny * (reach > 0))

    def logistic(self, x) -> Approx:
        x = x if isinstance(x, Approx) else self.number(x)
        with np.errstate(over="ignore"):
            value = 1.0 / (1.0 + np.exp(-x.value))
        # The slope s (1 - s) is at most 1/4 and at most s, which itself grows by less than exp(error) nearby.
        return self.function(x, value, np.minimum(0.25, value * np.exp(x.error)), LOGISTIC_UNITS)

    def tanh(self, x, scale: float) -> tuple[Approx, Approx]:
        """tanh(x / scale) and its slope 1 - tanh^2. The quotient is one rounding, or two as a product with 1/scale."""
        x = x if isinstance(x, Approx) else self.number(x)
        q = x.value / scale
        t, slope = np.tanh(q), 1.0 / np.cosh(np.clip(q, -300, 300)) ** 2
        # tanh' = 1 - t^2 and |(1 - t^2)'| <= 2 (1 - t^2); 1 - t^2 changes by less than exp(2 |shift|).
        nearby = slope * np.exp(2 * x.error / scale) / scale
        return self.function(x, t, nearby, TANH_UNITS, 2), self.function(x, slope, 2 * nearby, TANH_SLOPE_UNITS, 2)

    def settle(self, a: Approx) -> Approx:
        """Exact mode: the value as the FP32 number it must be."""
        if not self.exact:
            return a
        with np.errstate(under="ignore"):
            value = np.where(np.abs(a.value) < 2.0**-140, 0.0, a.value)
            near = value.astype(np.float32).astype(np.float64)
        # Saturated sigmoids and tanhs differ from 0 or 1 by less than exp(-64).
        assert np.all(np.abs(near - value) <= 2.0**-60 * np.abs(value)), "not an exact case"
        return self.number(near)


def lowest_bit(x) -> float:
    """Largest power of two that divides every element."""
    fraction, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    integer = (fraction * 2.0**53).astype(np.int64)
    nonzero = integer != 0
    if not nonzero.any():
        return 1.0
    low = (integer & -integer)[nonzero].astype(np.float64)
    return float(np.ldexp(low, exponent[nonzero] - 53).min())


def assert_exact_sum(terms, size) -> None:
    """All partial sums are multiples of the terms' lowest bit and below 2^24 of it."""
    assert np.max(size, initial=0.0) <= 2.0**24 * lowest_bit(terms), "not an exact case"


# Operators ----------------------------------------------------------------------------------------------------


@dataclass
class Problem:
    """Decoded operands (float64) and options. `width` is 1 for dsrelu, 2 for dglu."""

    operation: str
    a: np.ndarray  # (M, K)
    b: list  # one (N, K) per expert
    c: np.ndarray  # (M, width * N)
    offsets: list
    alpha: np.ndarray
    beta: np.ndarray | None
    prob: np.ndarray
    block_scaled: bool = True
    c_role: str = "grad_output"
    tanh_clamp_scale: float | None = None
    act_func: str = "dswiglu"
    linear_offset: float | None = None
    geglu_alpha: float = 1.702
    glu_clamp_max: float = 7.0
    glu_clamp_min: float = -7.0
    clamp_grad: str = "mask"
    situ_beta1: float = 4.0
    situ_beta2: float = 25.0
    epilogue_op: str | None = None

    @property
    def width(self) -> int:
        return 1 if self.operation == "dsrelu" else 2

    @property
    def experts(self) -> list:
        """(first row, end row) of each expert."""
        return list(zip([0, *self.offsets[:-1]], self.offsets, strict=True))


@dataclass
class Expected:
    d: Approx  # (M, W), zero in the tail
    dprob: Approx  # (M,)
    dbias: Approx  # (L, W), FP32 sum before the rounding to BF16
    amax: Approx  # (L, width), -inf for an expert without rows
    sums: dict  # sum of |terms| behind G, dprob and dbias


def f32(x):
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def positive(x: Approx) -> Approx:
    value = np.maximum(x.value, 0.0)
    return Approx(value, np.maximum(np.maximum(x.high, 0.0) - value, value - np.maximum(x.low, 0.0)))


def gate_columns(n: int) -> np.ndarray:
    """Where the gates are among the 2n columns: 32 gates, then their 32 ups, and so on."""
    j = np.arange(n)
    return j // 32 * 64 + j % 32


def dsrelu(ar: Arithmetic, g: Approx, c, prob, p: Problem) -> tuple[list[Approx], Approx]:
    """Gradient and dprob terms; g is the GEMM with alpha, c (rows, n), prob (rows, 1)."""
    c = ar.number(c)
    x, upstream = (g, c) if p.c_role == "grad_output" else (c, g)
    relu = positive(x)
    if p.tanh_clamp_scale is None:
        return [ar.mul(prob, 2.0, upstream, relu)], ar.mul(upstream, relu, relu)
    scale = f32(p.tanh_clamp_scale)
    t, slope = ar.tanh(relu, scale)
    b = ar.mul(scale, t)
    return [ar.mul(prob, 2.0, upstream, b, slope)], ar.mul(upstream, b, b)


def dswiglu(ar, r, gate, up, prob, p):
    s = ar.logistic(gate)
    swish = ar.mul(gate, s)
    slope = ar.mul(s, ar.add(1.0, ar.mul(gate, ar.add(1.0, Approx(-s.value, s.error)))))
    return [ar.mul(r, prob, up, slope), ar.mul(r, prob, swish)], ar.mul(r, up, swish)


def dgeglu(ar, r, gate, up, prob, p):
    top, bottom, alpha = f32(p.glu_clamp_max), f32(p.glu_clamp_min), f32(p.geglu_alpha)
    offset = f32(1.0 if p.linear_offset is None else p.linear_offset)
    keep_gate, keep_up = (gate <= top).astype(float), ((up >= bottom) & (up <= top)).astype(float)
    if p.clamp_grad == "value":  # the BF16 page's filter: the raw value instead of 1
        keep_gate, keep_up = gate * keep_gate, up * keep_up
    clamped = np.minimum(gate, top)
    raised = ar.add(np.clip(up, bottom, top), offset)
    s = ar.logistic(ar.mul(alpha, clamped))
    slope = ar.mul(s, ar.add(1.0, ar.mul(alpha, clamped, ar.add(1.0, Approx(-s.value, s.error)))))
    return (
        [ar.mul(r, prob, raised, slope, keep_gate), ar.mul(r, prob, clamped, s, keep_up)],
        ar.mul(r, clamped, s, raised),
    )


def dsituglu(ar, r, gate, up, prob, p):
    b1, b2 = f32(p.situ_beta1), f32(p.situ_beta2)
    (tg, gate_slope), (tu, up_slope) = ar.tanh(gate, b1), ar.tanh(up, b2)
    s = ar.logistic(gate)
    t_gate, t_up = ar.mul(b1, tg, s), ar.mul(b2, tu)
    slope = ar.add(ar.mul(gate_slope, s), ar.mul(t_gate, ar.add(1.0, Approx(-s.value, s.error))))
    return [ar.mul(r, prob, t_up, slope), ar.mul(r, prob, t_gate, up_slope)], ar.mul(r, t_gate, t_up)


GLU = {"dswiglu": dswiglu, "dgeglu": dgeglu, "dsituglu": dsituglu}


def apply_epilogue_op(ar: Arithmetic, d: Approx, op: str | None) -> Approx:
    if op in (None, "identity", "none"):
        return d
    relu = positive(d)
    return relu if op == "relu" else ar.mul(relu, relu)


def gemm(ar: Arithmetic, a: np.ndarray, b: np.ndarray) -> tuple[Approx, np.ndarray]:
    """a @ b.T and sum|terms|. Products of two scaled operands have at most 8 + 8 significant bits (BF16; FP8 has
    4 + 4, FP4 with E4M3 scales 6 + 6), so they are exact and only the K additions round."""
    terms = np.abs(a) @ np.abs(b).T
    if ar.exact:
        assert np.max(terms, initial=0.0) <= 2.0**24 * lowest_bit(a) * lowest_bit(b), "not an exact case"
    return Approx(a @ b.T, gamma(a.shape[1], ar.u) * terms + ar.tiny * (terms > 0)), terms


def expected(p: Problem, exact: bool = False) -> Expected:
    ar = Arithmetic(exact)
    m, n, width = p.a.shape[0], p.b[0].shape[0], p.width
    d = ar.number(np.zeros((m, width * n)))
    dprob = ar.number(np.zeros(m))
    dbias = ar.number(np.zeros((len(p.offsets), width * n)))
    amax = ar.number(np.full((len(p.offsets), width), -np.inf))
    sums = {"g": np.zeros((m, n)), "dprob": np.zeros(m), "dbias": np.zeros_like(dbias.value)}
    gates = gate_columns(n)
    columns = [np.arange(n)] if width == 1 else [gates, gates + 32]
    for e, (start, end) in enumerate(p.experts):
        if end <= start:
            continue
        rows = slice(start, end)
        accumulator, terms = gemm(ar, p.a[rows], p.b[e])
        alpha = f32(p.alpha[e])
        r = ar.settle(ar.mul(accumulator, alpha if p.operation == "dsrelu" else f32(alpha * alpha)))
        prob = f32(p.prob[rows, None])
        if p.operation == "dsrelu":
            gradients, prob_terms = dsrelu(ar, r, p.c[rows], prob, p)
        else:
            # beta * C is one FP32 product whatever the order, so the masks see the same bits everywhere.
            scaled = p.act_func != "dgeglu" or not p.block_scaled
            x = f32(f32(p.beta[e]) * p.c[rows]) if scaled and p.beta is not None else p.c[rows]
            gradients, prob_terms = GLU[p.act_func](ar, r, x[:, columns[0]], x[:, columns[1]], prob, p)
        prob_terms = ar.settle(prob_terms)
        total = ar.total(prob_terms, 1)
        dprob.value[rows], dprob.error[rows] = total.value, total.error
        sums["dprob"][rows] = np.abs(prob_terms.value).sum(1)
        for half, gradient in enumerate(gradients):
            gradient = ar.settle(apply_epilogue_op(ar, gradient, p.epilogue_op))
            d.value[rows, columns[half]], d.error[rows, columns[half]] = gradient.value, gradient.error
            size = np.abs(gradient.value)
            top, reach, least = np.max(size), np.max(size + gradient.error), np.max(size - gradient.error)
            amax.value[e, half], amax.error[e, half] = top, max(reach - top, top - least)
            total = ar.total(gradient, 0)
            dbias.value[e, columns[half]], dbias.error[e, columns[half]] = total.value, total.error
            sums["dbias"][e, columns[half]] = np.abs(gradient.value).sum(0)
        sums["g"][rows] = np.abs(alpha) ** width * terms
    return Expected(d, dprob, dbias, amax, sums)
