"""What gpu.py measures: shapes of published mixture-of-experts models, input data, and the reference that every contender is
checked against. Plain torch; the numbers share no code with the operators.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import SETS

from cudnn_grouped import pack_scales
from cudnn_grouped.scales import physical_scales

GEGLU = {"geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0, "linear_offset": 1.0}
CLAMPED_SWIGLU = {"geglu_alpha": 1.0, "glu_clamp_max": 10.0, "glu_clamp_min": -10.0, "linear_offset": 0.0}
BETA1, BETA2 = 4.0, 25.0  # of SiTU-GLU


class Suite(NamedTuple):
    """A model's fc2 backward on one rank: activation, rows of each expert, N (expert width), K (hidden size)."""

    activation: str
    counts: tuple
    n: int
    k: int
    dbias: bool = False
    parameters: dict = {}

    @property
    def m(self):
        return sum(self.counts)

    @property
    def width(self):
        """Columns of C and D."""
        return self.n if self.activation == "dsrelu" else 2 * self.n

    @property
    def flop(self):
        return 2 * self.m * self.n * self.k


def balanced(experts, rows):
    return (rows // experts,) * experts


def skewed(experts, rows, share=0.6, empty=3):
    """`share` of the rows in expert 1, none in the last `empty`, the rest even; all multiples of 256."""
    blocks = rows // 256
    large = round(share * blocks)
    others = experts - empty - 1
    even = [(blocks - large) // others + (i < (blocks - large) % others) for i in range(others)]
    return tuple(256 * count for count in (even[0], large, *even[1:], *(0,) * empty))


SUITES = {
    "h1": Suite("dswiglu", balanced(8, 32768), 4096, 8192),
    "h1-dgeglu": Suite("dgeglu", balanced(8, 32768), 4096, 8192, parameters=GEGLU),
    "h1-dsrelu": Suite("dsrelu", balanced(8, 32768), 4096, 8192),
    "dsv3": Suite("dswiglu", balanced(8, 65536), 2048, 7168),
    "dsv4f": Suite("dgeglu", balanced(8, 49152), 2048, 4096, parameters=CLAMPED_SWIGLU),
    "qwen30": Suite("dswiglu", balanced(16, 65536), 768, 2048),
    "qwen235": Suite("dswiglu", balanced(8, 65536), 1536, 4096),
    "gptoss": Suite("dgeglu", balanced(16, 32768), 2880, 2880, dbias=True, parameters=GEGLU),
    "mixtral": Suite("dswiglu", balanced(8, 16384), 14336, 4096),
    "nano": Suite("dsrelu", balanced(16, 49152), 1856, 2688, dbias=True),
    "super": Suite("dsrelu", balanced(8, 65536), 2688, 1024),
    "ultra": Suite("dsrelu", balanced(8, 65536), 5120, 2048),
    "k3": Suite("dsituglu", balanced(8, 65536), 3072, 3584),
    "glm5": Suite("dswiglu", balanced(32, 65536), 2048, 6144),
    "small": Suite("dswiglu", balanced(128, 32768), 768, 2048),
    "skew": Suite("dswiglu", skewed(16, 65536), 1536, 4096),
}


def tiny(suite):
    """The suite at a size for the CPU."""
    counts = tuple(min(count, 256) for count in suite.counts[-4:])
    return suite._replace(counts=(512, *counts), n=96 if suite.activation != "dsrelu" else 64, k=160)


class Format(NamedTuple):
    """Of the operands (None: BF16) and whether D is MXFP8 by rows and columns, otherwise BF16."""

    block: str | None
    quantised: bool

    @property
    def sf_vec_size(self):
        return 32 if self.block == "mxfp8" else 16


FORMATS = {
    "bf16": Format(None, False),
    "mxfp8": Format("mxfp8", True),
    "nvfp4": Format("nvfp4", False),
    "mxfp8-bf16": Format("mxfp8", False),
}


class Inputs(NamedTuple):
    """A (M, K) and B (L, N, K) in the operands' format (FP4 as bytes), their packed scales as bytes, and both in BF16;
    C (M, columns), prob (M,).
    """

    a: torch.Tensor
    sfa: torch.Tensor | None
    b: torch.Tensor
    sfb: torch.Tensor | None
    a_bf16: torch.Tensor
    b_bf16: torch.Tensor
    c: torch.Tensor
    prob: torch.Tensor


class Problem:
    """A suite in a format: SETS sets of inputs of order one, and the offsets of the experts."""

    def __init__(self, suite, format, dbias, device, sets=SETS):
        self.suite, self.format, self.dbias, self.device = suite, format, dbias, device
        self.ends = torch.tensor(suite.counts).cumsum(0).to(device, torch.int32)
        generator = torch.Generator(device).manual_seed(0)
        self.sets = [self._inputs(generator) for _ in range(sets)]

    def _inputs(self, generator):
        suite, options = self.suite, {"device": self.device, "generator": generator}
        bf16 = {**options, "dtype": torch.bfloat16}
        c = torch.randn(suite.m, suite.width, **bf16)
        prob = torch.rand(suite.m, **options) * 0.9 + 0.1
        a_shape, b_shape = (suite.m, suite.k), (len(suite.counts), suite.n, suite.k)
        if self.format.block is None:
            a, b = torch.randn(a_shape, **bf16), torch.randn(b_shape, **bf16).mul_(suite.k**-0.5)
            return Inputs(a, None, b, None, a, b, c, prob)
        a, sfa, b, sfb = *self._operand(a_shape, options), *self._operand(b_shape, options)
        dequantise = DEQUANTISE[self.format.block]
        return Inputs(a, sfa[0], b, sfb, dequantise(a, sfa[0]), dequantise(b, sfb), c, prob)

    def _operand(self, shape, options):
        """Random data and packed scales: what is random costs less to make than what is quantised."""
        blocks = (*shape[:-1], shape[-1] // self.format.sf_vec_size)
        if self.format.block == "mxfp8":
            data = torch.randn(shape, dtype=torch.bfloat16, **options).to(torch.float8_e4m3fn)
            middle = 127 - round(0.25 * math.log2(shape[-1]))
            scales = torch.randint(middle - 2, middle + 3, blocks, dtype=torch.uint8, **options)
        else:  # e4m3 scales from 1/32 to 1/8
            packed = (*shape[:-1], shape[-1] // 2)
            data = torch.randint(256, packed, dtype=torch.uint8, **options)
            scales = torch.randint(0x10, 0x20, blocks, dtype=torch.uint8, **options)
        by_expert = scales.permute(1, 2, 0) if scales.dim() == 3 else scales
        return data, physical_scales(pack_scales(by_expert)).contiguous()

    def scales(self, bytes):
        """Packed scales in their dtype."""
        return bytes.view(torch.float8_e8m0fnu if self.format.block == "mxfp8" else torch.float8_e4m3fn)


def derivative(suite):
    """(gate, up, r) -> dgate / prob, dup / prob, dprob term, where r is the GEMM's value."""
    p = suite.parameters

    def swiglu(gate, up, r):
        s = torch.sigmoid(gate)
        return r * up * s * (1 + gate * (1 - s)), r * gate * s, r * gate * s * up

    def geglu(gate, up, r):
        low, high, offset = p["glu_clamp_min"], p["glu_clamp_max"], p["linear_offset"]
        g, u = gate.clamp(max=high), up.clamp(low, high)
        s = torch.sigmoid(p["geglu_alpha"] * g)
        dgate = r * (u + offset) * s * (1 + p["geglu_alpha"] * g * (1 - s))
        return torch.where(gate <= high, dgate, 0), torch.where(u == up, r * g * s, 0), r * g * s * (u + offset)

    def situglu(gate, up, r):
        tg, tu, s = torch.tanh(gate / BETA1), torch.tanh(up / BETA2), torch.sigmoid(gate)
        g, u = BETA1 * tg * s, BETA2 * tu
        return r * u * ((1 - tg * tg) * s + g * (1 - s)), r * g * (1 - tu * tu), r * g * u

    return {"dswiglu": swiglu, "dgeglu": geglu, "dsituglu": situglu}[suite.activation]


def epilogue(suite):
    """(r, c, prob) -> D in float32, dprob; written so that the compiler makes one kernel of it."""
    gradients = None if suite.activation == "dsrelu" else derivative(suite)

    def squared_relu(r, c, prob):
        r, c = r.float(), torch.relu(c.float())
        return 2 * c * r * prob[:, None], (c * c * r).sum(1)

    def gated(r, c, prob):
        rows, columns = c.shape
        blocks = c.view(rows, columns // 64, 2, 32).float()
        r = r.view(rows, columns // 64, 1, 32).float()
        dgate, dup, term = gradients(blocks[:, :, :1], blocks[:, :, 1:], r)
        is_gate = (torch.arange(2, device=c.device) == 0).view(1, 1, 2, 1)
        d = torch.where(is_gate, dgate, dup) * prob[:, None, None, None]
        return d.view(rows, columns), torch.where(is_gate, term, 0.0).sum((1, 2, 3))

    return squared_relu if suite.activation == "dsrelu" else gated


def unswizzle(scales, rows, blocks):
    """Packed (..., R, B, 32, 4, 4) bytes as (..., rows, blocks)."""
    *lead, r, b, _, _, _ = scales.shape
    n = len(lead)
    matrix = scales.permute(*range(n), n, n + 3, n + 2, n + 1, n + 4).reshape(*lead, r * 128, b * 4)
    return matrix[..., :rows, :blocks]


def swizzle(scales):
    """(rows, blocks) bytes as packed (R, B, 32, 4, 4)."""
    rows, blocks = scales.shape
    padded = F.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    return padded.view(-1, 4, 32, (blocks + 3) // 4, 4).permute(0, 3, 2, 1, 4).contiguous()


def e8m0(bytes):
    return (bytes.to(torch.int32) << 23).view(torch.float32)


def dequantise_mxfp8(data, scales):
    *lead, rows, k = data.shape
    factors = e8m0(unswizzle(scales, rows, k // 32))
    return (data.float().view(*lead, rows, k // 32, 32) * factors[..., None]).bfloat16().view(data.shape)


def dequantise_nvfp4(data, scales):
    """The three bits of a magnitude, put where float32 has its exponent and mantissa, are its value times 2^-126."""
    *lead, rows, half = data.shape
    codes = (data[..., None].to(torch.int32) >> (torch.arange(2, device=data.device, dtype=torch.int32) * 4)) & 15
    values = (((codes & 7) << 22) | ((codes & 8) << 28)).view(torch.float32) * 2.0**126
    factors = unswizzle(scales, rows, half // 8).view(torch.float8_e4m3fn).float()
    blocks = values.view(*lead, rows, half // 8, 16) * factors[..., None]
    return blocks.bfloat16().view(*lead, rows, 2 * half)


DEQUANTISE = {"mxfp8": dequantise_mxfp8, "nvfp4": dequantise_nvfp4}


def _scale(amax):
    """The round-up power of two of amax / 448, as a byte, and its inverse."""
    bits = (amax * (1 / 448)).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(max=253)
    return exponent.to(torch.uint8), ((254 - exponent) << 23).view(torch.float32)


def quantise(d):
    """D (M, columns) in MXFP8 by rows and by columns: d_row, sf_row, d_col, sf_col."""
    rows, columns = d.shape
    by_row, by_column = d.view(rows, -1, 32), d.view(-1, 32, columns)
    row_scale, row_factor = _scale(by_row.abs().amax(2))
    column_scale, column_factor = _scale(by_column.abs().amax(1))
    d_row = (by_row * row_factor[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(d.shape)
    d_col = (by_column * column_factor[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(d.shape)
    return d_row, swizzle(row_scale), d_col, swizzle(column_scale.T)


class Reference:
    """Input set 0 in float32, expert by expert. ``errors`` compares a contender's outputs, given by their names."""

    LIMITS = {"r": 1e-2, "d": 1e-2, "dprob": 1e-2, "dbias": 1e-2, "row": 4e-2, "column": 4e-2}

    def __init__(self, problem):
        inputs, suite = problem.sets[0], problem.suite
        self.r = torch.empty(suite.m, suite.n, device=problem.device)
        self.d = torch.empty(suite.m, suite.width, device=problem.device)
        self.dprob = torch.empty(suite.m, device=problem.device)
        self.dbias = torch.zeros(len(suite.counts), suite.width, device=problem.device)
        start = 0
        for expert, count in enumerate(suite.counts):
            rows = slice(start, start + count)
            start += count
            self.r[rows] = inputs.a_bf16[rows].float() @ inputs.b_bf16[expert].float().T
            self.d[rows], self.dprob[rows] = epilogue(suite)(self.r[rows], inputs.c[rows], inputs.prob[rows])
            self.dbias[expert] = self.d[rows].sum(0)

    def errors(self, outputs):
        """{name: norm of the difference over the norm of the reference}, and whether all are within the limits."""
        references = {"r": self.r, "d": self.d, "row": self.d, "column": self.d}
        references |= {"dprob": self.dprob, "dbias": self.dbias}
        found = {}
        for name, value in self._plain(outputs).items():
            expected = references[name]
            difference = torch.linalg.vector_norm(value.reshape(expected.shape).float() - expected)
            found[name] = (difference / torch.linalg.vector_norm(expected)).item()
        return found, all(error <= self.LIMITS[name] for name, error in found.items())  # false for NaN

    def _plain(self, outputs):
        plain = {name: value for name, value in outputs.items() if name in self.LIMITS}
        if "d_row" in outputs:
            rows, columns = self.d.shape
            plain["row"] = dequantise_mxfp8(outputs["d_row"], outputs["sf_row"])
            scales = e8m0(unswizzle(outputs["sf_col"], columns, rows // 32)).T
            plain["column"] = (outputs["d_col"].float().view(-1, 32, columns) * scales[:, None]).view(rows, columns)
        return plain
