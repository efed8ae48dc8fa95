"""Malformed calls of srelu, glu, mm, wgrad and dact, as in test_operator_errors.py: one table, each row a RuntimeError
"<argument>: expected X, got Y" that leaves nothing behind."""

import cases
import cases_forward as forward
import pytest
import torch
from cases import DTYPES
from cases_forward import Case, DactCase, WgradCase
from test_operator_errors import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    F16,
    F32,
    F64,
    FP4,
    I32,
    I64,
    U8,
    change,
    description,
    drop,
    dtype,
    fill,
    like,
    longer,
    misaligned,
    put,
    shape,
    spread,
    transposed,
)

import cudnn_grouped

NVFP4 = {"ab": "fp4", "sf": "e4m3", "vec": 16}
# R: srelu, U: glu, M: mm, W: wgrad, D: dact. 8, 4, B: operands; q: FP8 D; P, L: pointers, list; o: outputs given.
BASES = {
    "R8": Case("srelu", bias="f32"),
    "R8q": Case("srelu", d="e4m3", bias="f32"),
    "R4": Case("srelu", bias="bf16", **NVFP4),
    "RB": Case("srelu", ab="bf16", vec=16, bias="bf16"),
    "RP": Case("srelu", weights="ptrs_k"),
    "RL": Case("srelu", weights="list_k"),
    "Ro": Case("srelu", form="out", bias="f32"),
    "Roq": Case("srelu", d="e4m3", form="out"),
    "RoB": Case("srelu", ab="bf16", vec=16, form="out", bias="bf16"),
    "U8": Case("glu", bias="f32"),
    "U8q": Case("glu", d="e5m2", bias="fp16"),
    "U4": Case("glu", **NVFP4),
    "UB": Case("glu", ab="bf16", vec=16, bias="bf16"),
    "UP": Case("glu", weights="ptrs_k"),
    "UL": Case("glu", weights="list_k"),
    "Uo": Case("glu", n=128, form="out", bias="f32"),
    "Uoq": Case("glu", n=128, d="e4m3", form="out"),
    "M8": Case("mm", bias="f32"),
    "M8q": Case("mm", d="e4m3"),
    "MB": Case("mm", ab="bf16", vec=16, bias="bf16"),
    "Mo": Case("mm", form="out", bias="f32"),
    "W8": WgradCase(ab="e4m3"),
    "W4": WgradCase(**NVFP4),
    "WB": WgradCase(vec=16),
    "Wr": WgradCase(ab="e4m3", a_major="rows", b_major="rows"),
    "Wo": WgradCase(ab="e4m3", form="out"),
    "WoB": WgradCase(vec=16, form="out"),
    "D1": DactCase(options={"act_func": "dsrelu"}),
    "D2": DactCase(rank=3),
}


class Call:
    """A call as a dict of named arguments, so that a change is an assignment."""

    def __init__(self, base: str):
        case = BASES[base]
        self.order, self.suffix = forward.TENSORS, "_out" if getattr(case, "form", "") == "out" else ""
        if isinstance(case, WgradCase):
            self.op, self.order = "wgrad", forward.WGRAD_TENSORS
            self.arguments = dict(forward.build_wgrad(case).arguments)
            buffers, results = {"out": forward.wgrad_buffers(case, cases.Guarded())}, {"d_dtype": BF16}
        elif isinstance(case, DactCase):
            self.op, self.order = "dact", forward.DACT_TENSORS
            self.arguments = dict(forward.build_dact(case).arguments)
            buffers, results = {}, {"d_dtype": BF16, "generate_dbias": True}
        else:
            self.op, self.built = case.op, forward.build(case)
            self.arguments = dict(self.built.arguments)
            results = {"c_dtype": BF16, "d_dtype": DTYPES[case.d], "generate_c": True}
            buffers = forward.output_buffers(case, cases.Guarded()) if self.suffix else {}
            if "amax" in buffers:
                buffers["amax"].zero_()
        self.arguments.update(buffers if self.suffix else results)
        self.outputs = [t for value in buffers.values() for t in (value if isinstance(value, list) else [value])]

    def run(self) -> list:
        result = forward.invoke(self.op + self.suffix, self.arguments, self.order)
        if result is None:
            return self.outputs
        return [result] if isinstance(result, torch.Tensor) else list(result)


TABLE = []


def row(bases: str, argument: str, what):
    for base in bases.split():
        TABLE.append((base, argument, what))


# Dtypes
for bases, name, to in (
    ("R8 U8 M8 R4 RB W8 WB", "a", F32),
    ("M8 W4", "a", I32),
    ("D1 D2", "r", E4M3),
    ("D1", "r", F64),
    ("R8 U8 M8 W8", "b", E5M2),
    ("R8 UB", "b", F16),
    ("W4", "b", E4M3),
    ("RL UL", "b[1]", E5M2),
    ("R8 UB MB W8 D1", "padded_offsets", I64),
    ("R8 UB MB", "alpha", F64),
    ("U8", "alpha", BF16),
    ("R8 UB MB D2", "prob", F64),
    ("U8 D1", "prob", BF16),
    ("R8 UB MB", "bias", F64),
    ("U8", "bias", E4M3),
    ("M8", "bias", I32),
    ("R8 U4 W8", "sfa", U8),
    ("R8 M8 W8", "sfb", E4M3),
    ("R4 U4 W4", "sfb", E8M0),
    ("R8q U8q M8q", "norm_const", F64),
    ("RP UP", "b_ptrs", I32),
    ("RP", "sfb_ptrs", F32),
    ("D1 D2", "c", I32),
    ("Ro Uo Mo RoB", "d", F64),
    ("RoB", "d", E4M3),
    ("Ro Uo", "c", F64),
    ("RoB", "c", E4M3),
    ("Roq Uoq", "d_col", F32),
    ("Ro Uo Mo", "amax", F16),
    ("Roq", "sfd_row", E4M3),
    ("Uoq", "sfd_col", U8),
    ("W8 WB", "global_scale_a", BF16),
    ("W4", "global_scale_b", F64),
    ("Wo", "out[1]", F32),
):
    row(bases, name, dtype(name.split("[")[0], to))
row("Wo", "out[0]", lambda a: a.update(out=[t.to(F64) for t in a["out"]]))
row("R8 U8 M8", "c_dtype", put(c_dtype=F64))
row("RB UB", "c_dtype", put(c_dtype=E4M3))
row("R8 U8 M8 W8 D1", "d_dtype", put(d_dtype=F64))
row("RB UB MB WB D2", "d_dtype", put(d_dtype=E4M3))
row("R4 U4", "d_dtype", put(d_dtype=E4M3, norm_const=torch.ones(1)))

# Shapes
for bases, name, dim in (
    ("R8 UB MB", "alpha", 0),
    ("R8 UB MB D1", "prob", 0),
    ("R8 UB M8", "bias", 0),
    ("R8 UB M8", "bias", 1),
    ("R8 U4 W8", "sfa", 2),
    ("W8", "sfa", 4),
    ("U8 W4", "sfb", 2),
    ("R8 M8", "sfb", 5),
    ("R8 MB", "b", 1),
    ("R8 UB", "b", 2),
    ("RL UL", "b[1]", 1),
    ("RP", "b_ptrs", 0),
    ("UP", "sfb_ptrs", 0),
    ("R8q", "norm_const", 0),
    ("D1 D2", "c", 0),
    ("D1 D2", "c", 1),
    ("Ro Uo RoB", "d", 0),
    ("Ro Mo", "d", 1),
    ("Ro Uo", "c", 0),
    ("Uo", "c", 1),
    ("Uoq", "d_col", 1),
    ("Ro Uo", "amax", 0),
    ("Uo", "amax", 1),
    ("Roq", "sfd_row", 2),
    ("Uoq", "sfd_col", 4),
    ("W8 W4", "global_scale_a", 0),
    ("WB", "global_scale_b", 0),
    ("Wo", "out[1]", 0),
    ("WoB", "out[1]", 1),
):
    row(bases, name, longer(name.split("[")[0], dim))
row("R8 U8 MB", "a", shape("a", lambda s: (300, *s[1:])))  # M not a multiple of 256
row("D1", "r", shape("r", lambda s: (300, *s[1:])))
row("R8", "a", shape("a", lambda s: s[:1]))
row("M8", "a", shape("a", lambda s: (s[0], 0, 1)))
row("R8 U8", "a", shape("a", lambda s: (s[0], s[1] + 8, 1)))  # rows of 72 bytes
row("W8 WB", "a", change("a", lambda t: t.unsqueeze(-1)))
row("W8", "b", change("b", lambda t: t[0]))
row("W8 WB", "a", change("a", lambda t: like(t, (48, 300))))  # tokens not a multiple of 256
row("WB", "b", change("b", lambda t: like(t, (256, 80))))  # not the tokens of a
row("W4", "b", change("b", lambda t: like(t, (128, 80), strides=(1, 128))))
row("WB", "a", change("a", lambda t: like(t, (0, 512))))
row("WB", "b", change("b", lambda t: like(t, (512, 0))))
row("Wr", "a", change("a", lambda t: like(t, (40, 512), strides=(1, 40))))  # rows of 40 bytes
row("Wr", "b", change("b", lambda t: like(t, (512, 40), strides=(40, 1))))
row("R8 W8 D2", "padded_offsets", shape("padded_offsets", lambda s: (*s, 1)))
row("U8 WB D1", "padded_offsets", shape("padded_offsets", lambda s: (0,)))
row("M8 W4", "padded_offsets", shape("padded_offsets", lambda s: (1025,)))
row("U8 UB", "b", change("b", lambda t: like(t, (96, 64, 2))))  # gate and up: N a multiple of 64
row("UP", "n", put(n=96))
row("D2", "r", change("r", lambda t: like(t, (512, 48))))  # N a multiple of 32
row("D1", "r", change("r", lambda t: like(t, (512, 12))))  # rows of 24 bytes
row("R8", "c_dtype", change("b", lambda t: like(t, (12, 64, 2))))
row("MB", "d_dtype", lambda a: a.update(generate_c=False, b=[like(a["b"][0], (12, 64, 2))]))
row("M8q", "d_dtype", lambda a: a.update(generate_c=False, b=[like(a["b"][0], (24, 64, 2))]))
row("R8 UB MB", "bias", shape("bias", lambda s: (s[1], s[0])))  # the documents' (N, L)
row("RL", "b", lambda a: a.update(b=a["b"][:1] + [a["b"][0]] * 2))
row("UL", "sfb", lambda a: a.update(sfb=a["sfb"][:1]))
row("Wo", "out", lambda a: a.update(out=a["out"][:1]))
row("Wo", "out", lambda a: a.update(out=[]))
row("R8 W8", "sfa", shape("sfa", lambda s: (512, 2)))  # the plain (rows, blocks) matrix

# Strides
for bases, name in (("R8 UB M8", "a"), ("Ro Uo RoB", "d"), ("Ro Uo", "c"), ("Roq", "d_col"), ("D2", "c")):
    row(bases, name, spread(name))
    row(bases, name, transposed(name))
row("W8 WB W4", "a", spread("a"))
row("D1", "r", spread("r"))
row("W4", "a", transposed("a"))  # FP4 pairs lie along the tokens
row("W4", "b", change("b", lambda t: like(t, t.shape)))
row("WB", "b", change("b", lambda t: like(t, t.shape, strides=(2 * t.shape[1], 2))))
row("R4", "b", change("b", lambda t: like(t, t.shape, strides=(1, t.shape[0], t.shape[0] * t.shape[1]))))
row("R8 W8", "sfa", change("sfa", lambda t: t.contiguous()))
row("U8 W4", "sfb", change("sfb", lambda t: t.contiguous()))
row("Uoq", "sfd_row", change("sfd_row", lambda t: t.contiguous()))
row("Roq", "sfd_col", change("sfd_col", lambda t: t.contiguous()))
row("R8 UB MB", "bias", transposed("bias"))
row("Wo WoB", "out[1]", transposed("out"))
for bases, name in (("R8 U8", "alpha"), ("M8 WB D1", "padded_offsets"), ("W8", "global_scale_a"), ("RP", "b_ptrs")):
    row(bases, name, change(name, lambda t: torch.stack([t, t], 1)[:, 0]))
row("R8 UB M8", "prob", change("prob", lambda t: t[:1].expand(512, 1, 1)))
row("Uo", "amax", change("amax", lambda t: like(t, (2, 1), strides=(2, 1))))

# Alignment
for bases, name in (
    ("R8 UB M8 R4 W8 WB", "a"),
    ("R8 UB W8 W4", "b"),
    ("RL", "b[1]"),
    ("R8 W8", "sfa"),
    ("U8 W4", "sfb"),
    ("Ro RoB", "d"),
    ("Uo", "c"),
    ("Uoq", "d_col"),
    ("Roq", "sfd_row"),
    ("Uoq", "sfd_col"),
    ("D1", "r"),
    ("D2", "c"),
):
    row(bases, name, misaligned(name.split("[")[0]))

# Missing and superfluous
row("R8 U4 M8 W8 W4", "sfa", drop("sfa"))
row("R8 U4 M8 W8 W4 UL", "sfb", drop("sfb"))
row("RP UP", "sfb_ptrs", drop("sfb_ptrs"))
row("RP", "n", drop("n"))
row("UP", "b_dtype", drop("b_dtype"))
row("R8q U8q M8q Roq", "norm_const", drop("norm_const"))
row("R8 UB M8", "b", put(b=[]))
row("R8 MB", "b_ptrs", put(b_ptrs=torch.zeros(2, dtype=I64)))
row("U8 RL", "sfb_ptrs", put(sfb_ptrs=torch.zeros(2, dtype=I64)))
row("R8", "n", put(n=64))
row("M8", "b_dtype", put(b_dtype=E4M3))
row("RP", "sfb", put(sfb=[torch.zeros(512, dtype=U8).view(E8M0)]))
row("Roq Uoq", "d_col", drop("d_col"))
row("Roq", "sfd_row", drop("sfd_row"))
row("Uoq", "sfd_col", drop("sfd_col"))
row("Ro Mo", "sfd_row", put(sfd_row=torch.zeros(2048, dtype=U8).view(E8M0)))
row("RB UB MB WB", "sfa", put(sfa=torch.zeros(2048, dtype=U8).view(E8M0)))
row("RB", "sfb", put(sfb=[torch.zeros(2048, dtype=U8).view(E8M0)]))
row("WB", "sfb", put(sfb=torch.zeros(2048, dtype=U8).view(E8M0)))
row("RB MB", "norm_const", put(norm_const=torch.ones(1)))
row("RB WB", "sf_vec_size", put(sf_vec_size=32))
row("UB", "discrete_col_sfd", put(discrete_col_sfd=True))
row("RoB", "amax", put(amax=torch.zeros(2, 1)))
row("RoB", "d_col", lambda a: a.update(d_col=torch.zeros_like(a["d"])))

# Combinations and options
row("R8 M8 W8", "sf_vec_size", put(sf_vec_size=16))
row("R4 W4", "sf_vec_size", put(sf_vec_size=32))  # E4M3 scales are for 16
row("U8 W4", "sf_vec_size", put(sf_vec_size=64))
row("RP", "b_dtype", put(b_dtype=FP4))
row("UP", "n", put(n=0))
row("RP", "b_major", put(b_major="m"))
row("M8 R4", "b_major", put(b_major="n"))  # the strides say K
row("R8 U8", "vector_f32", put(vector_f32=True, c_dtype=E4M3))
for value in (1e38, 1e-38):  # no FP32 reciprocal
    row("R8 RB D1", "tanh_clamp_scale", put(tanh_clamp_scale=value))
    row("U8", "situ_beta1", put(act_func="situglu", situ_beta1=value))
    row("UB", "situ_beta2", put(act_func="situglu", situ_beta2=value))
for value in (0.0, -1.0, float("nan"), float("inf")):
    row("R8 RB D1", "tanh_clamp_scale", put(tanh_clamp_scale=value))
    row("U8", "situ_beta1", put(act_func="situglu", situ_beta1=value))
    row("UB", "situ_beta2", put(act_func="situglu", situ_beta2=value))
    row("D2", "situ_beta1", put(act_func="dsituglu", situ_beta1=value))
    row("U8", "geglu_alpha", put(act_func="geglu", geglu_alpha=value))
    row("D2", "geglu_alpha", put(act_func="dgeglu", geglu_alpha=value))
row("D2", "tanh_clamp_scale", put(tanh_clamp_scale=2.0))  # dswiglu has none
row("D1", "tanh_clamp_scale", put(tanh_clamp_scale=2.0, act_func="identity"))
row("U8 UB", "act_func", put(act_func="dswiglu"))
row("U8", "act_func", put(act_func=""))
row("D1", "act_func", put(act_func="srelu"))
row("D2", "act_func", put(act_func="swiglu"))
row("U8 UB D2", "linear_offset", put(linear_offset=1.0))  # swiglu has none
row("U8", "linear_offset", put(act_func="geglu", linear_offset=float("nan")))
row("UB", "glu_clamp_min", put(act_func="geglu", glu_clamp_min=7.0))
row("D2", "glu_clamp_min", put(act_func="dgeglu", glu_clamp_min=float("nan")))
row("U8", "glu_clamp_max", put(act_func="geglu", glu_clamp_max=float("nan")))
row("U8", "use_single_group_runtime_offsets", put(use_single_group_runtime_offsets=True))
for tile in ([64, 256], [256, 64], [256]):
    row("R8 UB M8", "mma_tiler_mn", put(mma_tiler_mn=tile))
for cluster in ([3, 1], [2, 8], [1, 1]):
    row("R8 UB M8", "cluster_shape_mn", put(cluster_shape_mn=cluster))

# Values
for base in ("R8", "UB", "M8", "Ro", "Uo", "W8", "WB", "WoB", "D1"):
    row(base, "padded_offsets[0]", fill("padded_offsets", 0, 100))
    row(base, "padded_offsets[1]", fill("padded_offsets", 1, 768))  # past M
row("U8 W4 D2", "padded_offsets[1]", fill("padded_offsets", 1, 0))
row("R8 W8 D1", "padded_offsets[0]", fill("padded_offsets", 0, -256))
row("RP UP", "b_ptrs[1]", fill("b_ptrs", 1, 0))
row("RP", "sfb_ptrs[0]", fill("sfb_ptrs", 0, 0))
row("UP", "b_ptrs[0]", lambda a: a.update(b_ptrs=a["b_ptrs"] + torch.tensor([8, 0])))

# Overlaps
row("Ro RoB", "d", lambda a: a.update(c=a["d"]))
row("Uoq", "d", lambda a: a.update(d_col=a["d"]))
row("RoB", "d", lambda a: a.update(d=a["a"]))
row("Ro Uo", "amax", lambda a: a.update(alpha=a["amax"][:, 0]))
row("Uoq", "sfd_row", lambda a: a.update(sfd_row=a["sfa"]))
row("Wo", "out[0]", lambda a: a.update(out=[a["out"][0]] * 2))
row(
    "WoB",
    "out[0]",
    lambda a: a.update(out=[like(a["a"], (48, 80)).set_(a["a"].reshape(-1)[:3840].view(48, 80)), a["out"][1]]),
)


def identifier(entry) -> str:
    return f"{TABLE.index(entry)}-{entry[0]}-{entry[1]}"


@pytest.fixture(scope="module")
def reference():
    """The valid calls' bits, before any malformed one."""
    return {base: [cases.raw(t).clone() for t in Call(base).run()] for base in BASES}


@pytest.mark.parametrize(("base", "argument", "what"), TABLE, ids=[identifier(entry) for entry in TABLE])
def test_malformed_call(base, argument, what, reference):
    call = Call(base)
    before = [cases.raw(t).clone() for t in call.outputs]
    what(call.arguments)
    with pytest.raises(RuntimeError) as error:
        call.run()
    text = str(error.value)
    assert text.startswith(f"{argument}: expected "), text
    assert ", got " in text, text
    assert all(torch.equal(cases.raw(t), b) for t, b in zip(call.outputs, before, strict=True)), "an output was written"
    kind, named, message = cudnn_grouped.library.C.take_error()
    assert kind in ("value", "not_implemented")
    assert named == argument
    assert f"{named}: {message}" in text
    again = [cases.raw(t) for t in Call(base).run()]
    assert all(torch.equal(a, b) for a, b in zip(again, reference[base], strict=True))


def test_there_are_two_hundred():
    assert len(TABLE) >= 200


@pytest.mark.parametrize("base", BASES)
def test_valid_calls_leave_no_error(base):
    cudnn_grouped.library.C.take_error()
    Call(base).run()
    assert cudnn_grouped.library.C.take_error() is None


# Devices: a CPU machine has one, so these go to the validator as metadata -----------------------------------------


def checked(base: str, moved: str | None):
    call = Call(base)
    tensors, options = {}, {}
    for name, value in call.arguments.items():
        where = ("cuda", 0) if name == moved else ("cpu", 0)
        if isinstance(value, torch.Tensor):
            tensors[name] = description(value, *where)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            tensors[name] = [description(t, *where) for t in value]
        elif value is not None and name != "b":
            options[name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    return cudnn_grouped.library.C.check(call.op + call.suffix, tensors, options)


@pytest.mark.parametrize("base", [base for base in BASES if base[0] in "RUM"])
def test_check_accepts_valid_metadata(base):
    assert checked(base, None) is None


@pytest.mark.parametrize(
    ("base", "moved"),
    [
        (b, n)
        for b in ("R8q", "U8q")
        for n in ("b", "padded_offsets", "alpha", "prob", "bias", "sfa", "sfb", "norm_const")
    ]
    + [("M8", "bias"), ("RP", "b_ptrs"), ("UP", "sfb_ptrs"), ("RL", "b")]
    + [(b, n) for b in ("Roq", "Uoq") for n in ("d", "c", "d_col", "amax", "sfd_row", "sfd_col")],
)
def test_other_device(base, moved):
    kind, argument, text = checked(base, moved)
    assert kind == "value"
    assert argument.split("[")[0] == moved
    assert text.startswith("expected a tensor on cpu, got cuda")
