"""E3, the strongest rival that a user could write: a persistent Triton grouped GEMM through TMA descriptors, with the
activation's backward, dprob, dbias and the MXFP8 quantisers in its epilogue.

M and the ends of experts are multiples of 256, so no tile has two experts. C and D are walked in pieces of 64 columns.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
APPROXIMATE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter knows no PTX
PIECE = tl.constexpr(64)


class Config(NamedTuple):
    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    per_sm: int = 1
    flatten: bool = True
    prefetch: bool = True  # C to L2 while the main loop runs
    registers: int | None = None

    def __str__(self):
        flags = "f" * self.flatten + "p" * self.prefetch
        return f"{self.rows}x{self.columns}x{self.depth}s{self.stages}w{self.warps}c{self.per_sm}{flags}"


CONFIGS = (
    Config(128, 256, 64, 3, 8),
    Config(128, 256, 64, 4, 8),
    Config(256, 128, 64, 3, 8),
    Config(128, 256, 64, 4, 8, flatten=False),
    Config(128, 128, 64, 3, 8, per_sm=2, flatten=False, registers=128),
    Config(128, 128, 64, 5, 8),
    Config(128, 256, 64, 3, 8, prefetch=False),
    Config(128, 128, 64, 3, 4, per_sm=2, flatten=False),
)


@triton.jit
def _reciprocal_1p(x):
    """1 / (1 + x)"""
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "add.ftz.f32 $0, $1, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + x)


@triton.jit
def _gated(gate, up, r, ACTIVATION: tl.constexpr, P: tl.constexpr):
    """dgate / prob, dup / prob, the dprob term. P: GeGLU's alpha, upper limit, lower limit of up, offset."""
    if ACTIVATION == "dswiglu":
        s = _reciprocal_1p(tl.exp2(gate * -LOG2E))
        value = gate * s
        dup = r * value
        return (s + value - value * s) * (r * up), dup, dup * up
    elif ACTIVATION == "dgeglu":
        g = tl.minimum(gate, P[1])
        u = tl.minimum(tl.maximum(up, P[2]), P[1])
        s = _reciprocal_1p(tl.exp2(g * (-P[0] * LOG2E)))
        value = g * s
        dup = r * value
        dgate = (s + P[0] * (value - value * s)) * (r * (u + P[3]))
        return tl.where(gate <= P[1], dgate, 0.0), tl.where(u == up, dup, 0.0), dup * (u + P[3])
    else:  # SiTU-GLU with beta 4 and 25: with e = exp(-gate / 2), tanh(gate / 4) = 2 / (1 + e) - 1
        e = tl.exp2(gate * (-0.5 * LOG2E))
        tg = 2.0 * _reciprocal_1p(e) - 1.0
        tu = 2.0 * _reciprocal_1p(tl.exp2(up * (-0.08 * LOG2E))) - 1.0
        s = _reciprocal_1p(e * e)
        value = 4.0 * tg * s
        scaled = r * (25.0 * tu)
        return scaled * (s - tg * tg * s + value - value * s), r * value * (1.0 - tu * tu), value * scaled


@triton.jit
def _scale(amax):
    """The round-up power of two of amax / 448, as a byte, and its inverse."""
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = tl.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 253)
    return exponent.to(tl.uint8), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_byte(row, block, blocks):
    """Where the packed layout has the scale of a row's block."""
    return ((row // 128) * ((blocks + 3) // 4) + block // 4) * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4


@triton.jit
def _store_quantised(d, m0, x0, columns, M, d_desc, d_col_desc, sf_row, sf_col, ROWS: tl.constexpr):
    by_row = tl.reshape(d, (ROWS, PIECE // 32, 32))
    scale, factor = _scale(tl.max(tl.abs(by_row), 2))
    d_desc.store([m0, x0], tl.reshape(by_row * factor[:, :, None], (ROWS, PIECE)).to(d_desc.dtype))
    row = (m0 + tl.arange(0, ROWS))[:, None]
    block = (x0 // 32 + tl.arange(0, PIECE // 32))[None, :]
    tl.store(sf_row + _scale_byte(row, block, columns // 32), scale, mask=block < columns // 32)

    by_column = tl.reshape(d, (ROWS // 32, 32, PIECE))
    scale, factor = _scale(tl.max(tl.abs(by_column), 1))
    d_col_desc.store([m0, x0], tl.reshape(by_column * factor[:, None, :], (ROWS, PIECE)).to(d_col_desc.dtype))
    column = (x0 + tl.arange(0, PIECE))[None, :]
    block = (m0 // 32 + tl.arange(0, ROWS // 32))[:, None]
    tl.store(sf_col + _scale_byte(column, block, M // 32), scale, mask=column < columns)


@triton.jit
def _epilogue(
    r, m0, n0, expert, prob, M, N, c_desc, d_desc, d_col_desc, sf_row, sf_col, dbias,
    ACTIVATION: tl.constexpr, P: tl.constexpr, DBIAS: tl.constexpr, QUANTISED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a tile of the accumulator, by halves down to a piece: stores D and returns the rows' sums for dprob."""
    WIDTH: tl.constexpr = 1 if ACTIVATION == "dsrelu" else 2
    HALF: tl.constexpr = COLUMNS // 2
    if COLUMNS * WIDTH > PIECE:
        left, right = tl.split(tl.permute(tl.reshape(r, (ROWS, 2, HALF)), (0, 2, 1)))
        sums = _epilogue(
            left, m0, n0, expert, prob, M, N, c_desc, d_desc, d_col_desc, sf_row, sf_col, dbias,
            ACTIVATION, P, DBIAS, QUANTISED, ROWS, HALF,
        )  # fmt: skip
        return sums + _epilogue(
            right, m0, n0 + HALF, expert, prob, M, N, c_desc, d_desc, d_col_desc, sf_row, sf_col, dbias,
            ACTIVATION, P, DBIAS, QUANTISED, ROWS, HALF,
        )  # fmt: skip
    else:
        x0 = n0 * WIDTH
        c = c_desc.load([m0, x0])
        if ACTIVATION == "dsrelu":
            c = tl.maximum(c.to(tl.float32), 0.0)
            product = c * r
            d = product * (2.0 * prob)[:, None]
            term = c * product
        else:
            gate, up = tl.split(tl.permute(tl.reshape(c, (ROWS, PIECE // 64, 2, 32)), (0, 1, 3, 2)))
            gate = tl.reshape(gate, (ROWS, COLUMNS)).to(tl.float32)
            up = tl.reshape(up, (ROWS, COLUMNS)).to(tl.float32)
            dgate, dup, term = _gated(gate, up, r, ACTIVATION, P)
            dgate = tl.reshape(dgate * prob[:, None], (ROWS, PIECE // 64, 32))
            dup = tl.reshape(dup * prob[:, None], (ROWS, PIECE // 64, 32))
            d = tl.reshape(tl.permute(tl.join(dgate, dup), (0, 1, 3, 2)), (ROWS, PIECE))
        if QUANTISED:
            _store_quantised(d, m0, x0, WIDTH * N, M, d_desc, d_col_desc, sf_row, sf_col, ROWS)
        else:
            d_desc.store([m0, x0], d.to(d_desc.dtype))
        if DBIAS:
            column = x0 + tl.arange(0, PIECE)
            at = dbias + expert * (WIDTH * N) + column
            tl.atomic_add(at, tl.sum(d, 0), mask=column < WIDTH * N, sem="relaxed")
        return tl.sum(term, 1)


@triton.jit(do_not_specialize=["experts"])
def _kernel(
    a_desc, b_desc, c_desc, d_desc, d_col_desc, c_ptr, prob_ptr, dprob, dbias, sf_row, sf_col, ends_ptr,
    M, N, K, experts, EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr, P: tl.constexpr, DBIAS: tl.constexpr, QUANTISED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    row_tiles = M // ROWS
    column_tiles = tl.cdiv(N, COLUMNS)
    steps = tl.cdiv(K, DEPTH)
    tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=FLATTEN):
        first = tile // (GROUP * column_tiles) * GROUP  # GROUP tiles of rows share each tile of B while it is in L2
        group = tl.minimum(row_tiles - first, GROUP)
        inner = tile % (GROUP * column_tiles)
        m0 = (first + inner % group) * ROWS
        n0 = (inner // group) * COLUMNS
        index = tl.arange(0, EXPERTS)
        ends = tl.load(ends_ptr + index, mask=index < experts, other=2147483647)
        expert = tl.sum((ends <= m0).to(tl.int32), 0)
        rows = m0 + tl.arange(0, ROWS)
        if PREFETCH:  # a line of 128 bytes is a piece's row
            WIDTH: tl.constexpr = 1 if ACTIVATION == "dsrelu" else 2
            column = tl.minimum(WIDTH * n0 + PIECE * tl.arange(0, WIDTH * COLUMNS // PIECE), WIDTH * N - 1)
            lines = c_ptr + rows.to(tl.int64)[:, None] * (WIDTH * N) + column[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
            )
        r = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = a_desc.load([m0, step * DEPTH])
            b = b_desc.load([expert * N + n0, step * DEPTH])
            r = tl.dot(a, b.T, r)
        prob = tl.load(prob_ptr + rows)
        sums = _epilogue(
            r, m0, n0, expert, prob, M, N, c_desc, d_desc, d_col_desc, sf_row, sf_col, dbias,
            ACTIVATION, P, DBIAS, QUANTISED, ROWS, COLUMNS,
        )  # fmt: skip
        tl.atomic_add(dprob + rows, sums, sem="relaxed")


class Fused:
    """The kernel in one configuration, with outputs of its own: ``run(a, b, c, prob)`` fills and returns them by name."""

    def __init__(self, problem, config):
        suite, device = problem.suite, problem.device
        self.problem, self.config = problem, config
        dtype = torch.float8_e4m3fn if problem.format.quantised else torch.bfloat16
        self.d = torch.empty(suite.m, suite.width, dtype=dtype, device=device)
        self.dprob = torch.empty(suite.m, device=device)
        self.dbias = torch.empty(len(suite.counts), suite.width, device=device)
        self.outputs = {"dprob": self.dprob} | ({"dbias": self.dbias} if problem.dbias else {})
        if problem.format.quantised:
            byte = {"dtype": torch.uint8, "device": device}
            self.d_col = torch.empty_like(self.d)
            self.sf_row = torch.zeros(suite.m // 128, -(-suite.width // 128), 32, 4, 4, **byte)
            self.sf_col = torch.zeros(-(-suite.width // 128), suite.m // 128, 32, 4, 4, **byte)
            self.outputs |= {"d_row": self.d, "d_col": self.d_col, "sf_row": self.sf_row, "sf_col": self.sf_col}
        else:
            self.d_col, self.sf_row, self.sf_col = self.d, self.dprob, self.dprob  # not written
            self.outputs["d"] = self.d
        self.parameters = tuple(
            suite.parameters.get(name, 0.0)
            for name in ("geglu_alpha", "glu_clamp_max", "glu_clamp_min", "linear_offset")
        )

    def run(self, a, b, c, prob):
        problem, config = self.problem, self.config
        (experts, n, k), m = b.shape, a.shape[0]
        self.dprob.zero_()
        if problem.dbias:
            self.dbias.zero_()
        descriptor = TensorDescriptor.from_tensor
        piece = [config.rows, PIECE.value]
        tiles = m // config.rows * -(-n // config.columns)
        programs = min(_multiprocessors(problem.device) * config.per_sm, tiles)
        registers = {"maxnreg": config.registers} if config.registers else {}
        _kernel[(programs,)](
            descriptor(a, [config.rows, config.depth]),
            descriptor(b.view(experts * n, k), [config.columns, config.depth]),
            descriptor(c, piece), descriptor(self.d, piece), descriptor(self.d_col, piece),
            c, prob, self.dprob, self.dbias, self.sf_row, self.sf_col, problem.ends,
            m, n, k, experts, EXPERTS=max(32, triton.next_power_of_2(experts)),
            ACTIVATION=problem.suite.activation, P=self.parameters, DBIAS=problem.dbias,
            QUANTISED=problem.format.quantised, ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth, GROUP=8,
            PROGRAMS=programs, FLATTEN=config.flatten, PREFETCH=config.prefetch and APPROXIMATE.value,
            num_warps=config.warps, num_stages=config.stages, **registers,
        )  # fmt: skip
        return self.outputs


def _multiprocessors(device):
    return torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 4
