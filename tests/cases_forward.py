"""Cases of srelu, glu, mm, wgrad and dact: inputs, the call, and the comparison of everything that comes back.

Operands, weights, scales and guarded buffers are those of cases.py.
"""

from dataclasses import dataclass, field, fields, replace

import cases
import numpy as np
import oracle
import oracle_formats as formats
import oracle_forward
import torch
from cases import DTYPES, FP4, FP8, Guarded, operator
from compare import check_rounded, f32, within
from oracle_formats import FORMATS, ceil_div
from oracle_forward import column_blocks, spans

OUTPUTS = ("c", "d", "d_col", "amax", "sfd_row", "sfd_col")
TENSORS = ("a", "b", "padded_offsets", "alpha", "prob", "bias")  # in the order of the operators


@dataclass(frozen=True)
class Case(cases.Case):
    """One call of srelu, glu or mm. n: columns of the GEMM and of C; c and d: dtypes of the outputs."""

    op: str = "srelu"
    bias: str | None = None  # its dtype
    prob: bool = True
    alpha: bool = True
    generate_c: bool = True

    @property
    def width(self) -> int:
        return 2 if self.op == "glu" else 1

    @property
    def columns(self) -> int:
        """Of D."""
        return self.n // self.width

    @property
    def act(self) -> str:
        return self.options.get("act_func", "swiglu") if self.op == "glu" else self.op

    @property
    def amax(self) -> bool:
        return self.scaled and self.d in ("bf16", "fp16")

    def flat(self, **changes) -> cases.Case:
        """A dsrelu case with the same operands."""
        same = {f.name: getattr(self, f.name) for f in fields(cases.Case)}
        return cases.Case(**{**same, "op": "dsrelu", **changes})

    def __str__(self):
        return describe(self.op, self)


def describe(name: str, case) -> str:
    default = type(case)()
    parts = [f"{k}={v}" for k, v in case.__dict__.items() if k != "op" and v != getattr(default, k)]
    return f"{name}({', '.join(parts)})"


@dataclass
class Built:
    case: Case
    arguments: dict  # by the operators' names
    problem: oracle_forward.Problem
    alive: list

    def expected(self) -> oracle_forward.Expected:
        return oracle_forward.expected(self.problem, exact=self.case.data == "exact")


# Data ---------------------------------------------------------------------------------------------------------

# With alpha a multiple of GATE_STEP, every gate of an exact case is 0 or so large that its sigmoid (and tanh) is 0 or 1.
GATE_STEP = 256.0


def exact(case):
    """The case with exact data and with activation constants under which exact data exists."""
    extra = dict(cases.EXACT_OPTIONS.get("d" + case.act.removeprefix("d"), {}))
    for bound in ("glu_clamp_max", "glu_clamp_min"):
        if bound in case.options:
            extra[bound] = float(round(case.options[bound]))
    if case.options.get("tanh_clamp_scale"):
        extra["tanh_clamp_scale"] = 2.0**-8  # tanh of any non-zero operand of an exact case is 1
    changes = {"data": "exact", "options": {**case.options, **extra}}
    return replace(case, alpha=True, **changes) if case.act in oracle_forward.GLU else replace(case, **changes)


def bias_values(case: Case, rng) -> np.ndarray:
    shape = (case.experts, case.n)
    if case.data == "random":
        return rng.standard_normal(shape) * 2
    bias = rng.choice([-9.0, -7.5, -3.0, -0.5, 0.0, 2.0, 7.5], shape)
    if case.op == "glu":
        gates, ups = column_blocks(case.n, 2)
        large = [gates, ups] if case.act == "situglu" else [gates]
        for columns in large:
            bias[:, columns] = rng.choice([-GATE_STEP, 0.0, GATE_STEP], (case.experts, len(columns)))
    return bias


def build(case: Case) -> Built:
    rng = np.random.default_rng(case.seed + 1000)
    base = cases.build(case.flat())
    a, b, _, padded_offsets, alpha, prob = base.positional
    alpha_values, prob_values = base.problem.alpha, base.problem.prob
    if case.op == "glu" and case.data == "exact":
        alpha *= GATE_STEP
        alpha_values = alpha_values * GATE_STEP
        prob /= GATE_STEP  # so that D is in FP16's range
        prob_values = prob_values / GATE_STEP
    bias = bias_codes = None
    if case.bias:
        codes, bias = cases.encode(bias_values(case, rng), case.bias)
        empty = sorted(set(range(case.experts)) - {e for e, _ in spans(case.offsets)})
        if case.poison:  # an expert without rows needs no bias and no alpha
            codes[empty] = np.nan if case.bias == "f32" else 0x7FFF
            alpha[empty] = torch.nan
        bias_codes = cases.tensor_of(codes, case.bias)
    arguments = {
        "a": a,
        "b": b,
        "padded_offsets": padded_offsets,
        "alpha": alpha if case.alpha else None,
        "prob": prob if case.prob else None,
        "bias": bias_codes,
        **base.keywords,
    }
    known = {f.name for f in fields(oracle_forward.Problem)}
    problem = oracle_forward.Problem(
        operation=case.op,
        a=base.problem.a,
        b=base.problem.b,
        offsets=list(case.offsets),
        alpha=alpha_values if case.alpha else None,
        prob=prob_values if case.prob else None,
        bias=bias,
        **{k: v for k, v in case.options.items() if k in known},
    )
    return Built(case, arguments, problem, base.alive)


# The call -----------------------------------------------------------------------------------------------------


def invoke(name: str, arguments: dict, order=TENSORS):
    keywords = {k: v for k, v in arguments.items() if k not in order}
    return operator(name)(*[arguments[k] for k in order], **keywords)


def output_buffers(case: Case, guarded: Guarded) -> dict:
    """Poisoned buffers for everything that the case gives."""
    buffers = cases.output_buffers(case.flat(n=case.columns, dbias=False), guarded)
    del buffers["dprob"]
    buffers["d"] = buffers.pop("d_row")
    if case.generate_c:
        shape = (case.rows, case.n) if case.rank == 2 else (case.rows, case.n, 1)
        buffers["c"] = guarded.tensor(shape, DTYPES[case.c])
    return buffers


def call(built: Built, guarded: Guarded | None = None):
    """(outputs by name, what amax held before the call)."""
    case = built.case
    start = np.full((case.experts, 1), -np.inf)
    if case.form == "functional":
        results = {"c_dtype": DTYPES[case.c], "d_dtype": DTYPES[case.d], "generate_c": case.generate_c}
        return dict(zip(OUTPUTS, invoke(case.op, {**built.arguments, **results}), strict=True)), start
    guarded = guarded or Guarded()
    buffers = output_buffers(case, guarded)
    if "amax" in buffers:
        start = np.random.default_rng(case.seed).choice([-np.inf, 0.0, 2.0**20], start.shape)
        buffers["amax"].copy_(torch.from_numpy(start))
    invoke(f"{case.op}_out", {**built.arguments, **buffers})
    guarded.check()
    return buffers, start


# Comparison ---------------------------------------------------------------------------------------------------


def check_shapes(case: Case, outputs: dict) -> None:
    def matrix(columns):
        return (case.rows, columns) if case.rank == 2 else (case.rows, columns, 1)

    def scales(rows, blocks):
        return (32, 4, ceil_div(rows, 128), 4, ceil_div(blocks, 4), 1)

    scale = DTYPES[case.sf] if case.scaled else torch.float8_e8m0fnu
    want = {
        "c": (matrix(case.n), case.generate_c, DTYPES[case.c]),
        "d": (matrix(case.columns), True, DTYPES[case.d]),
        "d_col": (matrix(case.columns), case.quantized, DTYPES[case.d]),
        "amax": ((case.experts, 1), case.amax, torch.float32),
        "sfd_row": (scales(case.rows, ceil_div(case.columns, 32)), case.quantized, scale),
        "sfd_col": (scales(case.columns, ceil_div(case.rows, 32)), case.quantized, scale),
    }
    for name, (shape, there, dtype) in want.items():
        got = outputs[name]
        assert tuple(got.shape) == (shape if there else (0,)), f"{name} has shape {tuple(got.shape)}"
        assert got.dtype == dtype, f"{name} has dtype {got.dtype}"


def check_saturated(what: str, got, approx, name: str) -> None:
    """As check_rounded; FP8 saturates."""
    if name not in FP8:
        return check_rounded(what, got, approx, name)
    return within(what, got, *(FORMATS[name].round(f32(end), saturate=True) for end in (approx.low, approx.high)))


def check(built: Built, outputs: dict, start, want: oracle_forward.Expected | None = None) -> None:
    """Compare every output of the call."""
    case, want = built.case, want or built.expected()
    if case.form == "functional":
        check_shapes(case, outputs)
    if case.generate_c:
        check_saturated("c", cases.values_of(outputs["c"].reshape(case.rows, case.n)), want.c, case.c)
    d = outputs["d"].reshape(case.rows, case.columns)
    if case.quantized:
        cases.check_scaled_d(case, {**outputs, "d_row": outputs["d"]}, want)
    else:
        check_rounded("d", cases.values_of(d), want.d, case.d)
        if outputs.get("d_col") is not None and outputs["d_col"].numel():
            assert torch.equal(outputs["d_col"], outputs["d"]), "d_col differs from d"
    if outputs.get("amax") is not None and outputs["amax"].numel():
        ends = [np.maximum(f32(end), start) for end in (want.amax.low, want.amax.high)]
        within("amax", cases.values_of(outputs["amax"]), *ends)


def run(case: Case) -> dict:
    """Build, call, compare; returns the outputs."""
    built = build(case)
    outputs, start = call(built)
    check(built, outputs, start)
    return outputs


# Weight gradient ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WgradCase:
    """out[g] (m, n) = A[:, tokens of g] @ B[tokens of g, :]."""

    offsets: tuple = (256, 512)
    tokens: int | None = None  # None: the last offset
    m: int = 48
    n: int = 80
    ab: str = "bf16"
    sf: str = "e8m0"
    vec: int = 32
    a_major: str = "tokens"  # the contiguous dimension: tokens or rows
    b_major: str = "tokens"
    discrete: bool = True
    sf_form: str = "view"
    scales: str = "both"  # global scales: none, a, b, both
    d: str = "bf16"
    form: str = "functional"  # functional, out, accumulate
    poison: bool = False
    data: str = "random"
    seed: int = 0

    @property
    def k(self) -> int:
        return self.offsets[-1] if self.tokens is None else self.tokens

    @property
    def scaled(self) -> bool:
        return self.ab != "bf16"

    @property
    def operand(self) -> formats.Format:
        return FORMATS["e2m1" if self.ab in FP4 else self.ab]

    def __str__(self):
        return describe("wgrad", self)


def token_scale_offsets(case: WgradCase, rows: int) -> np.ndarray:
    """Byte of the scale of (row, block of tokens): one tensor over all tokens, or one after the other for each expert.

    -1: tokens of no expert have no scale in the second form.
    """
    blocks = case.k // case.vec
    if not case.discrete:
        return formats.scale_offsets(rows, blocks)
    out, base = np.full((rows, blocks), -1, dtype=np.int64), 0
    for _, tokens in spans(case.offsets):
        first, last = tokens.start // case.vec, tokens.stop // case.vec
        out[:, first:last] = base + formats.scale_offsets(rows, last - first)
        base += formats.scale_bytes(rows, last - first)
    return out


def wgrad_operand(case: WgradCase, rng, rows: int, major: str, transposed: bool):
    """(tensor, scale tensor or None, values (rows, T))."""
    codes, scales, values = cases.operand(case, rng, rows)
    tail = case.offsets[-1]
    if case.poison:
        codes[:, tail:] = {"bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7}[case.operand.name]
    tensor = cases.tensor_of(cases.storage(codes, case), case.ab)
    if major == "rows":
        tensor = tensor.T.contiguous().T
    if scales is None:
        return tensor.T if transposed else tensor, None, values
    flat = np.full(formats.scale_bytes(rows, case.k // case.vec), 0xFF if case.poison else 0, np.uint8)
    places = token_scale_offsets(case, rows)
    if case.poison and not case.discrete:
        scales[:, tail // case.vec :] = 0xFF
    flat[places[places >= 0]] = scales[places >= 0]
    packed = cases.tensor_of(flat, case.sf)
    if case.sf_form != "flat":
        packed = packed.view(1, ceil_div(rows, 128), ceil_div(case.k // case.vec, 4), 32, 4, 4)
    if case.sf_form == "view":
        packed = packed.permute(3, 4, 1, 5, 2, 0)
    return tensor.T if transposed else tensor, packed, values


@dataclass
class BuiltWgrad:
    case: WgradCase
    arguments: dict
    problem: oracle_forward.WeightGradient

    def expected(self, old=None):
        return oracle_forward.weight_gradient(self.problem, old, exact=self.case.data == "exact")


WGRAD_TENSORS = ("a", "b", "padded_offsets")


def build_wgrad(case: WgradCase) -> BuiltWgrad:
    rng = np.random.default_rng(case.seed)
    a, sfa, a_values = wgrad_operand(case, rng, case.m, case.a_major, False)
    b, sfb, b_values = wgrad_operand(case, rng, case.n, case.b_major, True)
    arguments = {"a": a, "b": b, "padded_offsets": torch.tensor(case.offsets, dtype=torch.int32)}
    if case.scaled:
        arguments.update(sfa=sfa, sfb=sfb, sf_vec_size=case.vec, discrete_col_sfd=case.discrete)
    factors = {}
    for side in "ab":
        if case.scales not in (side, "both"):
            continue
        count = len(case.offsets)
        values = rng.choice([0.5, -0.5, 2.0], count) if case.data == "exact" else rng.uniform(-1.5, 1.5, count)
        values = values.astype(np.float32)
        given = values.copy()
        if case.poison:  # not used by an expert without tokens
            given[sorted(set(range(count)) - {e for e, _ in spans(case.offsets)})] = np.nan
        arguments[f"global_scale_{side}"] = torch.from_numpy(given)
        factors[side] = values.astype(np.float64)
    problem = oracle_forward.WeightGradient(a_values, b_values, list(case.offsets), factors.get("a"), factors.get("b"))
    return BuiltWgrad(case, arguments, problem)


def wgrad_buffers(case: WgradCase, guarded: Guarded) -> list:
    return [guarded.tensor((case.m, case.n), DTYPES[case.d]) for _ in case.offsets]


def call_wgrad(built: BuiltWgrad):
    """(one output per expert, their values before the call or None)."""
    case = built.case
    if case.form == "functional":
        out = invoke("wgrad", {**built.arguments, "d_dtype": DTYPES[case.d]}, WGRAD_TENSORS)
        assert out.shape == (len(case.offsets), case.m, case.n)
        assert out.dtype == DTYPES[case.d]
        assert out.is_contiguous()
        return list(out.unbind(0)), None
    guarded, old = Guarded(), None
    out = wgrad_buffers(case, guarded)
    if case.form == "accumulate":
        rng = np.random.default_rng(case.seed + 1)
        for buffer in out:
            values = rng.integers(-8, 9, (case.m, case.n)) * 0.5
            buffer.copy_(torch.from_numpy(values))
        old = [cases.values_of(buffer.clone()) for buffer in out]
    invoke("wgrad_out", {**built.arguments, "out": out, "accumulate": old is not None}, WGRAD_TENSORS)
    guarded.check()
    return out, old


def run_wgrad(case: WgradCase) -> list:
    built = build_wgrad(case)
    out, old = call_wgrad(built)
    for e, want in enumerate(built.expected(old)):
        check_rounded(f"out[{e}]", cases.values_of(out[e].contiguous()), want, case.d)
    return out


# Backward epilogue on a given value ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DactCase:
    """dact of r (M, n) and c (M, width * n), or (L, width * n). options: act_func and its parameters."""

    offsets: tuple = (256, 512)
    m: int | None = None
    n: int = 64
    r: str = "bf16"
    c: str = "bf16"
    d: str = "bf16"
    r_rank: int = 2
    rank: int = 2
    dbias: bool = True
    generate_d: bool = True
    c_per_expert: bool = False
    prob: bool = True
    poison: bool = False
    data: str = "random"
    seed: int = 0
    options: dict = field(default_factory=lambda: {"act_func": "dswiglu"})

    @property
    def act(self) -> str:
        return self.options["act_func"]

    def flat(self) -> cases.Case:
        """The case of dsrelu or dglu with the same C and D."""
        op = "dsrelu" if self.act in ("dsrelu", "identity") else "dglu"
        same = {f.name: getattr(self, f.name) for f in fields(self) if f.name in cases.Case.__dataclass_fields__}
        return cases.Case(op, k=16, ab="bf16", vec=16, **{**same, "form": "out"})

    def __str__(self):
        return describe("dact", self)


@dataclass
class BuiltDact:
    case: DactCase
    arguments: dict
    problem: oracle.Problem
    r: np.ndarray

    def expected(self) -> oracle.Expected:
        def value(ar, _, rows):
            return ar.number(self.r[rows])

        return oracle_forward.backward(self.problem, value, exact=self.case.data == "exact")


DACT_TENSORS = ("r", "c", "padded_offsets", "prob")


def build_dact(case: DactCase) -> BuiltDact:
    """C and prob are those of cases.build; r is drawn here."""
    rng = np.random.default_rng(case.seed + 2000)
    flat = case.flat()
    saved = cases.saved_c(flat, rng, np.ones(flat.experts))
    rows, tail = flat.rows, case.offsets[-1]
    exact_data = case.data == "exact"
    small = [-2.0, -1.0, 0.0, 0.5, 1.0]
    r_codes, r = cases.encode(
        rng.choice(small, (rows, case.n)) if exact_data else rng.standard_normal((rows, case.n)), case.r
    )
    c_codes, c = cases.encode(saved[: flat.experts] if case.c_per_expert else saved, case.c)
    prob = rng.choice([0.0, 0.5, -0.5, 2.0], rows) if exact_data else rng.uniform(-1, 1.5, rows)
    prob = prob.astype(np.float32)
    given = prob.copy()
    if case.poison:
        empty = np.diff(case.offsets, prepend=0) == 0  # an expert without rows needs no c
        unused = empty if case.c_per_expert else slice(tail, None)
        for codes, name, where in ((r_codes, case.r, slice(tail, None)), (c_codes, case.c, unused)):
            codes[where] = np.nan if name == "f32" else 0x7F if name in FP8 else 0x7FFF
        given[tail:] = np.nan

    def shaped(tensor, rank):
        return tensor if rank == 2 else tensor.unsqueeze(-1)

    prob_tensor = torch.from_numpy(given)
    arguments = {
        "r": shaped(cases.tensor_of(r_codes, case.r), case.r_rank),
        "c": shaped(cases.tensor_of(c_codes, case.c), case.rank),
        "padded_offsets": torch.tensor(case.offsets, dtype=torch.int32),
        "prob": (prob_tensor if case.rank == 2 else prob_tensor.view(-1, 1, 1)) if case.prob else None,
        **({"c_per_expert": True} if case.c_per_expert else {}),
        **case.options,
    }
    if case.c_per_expert:
        c = np.concatenate([c, c[-1:]])[np.searchsorted(case.offsets, np.arange(rows), side="right")]
    known = {f.name for f in fields(oracle.Problem)}
    problem = oracle.Problem(
        operation=flat.op,
        a=np.zeros((rows, 0)),
        b=[],
        c=c,
        offsets=list(case.offsets),
        alpha=np.ones(flat.experts),
        beta=None,
        prob=prob.astype(np.float64) if case.prob else np.ones(rows),
        c_role="preactivation",
        **{k: v for k, v in case.options.items() if k in known},
    )
    return BuiltDact(case, arguments, problem, r)


def call_dact(built: BuiltDact) -> dict:
    case = built.case
    results = {"d_dtype": DTYPES[case.d], "generate_dbias": case.dbias, "generate_d": case.generate_d}
    outputs = invoke("dact", {**built.arguments, **results}, DACT_TENSORS)
    return dict(zip(("d", "dprob", "dbias"), outputs, strict=True))


def run_dact(case: DactCase) -> dict:
    built, flat = build_dact(case), case.flat()
    outputs = call_dact(built)
    matrix = (flat.rows, flat.columns) if case.rank == 2 else (flat.rows, flat.columns, 1)
    want = {
        "d": (matrix if case.generate_d else (0,), DTYPES[case.d]),
        "dprob": ((flat.rows,) if case.rank == 2 and case.prob else (flat.rows, 1, 1), torch.float32),
        "dbias": ((flat.experts, flat.columns, 1) if case.dbias else (0,), torch.bfloat16),
    }
    for name, (shape, dtype) in want.items():
        assert tuple(outputs[name].shape) == shape, f"{name} has shape {tuple(outputs[name].shape)}"
        assert outputs[name].dtype == dtype, f"{name} has dtype {outputs[name].dtype}"
    none = cases.Starts(np.zeros(flat.rows), np.zeros((flat.experts, flat.columns)), np.array(-np.inf))
    flat_built = cases.Built(flat, [], {}, built.problem, [])
    d = outputs["d"] if case.generate_d else call_dact(replace(built, case=replace(case, generate_d=True)))["d"]
    cases.check(flat_built, {**outputs, "d_row": d}, none, built.expected())
    return outputs
