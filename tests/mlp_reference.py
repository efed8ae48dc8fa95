"""GroupedMLP in FP64 with the roundings and quantisations of its pipeline, and a bound on what FP32 sums may change.

Every tensor is a value with an error. Rounding and block quantisation are monotone: an error passes through one as the
distance between the images of the ends, which is zero unless a boundary lies between them. So only a few elements carry
more than FP32's error, and the bounds stay as narrow as the formats allow. Quantisation is oracle_formats'.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from activation_reference import activate, fp32_bound, spread
from oracle import U, gamma
from oracle_formats import E4M3, FORMATS, block_amax, data_codes, data_factor, decode_scale, scale_codes

ACTIVATIONS = {
    "srelu": ("srelu", {}),
    "swiglu": ("swiglu", {}),
    "geglu": ("geglu", {"geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0, "linear_offset": 1.0}),
    "clamped_swiglu": (
        "geglu",
        {"geglu_alpha": 1.0, "glu_clamp_max": 10.0, "glu_clamp_min": -10.0, "linear_offset": 0.0},
    ),
    "situglu": ("situglu", {"situ_beta1": 4.0, "situ_beta2": 25.0}),
}
BLOCKS = {"mxfp8": (E4M3, "e8m0", 32), "nvfp4": (FORMATS["e2m1"], "e4m3", 16)}


class Bounded(NamedTuple):
    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def exact(cls, x):
        x = x.detach().double()
        return cls(x, torch.zeros_like(x))

    @property
    def reach(self):
        return self.value.abs() + self.error

    def __add__(self, other):
        """In FP32."""
        value, error = self.value + other.value, self.error + other.error
        return Bounded(value, error + U * (value.abs() + error))


def rounded(x: Bounded, dtype) -> Bounded:
    """Rounded to FP32 and to dtype."""
    to = lambda v: v.float().to(dtype).double()  # noqa: E731
    value = to(x.value)
    return Bounded(value, torch.maximum(to(x.value + x.error) - value, value - to(x.value - x.error)))


def quantized(x: Bounded, recipe, axis="row", norm=1.0) -> Bounded:
    """The values of x in blocks along its rows or columns (an expert's first row begins a block of 32)."""
    data_format, scale_format, block = BLOCKS[recipe]
    matrix, error = (t.transpose(-1, -2) if axis == "col" else t for t in x)
    sign = torch.where(matrix < 0, -1.0, 1.0)
    near, low, high = ((matrix + side * sign * error).float().numpy() for side in (0, -1, 1))

    def scales(x):
        return scale_codes(block_amax(x, block), data_format, scale_format, norm)

    def image(x, codes):
        factor, scale = (
            np.repeat(t, block, axis=-1)
            for t in (data_factor(codes, scale_format, norm), decode_scale(codes, scale_format))
        )
        return torch.from_numpy(data_format.decode(data_codes(x, factor, data_format)) * scale / float(norm))

    least, most = scales(low), scales(high)
    assert (np.abs(most.astype(int) - least) <= 1).all(), "errors too large for these data"
    value = image(near, scales(near))
    error = max_of((image(end, codes) - value).abs() for end in (low, high) for codes in (least, most))
    return Bounded(*(t.transpose(-1, -2) if axis == "col" else t for t in (value, error)))


@dataclass
class Experts:
    offsets: list
    rows: int

    def __iter__(self):
        return iter(slice(*pair) for pair in zip([0, *self.offsets[:-1]], self.offsets, strict=True))

    def gemm(self, a: Bounded, b) -> Bounded:
        """(M, N): a @ b.T by expert, zero elsewhere; b (L, N, K). FP32 sums of K terms, and the factors of NVFP4."""
        value, error = (torch.zeros(self.rows, b.shape[1], dtype=torch.float64) for _ in range(2))
        for expert, rows in enumerate(self):
            w = b[expert]
            value[rows] = a.value[rows] @ w.T
            error[rows] = (a.error[rows] + gamma(w.shape[1] + 8, U) * a.reach[rows]) @ w.abs().T
        return Bounded(value, error)

    def weight_gradient(self, a: Bounded, b: Bounded) -> Bounded:
        """(L, columns of a, columns of b): a.T @ b by expert."""
        parts = []
        for rows in self:
            (x, dx), (y, dy) = ((t[rows] for t in operand) for operand in (a, b))
            rounding = gamma(rows.stop - rows.start, U) * ((x.abs() + dx).T @ (y.abs() + dy))
            parts.append((x.T @ y, dx.T @ (y.abs() + dy) + x.abs().T @ dy + rounding))
        return Bounded(*(torch.stack(part) for part in zip(*parts, strict=True)))

    def sums(self, x: Bounded) -> Bounded:
        """(L, columns): FP32 sums over the experts' rows."""
        parts = [
            (x.value[rows].sum(0), (x.error[rows] + gamma(rows.stop - rows.start, U) * x.reach[rows]).sum(0))
            for rows in self
        ]
        return Bounded(*(torch.stack(part) for part in zip(*parts, strict=True)))

    def of_rows(self, per_expert):
        """(M, ...): an expert's tensor at each of its rows, zero elsewhere."""
        out = per_expert.new_zeros(self.rows, *per_expert.shape[1:])
        for expert, rows in enumerate(self):
            out[rows] = per_expert[expert]
        return out


class Pipeline:
    """The operands of a recipe."""

    def __init__(self, recipe, experts):
        self.recipe, self.experts = recipe, experts

    def norm(self, amax):
        """The tensor's factor: the largest power of four that keeps powers of two above amax within 2^11."""
        if self.recipe != "nvfp4" or amax <= 0:
            return 1.0
        above = np.frexp(np.float32(amax))[1]  # amax < 2^above
        return 4.0 ** min((11 - above) // 2, 63)

    def rows(self, x: Bounded) -> Bounded:
        if self.recipe == "bf16":
            return x
        owned = slice(0, self.experts.offsets[-1])
        amax, worst = x.value[owned].abs().max().item(), x.reach[owned].max().item()
        assert self.norm(amax) == self.norm(worst), "the tensor's factor depends on rounding: choose other data"
        return quantized(x, self.recipe, norm=self.norm(amax))

    def tokens(self, x: Bounded) -> Bounded:
        return quantized(x, "mxfp8", "col") if self.recipe == "mxfp8" else x

    def weight(self, w, axis):
        """(L, N, K) in blocks along K ("row") or N ("col")."""
        if self.recipe == "bf16":
            return w.detach().to(torch.bfloat16).double()
        norm = self.norm(w.abs().max().item())
        return torch.stack([quantized(Bounded.exact(one), self.recipe, axis, norm).value for one in w])

    def hidden(self, x: Bounded):
        """What a fused GEMM gives: the next GEMM's operand and the weight gradient's."""
        x = x if self.recipe == "mxfp8" else rounded(x, torch.bfloat16)
        return self.rows(x), self.tokens(x)


def corners(c: Bounded, columns):
    """c with its error at every combination of signs for gates and ups."""
    gate = (torch.arange(c.value.shape[1]) // 32 % 2 == 0) if columns != c.value.shape[1] else torch.tensor(True)
    for one in (-1, 1):
        for other in (-1, 1) if columns != c.value.shape[1] else (1,):
            yield c.value + torch.where(gate, one, other) * c.error


def activated(name, parameters, c: Bounded, columns) -> Bounded:
    """In FP32. Twice what the corners show: between them the function may bend."""
    value = activate(name, c.value, parameters)
    shift = max_of((activate(name, x, parameters) - value).abs() for x in corners(c, columns))
    return Bounded(value, 2 * shift + fp32_bound(name, c.reach))


def slope(name, parameters, c: Bounded, columns) -> Bounded:
    """Derivative of the activation at c, (M, columns of c); c is exact or off by a rounding boundary."""

    def at(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(activate(name, x, parameters).sum(), x)[0]

    value = at(c.value)
    shift = max_of((at(x) - value).abs() for x in corners(c, columns))
    return Bounded(value, shift + spread(fp32_bound(name, c.reach), c.value.shape[1]))


def max_of(tensors):
    return torch.stack(list(tensors)).amax(0)


def product(*factors) -> Bounded:
    """In FP32."""
    value, reach = 1.0, 1.0
    for f in factors:
        value, reach = value * f.value, reach * f.reach
    return Bounded(value, (reach - value.abs()) + gamma(len(factors), U) * reach)


def expected(mlp, x, offsets, prob, dy) -> dict:
    """{name: (Bounded before the last rounding, dtype)} of y and of every gradient. x and dy are BF16."""
    name, parameters = ACTIVATIONS[mlp.config.activation]
    experts = Experts(offsets, x.shape[0])
    pipeline = Pipeline(mlp.config.recipe, experts)
    owned = torch.arange(experts.rows)[:, None] < offsets[-1]
    x, dy, p = (Bounded.exact(torch.where(owned, t.detach().double(), 0.0)) for t in (x, dy, prob.unsqueeze(1)))
    b1, b2 = (None if b is None else Bounded.exact(experts.of_rows(b)) for b in (mlp.fc1_bias, mlp.fc2_bias))
    w1, w2 = (pipeline.weight(w, "row") for w in (mlp.fc1_weight, mlp.fc2_weight))
    bfloat16, float32 = torch.bfloat16, torch.float32

    pre = experts.gemm(pipeline.rows(x), w1)
    pre = pre if b1 is None else pre + b1
    saved = rounded(pre, bfloat16)
    hidden, hidden_tokens = pipeline.hidden(product(p, activated(name, parameters, pre, mlp.ffn_size)))
    y = experts.gemm(hidden, w2)
    y = y if b2 is None else y + product(p, b2)

    w1, w2 = (pipeline.weight(w, "col") for w in (mlp.fc1_weight, mlp.fc2_weight))
    r = experts.gemm(pipeline.rows(dy), w2.transpose(1, 2))
    columns = saved.value.shape[1]
    wide = Bounded(*(spread(t, columns) for t in r))
    dpre = product(p, wide, slope(name, parameters, saved, mlp.ffn_size))
    terms = product(r, activated(name, parameters, saved, mlp.ffn_size))
    dprob = Bounded(terms.value.sum(1), (terms.error + gamma(mlp.ffn_size, U) * terms.reach).sum(1))
    if b2 is not None:
        terms = product(dy, b2)
        more = Bounded(terms.value.sum(1), (terms.error + gamma(mlp.hidden_size, U) * terms.reach).sum(1))
        dprob = dprob + more
    dpre_rows, dpre_tokens = pipeline.hidden(dpre)
    results = {
        "y": (y, bfloat16),
        "x": (experts.gemm(dpre_rows, w1.transpose(1, 2)), bfloat16),
        "prob": (dprob, float32),
        "fc1_weight": (experts.weight_gradient(dpre_tokens, pipeline.tokens(x)), mlp.fc1_weight.dtype),
        "fc2_weight": (experts.weight_gradient(pipeline.tokens(dy), hidden_tokens), mlp.fc2_weight.dtype),
    }
    if b1 is not None:
        results["fc1_bias"] = (experts.sums(dpre), bfloat16)
        results["fc2_bias"] = (experts.sums(product(p, dy)), bfloat16)
    return results


def check(name, got, bounded: Bounded, dtype) -> None:
    """FP32 arithmetic ends within the bounds, and rounding to dtype is monotone."""
    low, high = ((bounded.value + side * bounded.error).float().to(dtype).double() for side in (-1, 1))
    excess = torch.maximum(low - got.double(), got.double() - high)
    wrong = ~(excess <= 0)  # NaN is wrong
    assert not wrong.any(), f"{name}: {wrong.sum()} of {wrong.numel()} outside, by up to {excess.max():.3g}"
