"""Cases of the two backward operators: inputs, the call, and the comparison of everything that comes back."""

from dataclasses import dataclass, field, replace

import numpy as np
import oracle
import oracle_formats as formats
import torch
from compare import check_quantized, check_rounded, within
from oracle_formats import FORMATS, ceil_div

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "fp4": torch.float4_e2m1fn_x2,
    "uint8": torch.uint8,
}
FP8 = ("e4m3", "e5m2")
FP4 = ("fp4", "uint8")
OUTPUTS = ("d_row", "d_col", "dprob", "dbias", "amax", "sfd_row", "sfd_col")
CANARY = 0xA5
GUARD = 256  # bytes on each side; a multiple of the 16-byte alignment


@dataclass(frozen=True)
class Case:
    """One call. `data`: "random" (derived tolerance) or "exact" (every bit compared)."""

    op: str = "dsrelu"
    offsets: tuple = (256, 512)
    m: int | None = None  # None: the last offset
    n: int = 64
    k: int = 64
    ab: str = "e4m3"
    sf: str = "e8m0"
    vec: int = 32
    c: str = "bf16"
    d: str = "bf16"
    weights: str = "dense_k"  # dense_k, dense_n, list_k, list_n, ptrs_k, ptrs_n
    sf_form: str = "view"  # view, physical, flat
    rank: int = 3
    dbias: bool = False
    dequantized: bool = False  # B in BF16 beside a block-scaled A
    discrete_col_sfd: bool = False
    norm: float = 1.0
    form: str = "functional"  # functional, out
    poison: bool = False  # NaN in the input rows past the last offset and in the padding of the scales
    data: str = "random"
    seed: int = 0
    options: dict = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.offsets[-1] if self.m is None else self.m

    @property
    def width(self) -> int:
        return 1 if self.op == "dsrelu" else 2

    @property
    def columns(self) -> int:
        return self.n * self.width

    @property
    def experts(self) -> int:
        return len(self.offsets)

    @property
    def scaled(self) -> bool:
        return self.ab != "bf16"

    @property
    def operand(self) -> formats.Format:
        return FORMATS["e2m1" if self.ab in FP4 else self.ab]

    @property
    def quantized(self) -> bool:
        return self.d in FP8

    def __str__(self):
        default = Case()
        parts = [f"{k}={v}" for k, v in self.__dict__.items() if k != "op" and v != getattr(default, k)]
        return f"{self.op}({', '.join(parts)})"


@dataclass
class Built:
    """The arguments of a call, what must stay alive beside them, and the oracle's view of the same numbers."""

    case: Case
    positional: list
    keywords: dict
    problem: oracle.Problem
    alive: list

    def expected(self) -> oracle.Expected:
        return oracle.expected(self.problem, exact=self.case.data == "exact")


def tensor_of(codes, name: str) -> torch.Tensor:
    """Codes (bytes or halves; float32 values for f32) as a tensor of the format's dtype."""
    codes = np.ascontiguousarray(codes)
    if name == "f32":
        return torch.from_numpy(codes.astype(np.float32))
    return torch.from_numpy(codes).view(DTYPES[name])


def values_of(tensor: torch.Tensor) -> np.ndarray:
    """Float64 values of a tensor, decoded by the oracle's tables."""
    names = {v: k for k, v in DTYPES.items()}
    name = names[tensor.dtype]
    if name == "f32":
        return tensor.numpy().astype(np.float64)
    integer = torch.uint8 if tensor.element_size() == 1 else torch.uint16
    return FORMATS[name].decode(tensor.view(integer).numpy())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, for comparisons to the bit."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(integers[tensor.element_size()])


def encode(x, name: str):
    """Codes and the float64 values they stand for."""
    if name == "f32":
        x = np.asarray(x).astype(np.float32)
        return x, x.astype(np.float64)
    codes = FORMATS[name].encode(x)
    return codes, FORMATS[name].decode(codes)


# Data ---------------------------------------------------------------------------------------------------------

# Pre-activations at which every activation is exact in FP32 (exp(-64) vanishes beside 1, exp(-192) is below
# FP32's range) and, for dgeglu, both sides of the bounds 7 and -7 with bound values kept.
EXACT_GATES = {
    "dswiglu": [0, 64, -192],
    "dgeglu": [0, 4, 7, 7.5, 9, -192],
    "dsituglu": [0, 256, -256],
}
EXACT_UPS = {"dswiglu": [-2, -1, 0, 1, 3], "dgeglu": [-9, -7.5, -7, -3, 0, 2, 7, 7.5], "dsituglu": [0, 256, -256]}
# Steep enough for the gates above: sigmoid(16 * 4) is 1.
EXACT_OPTIONS = {
    "dgeglu": {"geglu_alpha": 16.0},
    "dsituglu": {"situ_beta1": 2.0, "situ_beta2": 2.0},
}


def exact(case: Case) -> Case:
    """The case with exact data and with activation constants under which exact data exists."""
    extra = dict(EXACT_OPTIONS.get(case.options.get("act_func"), {}))
    if "glu_clamp_max" in case.options:
        extra["glu_clamp_max"] = float(round(case.options["glu_clamp_max"]))
    if case.options.get("tanh_clamp_scale"):
        extra = {"tanh_clamp_scale": 2.0**-8}  # tanh of any non-zero operand of an exact case is 1
    return replace(case, data="exact", options={**case.options, **extra})


def operand_values(case: Case, rng, rows: int, sparse: bool) -> np.ndarray:
    if case.data == "random":
        return rng.standard_normal((rows, case.k))
    if not sparse:
        return rng.choice([-2.0, -1.0, 0.0, 1.0, 2.0], (rows, case.k))
    # Two ones a row, at places that reach every part of K: sums stay short, and no K block is without effect.
    values = np.zeros((rows, case.k))
    for _ in range(2):
        places = rng.permutation(np.arange(rows) * case.k // max(rows, 1))
        values[np.arange(rows), places] = rng.choice([-1.0, 1.0], rows)
    return values


def scale_values(case: Case, rng, rows: int) -> np.ndarray:
    blocks = ceil_div(case.k, case.vec)
    if case.sf == "e8m0":
        low, high = (0, 1) if case.data == "exact" else (-3, 3)
        return (127 + rng.integers(low, high + 1, (rows, blocks))).astype(np.uint8)
    if case.data == "exact":
        return formats.E4M3.encode(rng.choice([1.0, 2.0], (rows, blocks)))
    return rng.integers(0x28, 0x48, (rows, blocks)).astype(np.uint8)  # 0.25 to 4, all mantissas


def operand(case: Case, rng, rows: int, sparse: bool = False):
    """Codes (rows, K), scale bytes (rows, blocks) or None, and the values they stand for."""
    codes, values = encode(operand_values(case, rng, rows, sparse), case.operand.name)
    if not case.scaled:
        return codes, None, values
    scales = scale_values(case, rng, rows)
    scale = np.repeat(formats.decode_scale(scales, case.sf), case.vec, axis=1)[:, : case.k]
    return codes, scales, values * scale


def saved_c(case: Case, rng, beta) -> np.ndarray:
    rows, act = case.rows, case.options.get("act_func", "dswiglu")
    if case.data == "random":
        # Wide enough for gates and ups on both sides of the clamps at 7, dense enough near zero.
        return rng.standard_normal((rows, case.columns)) * rng.choice([0.5, 2.0, 5.0], (rows, 1))
    if case.op == "dsrelu":
        return rng.choice([-2.0, -1.0, 0.0, 0.5, 1.0], (rows, case.columns))
    x = rng.choice(EXACT_UPS[act], (rows, case.columns)).astype(np.float64)
    gates = oracle.gate_columns(case.n)
    x[:, gates] = rng.choice(EXACT_GATES[act], (rows, case.n))
    if act == "dgeglu" and case.scaled:
        return x
    for e, (start, end) in enumerate(zip([0, *case.offsets[:-1]], case.offsets, strict=True)):
        x[start:end] /= beta[e]
    return x


def per_expert(case: Case, rng, power: float, zero_seed: int) -> np.ndarray:
    """alpha or beta: both signs, and for one seed in three zero for the first of several experts with rows."""
    if case.data == "exact":
        values = rng.choice([0.5, -0.5, 2.0, -2.0], case.experts)
    else:
        values = rng.choice([-1.0, 1.0], case.experts) * rng.uniform(0.4, 1.6, case.experts) * case.k**power
    ends = np.array(case.offsets)
    used = np.flatnonzero(np.diff(ends, prepend=0))
    if len(used) > 1 and case.seed % 3 == zero_seed:
        values[used[0]] = 0.0
    return values.astype(np.float32)


def packed(scales: list, poison: bool) -> np.ndarray:
    """Scale matrices, one an expert, as the packed buffer; padding 0, or NaN bytes."""
    parts = []
    for matrix in scales:
        part = np.full(formats.scale_bytes(*matrix.shape), 0xFF if poison else 0, np.uint8)
        part[formats.scale_offsets(*matrix.shape)] = matrix
        parts.append(part)
    return np.concatenate(parts)


def scale_tensor(case: Case, scales: list) -> torch.Tensor:
    rows, blocks = scales[0].shape
    flat = tensor_of(packed(scales, case.poison), case.sf)
    if case.sf_form == "flat":
        return flat
    physical = flat.view(len(scales), ceil_div(rows, 128), ceil_div(blocks, 4), 32, 4, 4)
    return physical if case.sf_form == "physical" else physical.permute(3, 4, 1, 5, 2, 0)


def storage(codes, case: Case):
    return formats.pack_fp4(codes) if case.ab in FP4 else codes


def build(case: Case) -> Built:
    rng = np.random.default_rng(case.seed)
    rows, experts = case.rows, case.experts
    a_codes, a_scales, a = operand(case, rng, rows, sparse=True)
    weights = [operand(case, rng, case.n) for _ in range(experts)]
    alpha = per_expert(case, rng, -0.5 if case.op == "dsrelu" else -0.25, zero_seed=1)
    # Exact dswiglu and dsituglu divide their gates by beta: no zero there.
    beta = per_expert(case, rng, 0.0, zero_seed=2) if case.op == "dglu" else None
    if case.data == "exact" and beta is not None:
        beta = np.where(beta == 0, np.float32(0.5), beta)
    c_codes, c = encode(saved_c(case, rng, beta), case.c)
    if case.data == "exact":
        prob = rng.choice([0.0, 0.5, -0.5, 1.0, 2.0], rows).astype(np.float32)
    else:
        prob = (rng.uniform(-1, 1.5, rows) * (rng.random(rows) > 0.1)).astype(np.float32)

    tail = case.offsets[-1]
    if case.poison:
        a_codes[tail:] = {"bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7}[case.operand.name]
        if a_scales is not None:
            a_scales[tail:] = 0xFF
        c_codes[tail:] = np.nan if case.c == "f32" else {"bf16": 0x7FFF, "fp16": 0x7FFF}.get(case.c, 0x7F)
        prob[tail:] = np.nan

    def shaped(t):
        return t if case.rank == 2 else t.unsqueeze(-1)

    tensors = {
        "a": shaped(tensor_of(storage(a_codes, case), case.ab)),
        "c": shaped(tensor_of(c_codes, case.c)),
        "padded_offsets": torch.tensor(case.offsets, dtype=torch.int32),
        "alpha": torch.from_numpy(alpha),
        "prob": torch.from_numpy(prob) if case.rank == 2 else torch.from_numpy(prob).view(-1, 1, 1),
    }
    keywords = dict(case.options)
    alive = []
    kind, major = case.weights.split("_")
    if case.dequantized:
        per_weight = [tensor_of(encode(values, "bf16")[0], "bf16") for _, _, values in weights]
    else:
        per_weight = [tensor_of(storage(codes, case), case.ab) for codes, _, _ in weights]
    if kind == "dense":
        stacked = torch.stack([w.view(torch.uint8) if w.element_size() == 1 else w for w in per_weight])
        stacked = stacked.view(per_weight[0].dtype)
        b = stacked.permute(1, 2, 0)
        if major == "n":
            # Stored (L, K, N): the strides of the same (N, K, L) tensor become (1, N, N K).
            b = stacked.transpose(1, 2).contiguous().permute(2, 1, 0)
        b = [b]
    else:
        b = per_weight if major == "k" else [w.T.contiguous().T for w in per_weight]
    if case.scaled:
        keywords.update(sfa=scale_tensor(case, [a_scales]), sf_vec_size=case.vec)
        scales = [s for _, s, _ in weights]
        sfb = [scale_tensor(case, scales)] if kind == "dense" else [scale_tensor(case, [s]) for s in scales]
    if case.quantized:
        keywords["norm_const"] = torch.tensor([case.norm], dtype=torch.float32)
    if case.discrete_col_sfd:
        keywords["discrete_col_sfd"] = True
    if kind == "ptrs":
        alive += b
        keywords.update(b_ptrs=pointer_table(b, case), n=case.n, b_dtype=per_weight[0].dtype, b_major=major)
        if case.scaled and not case.dequantized:
            alive += sfb
            keywords["sfb_ptrs"] = pointer_table(sfb, case)
        b = []
    elif case.scaled and not case.dequantized:
        keywords["sfb"] = sfb
    order = [tensors["a"], b, tensors["c"], tensors["padded_offsets"], tensors["alpha"]]
    if case.op == "dglu":
        order.append(torch.from_numpy(beta))
    order.append(tensors["prob"])

    known = set(oracle.Problem.__dataclass_fields__)
    problem = oracle.Problem(
        operation=case.op,
        a=a,
        b=[values for _, _, values in weights],
        c=c,
        offsets=list(case.offsets),
        alpha=alpha.astype(np.float64),
        beta=None if beta is None else beta.astype(np.float64),
        prob=prob.astype(np.float64),
        block_scaled=case.scaled,
        **{k: v for k, v in case.options.items() if k in known},
    )
    return Built(case, order, keywords, problem, alive)


def pointer_table(tensors, case: Case) -> torch.Tensor:
    """Addresses, null for an expert without rows: they must not be followed."""
    starts = [0, *case.offsets[:-1]]
    used = [end > start for start, end in zip(starts, case.offsets, strict=True)]
    return torch.tensor([t.data_ptr() if u else 0 for t, u in zip(tensors, used, strict=True)], dtype=torch.int64)


# The call -----------------------------------------------------------------------------------------------------


class Guarded:
    """Output buffers with canary bytes on both sides."""

    def __init__(self, device="cpu"):
        self.device = device
        self.storages = []

    def tensor(self, shape, dtype, fill: int = 0xFF, strides=None) -> torch.Tensor:
        count = int(np.prod(shape, dtype=np.int64))
        size = count * torch.empty((), dtype=dtype).element_size()
        room = torch.full((size + 2 * GUARD + 64,), CANARY, dtype=torch.uint8, device=self.device)
        start = GUARD + (-(room.data_ptr() + GUARD)) % 64
        room[start : start + size] = fill
        self.storages.append((room, start, size))
        inner = room[start : start + size].view(dtype) if size else torch.empty(0, dtype=dtype, device=self.device)
        return inner.view(shape) if strides is None else inner.as_strided(shape, strides)

    def check(self) -> None:
        for i, (room, start, size) in enumerate(self.storages):
            outside = torch.cat([room[:start], room[start + size :]])
            assert bool((outside == CANARY).all()), f"bytes outside output {i} were written"


def operator(name: str):
    return getattr(torch.ops.cudnn_grouped, name).default


@dataclass
class Starts:
    """What the accumulating outputs of the destination-passing form held before the call."""

    dprob: np.ndarray
    dbias: np.ndarray
    amax: np.ndarray


def output_buffers(case: Case, guarded: Guarded) -> dict:
    """Poisoned buffers for everything the case gives."""
    rows, columns = case.rows, case.columns
    shape = (rows, columns) if case.rank == 2 else (rows, columns, 1)
    buffers = {"d_row": guarded.tensor(shape, DTYPES[case.d])}
    if case.scaled:
        buffers["d_col"] = guarded.tensor(shape, DTYPES[case.d])
        buffers["amax"] = guarded.tensor((case.experts, 1) if case.width == 1 else (case.experts, 2, 1), torch.float32)
    buffers["dprob"] = guarded.tensor((rows,) if case.rank == 2 else (rows, 1, 1), torch.float32)
    if case.dbias:
        buffers["dbias"] = guarded.tensor((case.experts, columns, 1), torch.bfloat16)
    if case.quantized:
        for name, r, b in (("sfd_row", rows, ceil_div(columns, 32)), ("sfd_col", columns, ceil_div(rows, 32))):
            physical = guarded.tensor((1, ceil_div(r, 128), ceil_div(b, 4), 32, 4, 4), DTYPES[case.sf])
            buffers[name] = physical.permute(3, 4, 1, 5, 2, 0)
    return buffers


def call(built: Built, guarded: Guarded | None = None):
    """(outputs by name, start values of the accumulators)."""
    case = built.case
    if case.form == "functional":
        keywords = {**built.keywords, "d_dtype": DTYPES[case.d], "generate_dbias": case.dbias}
        outputs = dict(zip(OUTPUTS, operator(case.op)(*built.positional, **keywords), strict=True))
        starts = Starts(np.zeros(case.rows), np.zeros((case.experts, case.columns)), np.array(-np.inf))
        return outputs, starts
    own = guarded is None
    guarded = guarded or Guarded()
    buffers = output_buffers(case, guarded)
    rng = np.random.default_rng(case.seed + 1)
    # Start values: powers of two times small integers, so that exact cases stay exact.
    dprob = rng.integers(-4, 5, case.rows) * 0.5
    buffers["dprob"].copy_(torch.from_numpy(dprob.astype(np.float32)).view(buffers["dprob"].shape))
    dbias, amax = np.zeros((case.experts, case.columns)), np.zeros((case.experts, case.width))
    if case.dbias:
        dbias = rng.integers(-4, 5, dbias.shape) * 0.5
        buffers["dbias"].copy_(torch.from_numpy(dbias.astype(np.float32)).view(buffers["dbias"].shape))
    if "amax" in buffers:
        amax = rng.choice([-np.inf, 0.0, 2.0**20], amax.shape)
        buffers["amax"].copy_(torch.from_numpy(amax.astype(np.float32)).view(buffers["amax"].shape))
    operator(f"{case.op}_out")(*built.positional, **built.keywords, **buffers)
    if own:
        guarded.check()
    return buffers, Starts(dprob, dbias, amax)


# Comparison ---------------------------------------------------------------------------------------------------


def scale_matrix(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of an SFD view in memory order; checks that the view is the documented one."""
    physical = tensor.permute(5, 2, 4, 0, 1, 3)
    assert physical.is_contiguous(), f"scale view has strides {tensor.stride()}"
    return physical.contiguous().view(torch.uint8).numpy().reshape(-1)


def bytes_at(flat, offsets):
    """Scale matrix at the byte offsets (-1: none, read as 0), and whether all other bytes are zero."""
    used = offsets >= 0
    matrix = np.where(used, flat[np.maximum(offsets, 0)], 0)
    rest = np.ones(flat.size, bool)
    rest[offsets[used]] = False
    return matrix, not flat[rest].any()


def check_shapes(case: Case, outputs: dict) -> None:
    rows, columns = case.rows, case.columns
    matrix = (rows, columns) if case.rank == 2 else (rows, columns, 1)
    sf_rows, sf_blocks = ceil_div(rows, 128), ceil_div(ceil_div(columns, 32), 4)
    sf_columns, sf_m = ceil_div(columns, 128), ceil_div(ceil_div(rows, 32), 4)
    amax = (case.experts, 1) if case.width == 1 else (case.experts, 2, 1)
    functional = case.form == "functional"
    present = {
        "d_row": (matrix, True),
        "d_col": (matrix, case.quantized),
        "dprob": ((rows,) if case.rank == 2 else (rows, 1, 1), True),
        "dbias": ((case.experts, columns, 1), case.dbias),
        "amax": (amax, case.scaled and case.d in ("bf16", "fp16")),
        "sfd_row": ((32, 4, sf_rows, 4, sf_blocks, 1), case.quantized),
        "sfd_col": ((32, 4, sf_columns, 4, sf_m, 1), case.quantized),
    }
    d = DTYPES[case.d]
    dtypes = {"d_row": d, "d_col": d, "dprob": torch.float32, "dbias": torch.bfloat16, "amax": torch.float32}
    for name, (shape, there) in present.items():
        if not functional:
            continue
        want = shape if there else (0,)
        assert tuple(outputs[name].shape) == want, f"{name} has shape {tuple(outputs[name].shape)}, expected {want}"
        scale = DTYPES[case.sf] if case.scaled else torch.float8_e8m0fnu
        assert outputs[name].dtype == dtypes.get(name, scale), f"{name} has dtype {outputs[name].dtype}"


def add_start(approx: oracle.Approx, start, is_exact: bool) -> oracle.Approx:
    value = approx.value + start
    extra = 0.0 if is_exact else oracle.U * (np.abs(value) + approx.error)
    return oracle.Approx(value, approx.error + extra)


def check(built: Built, outputs: dict, starts: Starts, want: oracle.Expected | None = None) -> None:
    """Compare every output of the call."""
    case, is_exact = built.case, built.case.data == "exact"
    want = want or built.expected()
    rows, columns = case.rows, case.columns
    check_shapes(case, outputs)
    d = outputs["d_row"].reshape(rows, columns)
    if not case.quantized:
        check_rounded("d_row", values_of(d), want.d, case.d)
        if outputs.get("d_col") is not None and outputs["d_col"].numel():
            assert torch.equal(outputs["d_col"], outputs["d_row"]), "d_col differs from d_row"
    else:
        check_scaled_d(case, outputs, want)
    dprob = add_start(want.dprob, starts.dprob, is_exact)
    dprob.value[case.offsets[-1] :], dprob.error[case.offsets[-1] :] = 0.0, 0.0  # the tail is written as zero
    check_rounded("dprob", values_of(outputs["dprob"].reshape(rows)), dprob, "f32")
    if case.dbias:
        dbias = add_start(want.dbias, starts.dbias, is_exact)
        check_rounded("dbias", values_of(outputs["dbias"].reshape(case.experts, columns)), dbias, "bf16")
    if outputs.get("amax") is not None and outputs["amax"].numel():
        got = values_of(outputs["amax"].reshape(case.experts, case.width))
        low = np.maximum(oracle.f32(want.amax.low), starts.amax)
        high = np.maximum(oracle.f32(want.amax.high), starts.amax)
        within("amax", got, low, high)


def check_scaled_d(case: Case, outputs: dict, want: oracle.Expected) -> None:
    rows, columns, data_format = case.rows, case.columns, FORMATS[case.d]
    codes = {name: outputs[name].reshape(rows, columns).view(torch.uint8).numpy() for name in ("d_row", "d_col")}
    row_scales, clean = bytes_at(scale_matrix(outputs["sfd_row"]), formats.scale_offsets(rows, ceil_div(columns, 32)))
    assert clean, "padding bytes of sfd_row are not zero"
    check_quantized("d_row", codes["d_row"], row_scales, want.d, data_format, case.norm)
    places = formats.column_scale_offsets(rows, columns, case.offsets, case.discrete_col_sfd)
    column_scales, clean = bytes_at(scale_matrix(outputs["sfd_col"]), places)
    assert clean, "padding bytes of sfd_col are not zero"
    transposed = oracle.Approx(want.d.value.T, want.d.error.T)
    check_quantized("d_col", codes["d_col"].T, column_scales, transposed, data_format, case.norm)


def run(case: Case) -> dict:
    """Build, call, compare; returns the outputs."""
    built = build(case)
    outputs, starts = call(built)
    check(built, outputs, starts)
    return outputs
