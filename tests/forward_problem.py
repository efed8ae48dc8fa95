"""Calls of the documented forward wrappers and classes, and what they must give, in FP64 and plain torch.

The operands are small integers (and what the block formats make of them), alpha and the scales powers of two: the GEMM is
exact in FP32 in any order, so that C can be compared to the bit and D up to the rounding of one activation.
"""

from dataclasses import dataclass, field

import torch

import cudnn_grouped
from cudnn_grouped.scales import unpack_scales

WRAPPERS = {
    "srelu": cudnn_grouped.grouped_gemm_srelu_wrapper_sm100,
    "glu": cudnn_grouped.grouped_gemm_glu_wrapper_sm100,
    "mm": cudnn_grouped.grouped_gemm_wrapper_sm100,
    "quant": cudnn_grouped.grouped_gemm_quant_wrapper_sm100,
}
CLASSES = {"srelu": cudnn_grouped.GroupedGemmSreluSm100, "glu": cudnn_grouped.GroupedGemmGluSm100}
OPERATORS = {"srelu": "srelu", "glu": "glu", "mm": "mm", "quant": "mm"}
RETURNS = {
    "srelu": ("c", "d", "d_col", "amax", "sfd_row", "sfd_col"),
    "glu": ("c", "d", "d_col", "amax", "sfd_row", "sfd_col"),
    "mm": ("d", "c"),
    "quant": ("d", "d_col", "amax", "sfd_row", "sfd_col"),
}
# (operand dtype, scale dtype, elements per scale); uint8 is packed FP4.
FORMATS = {
    "bf16": (torch.bfloat16, None, 16),
    "mxfp8": (torch.float8_e4m3fn, torch.float8_e8m0fnu, 32),
    "mxfp8_e5m2": (torch.float8_e5m2, torch.float8_e8m0fnu, 32),
    "nvfp4": (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16),
    "mxfp4": (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32),
    "uint8": (torch.uint8, torch.float8_e8m0fnu, 16),
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BARE = ("padded_offsets", "b_ptrs", "sfb_ptrs")
TENSORS = ("a", "b", "sfa", "sfb", "padded_offsets", "alpha", "bias", "b_ptrs", "sfb_ptrs", "norm_const", "prob")


@dataclass(frozen=True)
class Case:
    op: str = "srelu"
    format: str = "bf16"
    offsets: tuple = (256, 256, 768)
    m: int = 1024
    n: int = 192
    k: int = 64
    weights: str = "dense_k"  # dense_k, dense_n, list_k, list_n, ptrs_k, ptrs_n
    bias: torch.dtype | None = None
    prob: bool = True
    rank: int = 3
    options: dict = field(default_factory=dict)

    @property
    def width(self):
        return 2 if self.op == "glu" else 1

    @property
    def scaled(self):
        return self.format != "bf16"

    def __str__(self):
        default = Case()
        changed = {k: v for k, v in self.__dict__.items() if k != "op" and v != getattr(default, k)}
        return f"{self.op}({', '.join(f'{k}={v}' for k, v in changed.items())})"


@dataclass
class Problem:
    """Wrapper arguments; the numbers behind them in FP64; the tensors behind pointers."""

    case: Case
    arguments: dict
    a: torch.Tensor
    b: list
    alpha: torch.Tensor
    bias: torch.Tensor | None
    prob: torch.Tensor
    alive: list

    def call(self, **changes):
        return WRAPPERS[self.case.op](**{**self.arguments, **changes})

    def ranges(self):
        return list(zip([0, *self.case.offsets[:-1]], self.case.offsets, strict=True))


def quantized(x, format):
    """(data, scales) of (rows, columns, batch) values; data alone for BF16."""
    dtype, sf_dtype, vec = FORMATS[format]
    if sf_dtype is None:
        strides = (x.shape[1], 1, x.shape[0] * x.shape[1])
        return torch.empty_strided(x.shape, strides, dtype=dtype).copy_(x), None
    data_dtype = torch.float4_e2m1fn_x2 if dtype == torch.uint8 else dtype
    data, scales = torch.ops.cudnn_grouped.quantize(x, data_dtype, sf_dtype, vec)
    return data.view(dtype), scales


def decoded(data, scales, vec):
    """FP64 values (rows, columns) of one matrix and its scale matrix (rows, blocks)."""
    if data.element_size() == 1 and data.dtype not in FP8:
        codes = data.view(torch.uint8)
        values = E2M1[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()].double()
    else:
        values = data.double()
    if scales is None:
        return values
    return values * scales.float().double().repeat_interleave(vec, dim=1)[:, : values.shape[1]]


def build(case):
    generator = torch.Generator().manual_seed(0)
    experts, vec = len(case.offsets), FORMATS[case.format][2]

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).float()

    a_data, a_scales = quantized(integers(1, case.m, case.k).permute(1, 2, 0), case.format)
    b_data, b_scales = quantized(integers(experts, case.n, case.k).permute(1, 2, 0), case.format)
    blocks = -(-case.k // vec)
    logical = [None, None]
    if case.scaled:
        logical = [unpack_scales(s, (r, blocks, e)) for s, r, e in ((a_scales, case.m, 1), (b_scales, case.n, experts))]
    a = decoded(a_data[..., 0], None if logical[0] is None else logical[0][..., 0], vec)
    b = [decoded(b_data[..., g], None if logical[1] is None else logical[1][..., g], vec) for g in range(experts)]
    alpha = torch.tensor([0.125, -1.0, -0.25, 0.5, 0.0625])[torch.arange(experts) % 5]
    arguments = {
        "a_tensor": a_data if case.rank == 3 else a_data[..., 0],
        "padded_offsets": torch.tensor(case.offsets, dtype=torch.int32),
        "alpha_tensor": alpha,
        **case.options,
    }
    prob = torch.ones(case.m)
    if case.prob:
        prob = torch.rand(case.m, generator=generator) * 2 - 0.5
        prob[::7] = 0
        arguments["prob_tensor"] = prob.view(-1, 1, 1) if case.rank == 3 else prob
    bias = None
    if case.bias is not None:
        stored = (integers(experts, case.n) * 0.25).to(case.bias)
        arguments["bias_tensor"], bias = stored.t(), stored.double()
    alive = add_weights(case, arguments, b_data, a_scales, b_scales)
    return Problem(case, arguments, a, b, alpha.double(), bias, prob.double(), alive)


def add_weights(case, arguments, b, sfa, sfb):
    """The weight arguments of the case's mode; returns what must stay alive."""
    kind, major = case.weights.split("_")
    experts = [one.contiguous() for one in b.view(torch.uint8 if b.element_size() == 1 else b.dtype).unbind(2)]
    if major == "n":
        experts = [one.t().contiguous().t() for one in experts]
    experts = [one.view(b.dtype) for one in experts]
    scales = None if sfb is None else list(sfb.split(1, dim=5))
    if case.scaled:
        arguments |= {"sfa_tensor": sfa, "sf_vec_size": FORMATS[case.format][2]}
    if kind == "list":
        arguments |= {"b_tensor": experts} | ({"sfb_tensor": scales} if case.scaled else {})
    elif kind == "dense":
        raw = torch.stack([one.t().view(torch.uint8) if one.element_size() == 1 else one.t() for one in experts])
        dense = raw.permute(2, 1, 0) if major == "n" else b.view(raw.dtype)
        arguments |= {"b_tensor": dense.view(b.dtype)} | ({"sfb_tensor": sfb} if case.scaled else {})
    else:
        arguments |= {"b_ptrs": addresses(experts), "n": case.n, "b_dtype": b.dtype, "b_major": major}
        arguments |= {"sfb_ptrs": addresses(scales)} if case.scaled else {}
    return [experts, scales]


def addresses(tensors):
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def activation(case, x):
    """FP64 (M, N) to (M, D's columns)."""
    options = {**{"geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0}, **case.options}
    if case.op == "srelu":
        scale, r = case.options.get("tanh_clamp_scale"), x.relu()
        return r.square() if scale is None else (scale * (r / scale).tanh()).square()
    blocks = x.view(x.shape[0], x.shape[1] // 64, 2, 32)
    gate, up = blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)
    kind = case.options.get("act_func", "swiglu")
    if kind == "swiglu":
        return gate * gate.sigmoid() * up
    if kind == "geglu":
        offset = options.get("linear_offset")
        gate = gate.clamp(max=options["glu_clamp_max"])
        up = up.clamp(options["glu_clamp_min"], options["glu_clamp_max"])
        return gate * (options["geglu_alpha"] * gate).sigmoid() * (up + (1.0 if offset is None else offset))
    b1, b2 = options.get("situ_beta1", 4.0), options.get("situ_beta2", 25.0)
    return b1 * (gate / b1).tanh() * gate.sigmoid() * b2 * (up / b2).tanh()


def expected(problem):
    """FP64 C (rounded to FP32 once, as the operator has it) and D; rows of no expert are zero."""
    case = problem.case
    c = torch.zeros(case.m, case.n, dtype=torch.float64)
    plain = case.op in ("mm", "quant")
    for g, (start, end) in enumerate(problem.ranges()):
        c[start:end] = problem.alpha[g] * (problem.a[start:end] @ problem.b[g].t())
        if problem.bias is not None:
            c[start:end] += problem.bias[g] * (problem.prob[start:end, None] if plain else 1)
    c = c.float().double()
    if plain:
        return c, c if problem.bias is not None else c * problem.prob[:, None]
    return c, activation(case, c) * problem.prob[:, None]


# Half an ulp of the format, and half its smallest step.
ROUNDING = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
}
# Of the activations in FP32: a few operations, and an argument of exp of up to 30 that is rounded to FP32.
FP32 = 2.0**-18


def check_d(got, want):
    """The rounding of D's dtype, and the FP32 operations before it."""
    relative, absolute = ROUNDING[got.dtype]
    error = (got.reshape(want.shape).double() - want).abs()
    allowed = want.abs() * (relative + FP32) + absolute + 2.0**-120  # FP32 underflows
    assert bool((error <= allowed).all()), f"D is off by {float((error - allowed).max())} more than allowed"


def operator_call(problem, d_dtype=None, **more):
    """The functional operator on the same arguments: {output name: tensor}."""
    case, given = problem.case, dict(problem.arguments)
    given = {(k if k in BARE else k.removesuffix("_tensor")): v for k, v in given.items()}
    positional = [given.pop("a"), as_list(given.pop("b", None)), given.pop("padded_offsets"), given.pop("alpha")]
    if "bias" in given:
        given["bias"] = given["bias"].t()
    if "sfb" in given:
        given["sfb"] = as_list(given["sfb"])
    operator = getattr(torch.ops.cudnn_grouped, OPERATORS[case.op])
    return dict(zip(RETURNS["srelu"], operator(*positional, **given, d_dtype=d_dtype, **more), strict=True))


def as_list(value):
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def class_call(problem, d_dtype, **constructor):
    """(operation, execute arguments, output buffers) for the wrapper arguments of a problem."""
    case, arguments = problem.case, problem.arguments
    outputs = buffers(case, d_dtype, constructor.pop("c_dtype", torch.bfloat16))
    is_tensor = lambda k: (k if k in BARE else k.removesuffix("_tensor")) in TENSORS  # noqa: E731
    tensors = {k: v for k, v in arguments.items() if is_tensor(k)}
    options = {k: v for k, v in arguments.items() if not is_tensor(k)}
    execute = {"sfa_tensor": None, "c_tensor": None, **tensors, **{f"{k}_tensor": v for k, v in outputs.items()}}
    samples = {f"sample_{k.removesuffix('_tensor')}": v for k, v in execute.items() if k not in ("b_ptrs", "sfb_ptrs")}
    if "n" in options:
        options |= {"num_experts": len(case.offsets), "b_shape": (options.pop("n"), case.k)}
    scalars = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "situ_beta1", "situ_beta2")
    execute |= {k: options.pop(k) for k in scalars if k in options}
    return CLASSES[case.op](**{**samples, **options, **constructor}), execute, outputs


def buffers(case, d_dtype, c_dtype=torch.bfloat16):
    columns = case.n // case.width
    shape = (case.m, columns, 1)

    def filled(shape, dtype):
        return torch.empty(shape, dtype=dtype).view(torch.uint8).fill_(0x5A).view(dtype)

    made = {"c": filled((case.m, case.n, 1), c_dtype), "d": filled(shape, d_dtype)}
    if not case.scaled:
        return made
    made["d_col"] = filled(shape, d_dtype)
    made["amax"] = torch.full((len(case.offsets), 1), -torch.inf)
    if d_dtype in FP8:
        for name, rows, blocks in (("sfd_row", case.m, -(-columns // 32)), ("sfd_col", columns, case.m // 32)):
            physical = filled((1, -(-rows // 128), -(-blocks // 4), 32, 4, 4), FORMATS[case.format][1])
            made[name] = physical.permute(3, 4, 1, 5, 2, 0)
    return made


def same_bits(x, y):
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(raw(x), raw(y))


def raw(tensor):
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)
