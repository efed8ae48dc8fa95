"""Malformed calls at operator level: each is a RuntimeError "<argument>: expected X, got Y", and leaves nothing behind.

One table: (base call, argument named in the text, change). Tests of the documents' layer have their own.
"""

import re
from dataclasses import replace

import cases
import pytest
import torch
from cases import DTYPES, Case, operator

import cudnn_grouped

BASES = {
    "S8": Case("dsrelu", (256, 512), n=64, k=64, dbias=True),
    "S8q": Case("dsrelu", (256, 512), n=64, k=64, d="e4m3", dbias=True),
    "S4": Case("dsrelu", (256, 512), n=64, k=64, ab="fp4", sf="e4m3", vec=16),
    "SP": Case("dsrelu", (256, 512), n=64, k=64, weights="ptrs_k"),
    "SL": Case("dsrelu", (256, 512), n=64, k=64, weights="list_k"),
    "So": Case("dsrelu", (256, 512), n=64, k=64, dbias=True, form="out"),
    "Soq": Case("dsrelu", (256, 512), n=64, k=64, d="e4m3", dbias=True, form="out"),
    "Sow": Case("dsrelu", (256, 512), n=64, k=64, dbias=True, form="out"),
    "G8": Case("dglu", (256, 512), n=64, k=64, dbias=True),
    "G8q": Case("dglu", (256, 512), n=64, k=64, d="e4m3", dbias=True),
    "G4": Case("dglu", (256, 512), n=64, k=64, ab="fp4", sf="e4m3", vec=16),
    "GB": Case("dglu", (256, 512), n=64, k=64, ab="bf16", vec=16, dbias=True),
    "GP": Case("dglu", (256, 512), n=64, k=64, weights="ptrs_k"),
    "GL": Case("dglu", (256, 512), n=64, k=64, weights="list_k"),
    "Go": Case("dglu", (256, 512), n=64, k=64, dbias=True, form="out"),
    "Goq": Case("dglu", (256, 512), n=64, k=64, d="e5m2", dbias=True, form="out"),
    "GoB": Case("dglu", (256, 512), n=64, k=64, ab="bf16", vec=16, form="out"),
}
POSITIONAL = {
    "dsrelu": ["a", "b", "c", "padded_offsets", "alpha", "prob"],
    "dglu": ["a", "b", "c", "padded_offsets", "alpha", "beta", "prob"],
}


class Call:
    """A call as a dict of named arguments, so that a change is an assignment."""

    def __init__(self, base: str):
        self.case = BASES[base]
        self.built = cases.build(self.case)
        names = POSITIONAL[self.case.op]
        self.arguments = {**dict(zip(names, self.built.positional, strict=True)), **self.built.keywords}
        if self.case.form == "out":
            buffers = cases.output_buffers(self.case, cases.Guarded())
            for name in ("dprob", "dbias", "amax"):
                if name in buffers:
                    buffers[name].zero_()
            self.arguments.update(buffers)
        else:
            self.arguments.update(d_dtype=DTYPES[self.case.d], generate_dbias=self.case.dbias)
        if base == "Sow":
            self.arguments.update(
                deterministic=True,
                dprob_workspace=torch.zeros(512, 1, 1),
                dbias_workspace=torch.zeros(4, 64, 1, dtype=torch.bfloat16),
            )

    def run(self):
        names = POSITIONAL[self.case.op]
        keywords = {k: v for k, v in self.arguments.items() if k not in names}
        op = operator(self.case.op + ("_out" if self.case.form == "out" else ""))
        result = op(*[self.arguments[n] for n in names], **keywords)
        return result if result is not None else [self.arguments[n] for n in cases.OUTPUTS if n in self.arguments]


# Changes: each returns a function of the arguments ------------------------------------------------------------


def put(**values):
    return lambda arguments: arguments.update(values)


def drop(*names):
    return lambda arguments: [arguments.pop(name) for name in names]


def change(name, function):
    """Replace an argument by a function of it; for a list, its last tensor."""

    def apply(arguments):
        value = arguments[name]
        if isinstance(value, list):
            arguments[name] = [*value[:-1], function(value[-1])]
        else:
            arguments[name] = function(value)

    return apply


def like(tensor, shape, dtype=None, strides=None):
    """Zeros of another shape, dtype or layout, 64-byte aligned as torch allocates."""
    size = 1 + sum((s - 1) * t for s, t in zip(shape, strides, strict=True)) if strides else None
    dtype = dtype or tensor.dtype
    bytes_each = torch.empty((), dtype=dtype).element_size()
    count = size if size else int(torch.Size(shape).numel())
    flat = torch.zeros(count * bytes_each, dtype=torch.uint8).view(dtype)
    return flat.as_strided(shape, strides) if strides else flat.view(shape)


def dtype(name, to):
    return change(name, lambda t: like(t, t.shape, to))


def shape(name, function):
    return change(name, lambda t: like(t, function(t.shape)))


def longer(name, dim):
    """One dimension longer."""
    return shape(name, lambda s: (*s[:dim], s[dim] + 1, *s[dim + 1 :]) if dim >= 0 else (*s[:dim], s[dim] + 1))


def spread(name):
    """The same shape with gaps between rows."""

    def gaps(t):
        strides = [2 * s for s in t.stride()]
        strides[-1 if t.dim() == 1 else 1] = 2 if t.dim() == 1 else t.stride(1)
        return like(t, t.shape, strides=tuple(max(1, s) for s in strides))

    return change(name, gaps)


def transposed(name):
    """Rows contiguous instead of columns."""
    return change(name, lambda t: like(t, t.shape, strides=(1, t.shape[0], *t.stride()[2:])))


def misaligned(name):
    """The same tensor one element further in a larger buffer."""

    def shift(t):
        flat = torch.zeros((t.numel() + 1) * t.element_size(), dtype=torch.uint8).view(t.dtype)
        return flat.as_strided(t.shape, t.stride(), 1)

    return change(name, shift)


def fill(name, index, value):
    def apply(arguments):
        arguments[name] = arguments[name].clone()
        arguments[name][index] = value

    return apply


F32, F64, F16, BF16, I32, I64, U8 = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
E4M3, E5M2, E8M0, FP4 = (DTYPES[n] for n in ("e4m3", "e5m2", "e8m0", "fp4"))

TABLE = []


def row(bases: str, argument: str, what):
    for base in bases.split():
        TABLE.append((base, argument, what))


# Dtypes
for bases, name, to in (
    ("S8 G8 S4 G4 GB", "a", F32),
    ("S8 G8", "a", F16),
    ("S4", "a", F16),
    ("S8 G8 GB", "a", I32),
    ("S8 G8 S4 G4", "b", F32),
    ("S8 G8", "b", E5M2),
    ("GB", "b", F16),
    ("S8 G8", "b", BF16),
    ("S4 G4", "b", E4M3),
    ("SL GL", "b[1]", E5M2),
    ("S8 G8 GB", "c", F64),
    ("S8 G8", "c", I32),
    ("GB", "c", E4M3),
    ("S8 G8 GB", "padded_offsets", I64),
    ("S8 G8", "padded_offsets", F32),
    ("S8 G8 GB", "alpha", F64),
    ("S8 G8", "alpha", BF16),
    ("G8 GB", "beta", BF16),
    ("S8 G8 GB", "prob", BF16),
    ("S8 G8", "prob", F64),
    ("S8 G8 S4", "sfa", U8),
    ("S8 G8", "sfa", E5M2),
    ("S8 G8", "sfb", E4M3),
    ("S4 G4", "sfb", E8M0),
    ("SL GL", "sfb[1]", E4M3),
    ("S8q G8q", "norm_const", F64),
    ("SP GP", "b_ptrs", I32),
    ("SP GP", "sfb_ptrs", F32),
    ("So Go", "d_row", F64),
    ("GoB", "d_row", E4M3),
    ("Soq Goq", "d_col", F32),
    ("So Go", "d_col", F16),
    ("So Go GoB", "dprob", F16),
    ("So Go", "dbias", F32),
    ("So Go", "amax", F16),
    ("Soq Goq", "sfd_row", E4M3),
    ("Soq Goq", "sfd_col", U8),
    ("Sow", "dprob_workspace", BF16),
    ("Sow", "dbias_workspace", F32),
):
    row(bases, name, dtype(name.split("[")[0], to))

# Shapes
for bases, name, dim in (
    ("S8 G8 S4 GB", "c", 0),
    ("S8 G8 S4 GB", "c", 1),
    ("S8 G8 GB", "alpha", 0),
    ("G8 GB", "beta", 0),
    ("S8 G8 GB", "prob", 0),
    ("S8 G8", "prob", 1),
    ("S8 G8 S4", "sfa", 2),
    ("S8 G8 S4", "sfa", 4),
    ("S8 G8", "sfa", 5),
    ("S8 G8 S4", "sfb", 2),
    ("S8 G8", "sfb", 5),
    ("SL GL", "sfb[1]", 4),
    ("S8 G8 GB", "b", 1),
    ("S8 G8 GB", "b", 2),
    ("SL GL", "b[1]", 0),
    ("SL GL", "b[1]", 1),
    ("SP GP", "b_ptrs", 0),
    ("SP GP", "sfb_ptrs", 0),
    ("S8q G8q", "norm_const", 0),
    ("So Go GoB", "d_row", 0),
    ("So Go", "d_row", 1),
    ("Soq Goq", "d_col", 1),
    ("So Go", "dprob", 0),
    ("So Go", "dbias", 0),
    ("So Go", "dbias", 1),
    ("So Go", "amax", 0),
    ("So Go", "amax", 1),
    ("Soq Goq", "sfd_row", 2),
    ("Soq Goq", "sfd_col", 4),
    ("Sow", "dprob_workspace", 1),
    ("Sow", "dbias_workspace", 0),
):
    row(bases, name, longer(name.split("[")[0], dim))
row("S8 G8", "a", shape("a", lambda s: s[:1]))
row("S8 G8", "a", shape("a", lambda s: (*s, 1)))
row("S8 G8 GB", "a", shape("a", lambda s: (300, *s[1:])))  # M not a multiple of 256
row("S8 G8 GB", "a", shape("a", lambda s: (s[0], 0, 1)))
row("S8 G8", "a", shape("a", lambda s: (s[0], s[1] + 8, 1)))  # rows of 72 bytes
row("S4 G4", "a", shape("a", lambda s: (s[0], s[1] + 8, 1)))  # 40 bytes
row("S8 G8 GB", "padded_offsets", shape("padded_offsets", lambda s: (*s, 1)))
row("S8 G8", "padded_offsets", shape("padded_offsets", lambda s: (0,)))
row("S8 G8", "padded_offsets", shape("padded_offsets", lambda s: (1025,)))
row("S8", "b", change("b", lambda t: like(t, (0, 64, 2))))
row("S8", "b[0]", change("b", lambda t: like(t, (64,))))
row("G8 GB", "b", change("b", lambda t: like(t, (48, 64, 2))))  # N not a multiple of 32
row("S8", "c", lambda arguments: arguments.update(b=[like(arguments["b"][0], (12, 64, 2))]))  # BF16 rows of 24 bytes
row("SL GL", "b", lambda arguments: arguments.update(b=arguments["b"][:1] + [arguments["b"][0]] * 2))
row("SL GL", "sfb", lambda arguments: arguments.update(sfb=arguments["sfb"][:1]))
row("S8 G8", "sfb", lambda arguments: arguments.update(sfb=arguments["sfb"] * 2))
row("S8 G8", "sfa", shape("sfa", lambda s: (512, 2)))  # the plain (rows, blocks) matrix
row("S8 G8", "sfa", change("sfa", lambda t: like(t, (2047,))))

# Strides
for bases, name in (("S8 G8 GB S4", "a"), ("S8 G8 GB", "c"), ("So Go GoB", "d_row"), ("Soq Goq So", "d_col")):
    row(bases, name, spread(name))
    row(bases, name, transposed(name))
row("S4 G4", "b", change("b", lambda t: like(t, t.shape, strides=(1, t.shape[0], t.shape[0] * t.shape[1]))))
row("S8 G8 GB", "b", change("b", lambda t: like(t, t.shape, strides=(2 * t.stride(0), 1, 2 * t.stride(2)))))
row("SL GL", "b[1]", change("b", lambda t: like(t, t.shape, strides=(1, t.shape[0]))))
row("S8 G8 S4", "sfa", change("sfa", lambda t: t.contiguous()))
row("S8 G8", "sfb", change("sfb", lambda t: t.contiguous()))
row("Soq Goq", "sfd_row", change("sfd_row", lambda t: t.contiguous()))
row("Soq Goq", "sfd_col", change("sfd_col", lambda t: t.contiguous()))
for bases, name in (
    ("S8 G8", "padded_offsets"),
    ("S8 G8 GB", "alpha"),
    ("G8", "beta"),
    ("SP GP", "b_ptrs"),
    ("SP GP", "sfb_ptrs"),
):
    row(bases, name, change(name, lambda t: torch.stack([t, t], 1)[:, 0]))
row("S8 G8 GB", "prob", change("prob", lambda t: t[:1].expand(512, 1, 1)))
row("So Go", "dprob", change("dprob", lambda t: like(t, t.shape, strides=(2, 1, 1))))
row("So Go", "dbias", change("dbias", lambda t: like(t, t.shape, strides=(1, t.shape[0], 1))))

# Alignment
for bases, name in (
    ("S8 G8 S4 GB", "a"),
    ("S8 G8 S4 GB", "c"),
    ("S8 G8 GB", "b"),
    ("SL GL", "b[1]"),
    ("S8 G8", "sfa"),
    ("S8 G8", "sfb"),
    ("So Go", "d_row"),
    ("Soq Goq", "d_col"),
    ("Soq Goq", "sfd_row"),
    ("Soq Goq", "sfd_col"),
):
    row(bases, name, misaligned(name.split("[")[0]))

# Missing and superfluous
row("S8 G8 S4 SL", "sfa", drop("sfa"))
row("S8 G8 S4 SL", "sfb", drop("sfb"))
row("SP GP", "sfb_ptrs", drop("sfb_ptrs"))
row("SP GP", "n", drop("n"))
row("SP GP", "b_dtype", drop("b_dtype"))
row("S8q G8q Soq Goq", "norm_const", drop("norm_const"))
row("S8 G8 GB", "b", put(b=[]))
row("S8 G8", "b_ptrs", put(b_ptrs=torch.zeros(2, dtype=I64)))
row("S8 G8 SL", "sfb_ptrs", put(sfb_ptrs=torch.zeros(2, dtype=I64)))
row("S8 G8", "n", put(n=64))
row("S8 G8", "b_dtype", put(b_dtype=E4M3))
row("SP GP", "sfb", put(sfb=[torch.zeros(512, dtype=U8).view(E8M0)]))
row("So Go", "dprob", drop("dprob"))
row("Soq Goq", "d_col", drop("d_col"))
row("Soq Goq", "sfd_row", drop("sfd_row"))
row("Soq Goq", "sfd_col", drop("sfd_col"))
row("So Go", "sfd_row", put(sfd_row=torch.zeros(2048, dtype=U8).view(E8M0)))
row("So Go", "sfd_col", put(sfd_col=torch.zeros(2048, dtype=U8).view(E8M0)))
row("So", "dprob_workspace", put(dprob_workspace=torch.zeros(512, 1, 1), deterministic=False))
row("So", "dprob_workspace", put(dbias_workspace=torch.zeros(4, 64, 1, dtype=BF16), deterministic=True))
row("Sow", "dbias_workspace", drop("dbias_workspace"))
row("Sow", "dbias_workspace", drop("dbias"))
row("GB", "sfa", put(sfa=torch.zeros(2048, dtype=U8).view(E8M0)))
row("GB", "sfb", put(sfb=[torch.zeros(2048, dtype=U8).view(E8M0)]))
row("GB", "norm_const", put(norm_const=torch.ones(1)))
row("GB", "sf_vec_size", put(sf_vec_size=32))
row("GB", "discrete_col_sfd", put(discrete_col_sfd=True))
row("GB", "epilogue_op", put(epilogue_op="relu"))
row(
    "GB",
    "use_single_group_runtime_offsets",
    lambda a: (single_expert(a), a.update(use_single_group_runtime_offsets=True)),
)
row("GoB", "d_col", lambda a: a.update(d_col=torch.zeros_like(a["d_row"])))
row("GoB", "amax", put(amax=torch.zeros(2, 2, 1)))
row("GoB", "sfd_row", put(sfd_row=torch.zeros(2048, dtype=U8).view(E8M0)))


def single_expert(arguments):
    arguments["padded_offsets"] = torch.tensor([512], dtype=I32)
    arguments["alpha"], arguments["beta"] = torch.ones(1), torch.ones(1)
    arguments["b"] = [arguments["b"][0][..., :1].contiguous()]


# Combinations of formats
row("S8 G8", "sf_vec_size", put(sf_vec_size=16))
row("S8 G8 S4", "sf_vec_size", put(sf_vec_size=64))
row("S4 G4", "sf_vec_size", put(sf_vec_size=32))  # E4M3 scales are for 16
row("S4 G4", "d_dtype", put(d_dtype=E4M3, norm_const=torch.ones(1)))
row("GB", "d_dtype", put(d_dtype=E4M3))
row("S8 G8 GB", "d_dtype", put(d_dtype=F64))
row("S8 G8", "d_dtype", put(d_dtype=I32))
row("SP GP", "b_dtype", put(b_dtype=E5M2))
row("SP GP", "b_dtype", put(b_dtype=FP4))
row("SP GP", "n", put(n=0))
row("SP GP", "n", put(n=-64))
row("GP", "n", put(n=80))
row("SP GP", "b_major", put(b_major="m"))
row("S8 G8", "b_major", put(b_major="n"))  # the strides say K
row("S4 G4", "b_major", put(b_major="n"))
for bases in ("S8 G8",):
    row(bases, "vector_f32", lambda a: a.update(vector_f32=True, c=like(a["c"], a["c"].shape, E4M3)))

# Options
row("S8", "c_role", put(c_role="saved"))
for value in (1e38, 1e-38):  # no FP32 reciprocal
    row("S8", "tanh_clamp_scale", put(tanh_clamp_scale=value))
    row("G8", "situ_beta1", put(act_func="dsituglu", situ_beta1=value))
    row("G8", "situ_beta2", put(act_func="dsituglu", situ_beta2=value))
for value in (0.0, -1.0, float("nan"), float("inf")):
    row("S8", "tanh_clamp_scale", put(tanh_clamp_scale=value))
    row("G8", "situ_beta1", put(act_func="dsituglu", situ_beta1=value))
    row("G8", "situ_beta2", put(act_func="dsituglu", situ_beta2=value))
    row("G8 GB", "geglu_alpha", put(act_func="dgeglu", geglu_alpha=value))
row("G8 GB", "act_func", put(act_func="swiglu"))
row("G8", "act_func", put(act_func=""))
row("G8", "linear_offset", put(act_func="dgeglu", linear_offset=float("nan")))
row("G8 GB", "linear_offset", put(linear_offset=1.0))  # dswiglu has none
row("G8", "clamp_grad", put(act_func="dgeglu", clamp_grad="zero"))
row("G8", "clamp_grad", put(act_func="dgeglu", clamp_grad="value"))
row("GB", "clamp_grad", put(clamp_grad="value"))
row("G8 GB", "glu_clamp_min", put(act_func="dgeglu", glu_clamp_min=7.0))
row("G8", "glu_clamp_min", put(act_func="dgeglu", glu_clamp_min=float("nan")))
row("G8", "glu_clamp_max", put(act_func="dgeglu", glu_clamp_max=float("nan")))
row("G8", "epilogue_op", put(epilogue_op="gelu"))
row("G8", "use_single_group_runtime_offsets", put(use_single_group_runtime_offsets=True))
for tile in ([64, 256], [256, 64], [256], [256, 256, 1], [512, 256], [0, 0]):
    row("S8 G8", "mma_tiler_mn", put(mma_tiler_mn=tile))
row("G8 GB", "mma_tiler_mn", put(mma_tiler_mn=[256, 128]))
for cluster in ([3, 1], [2, 8], [0, 1], [2], [1, 1], [4, 1]):
    row("S8 G8", "cluster_shape_mn", put(cluster_shape_mn=cluster))
row("S8 GB", "cluster_shape_mn", put(mma_tiler_mn=[128, 256], cluster_shape_mn=[4, 1]))

# Values
for base in ("S8", "G8", "GB", "So", "Go"):
    row(base, "padded_offsets[0]", fill("padded_offsets", 0, 100))
    row(base, "padded_offsets[1]", fill("padded_offsets", 1, 768))  # past M
row("S8 G8", "padded_offsets[1]", fill("padded_offsets", 1, 0))  # decreasing: counts or an end before its start
row("S8 G8", "padded_offsets[0]", fill("padded_offsets", 0, -256))
row("S8 G8", "padded_offsets[0]", fill("padded_offsets", 0, 128))
row("SP GP", "b_ptrs[1]", fill("b_ptrs", 1, 0))
row("SP GP", "sfb_ptrs[0]", fill("sfb_ptrs", 0, 0))
row("SP GP", "b_ptrs[0]", lambda a: a.update(b_ptrs=a["b_ptrs"] + torch.tensor([8, 0])))
row("SP GP", "sfb_ptrs[1]", lambda a: a.update(sfb_ptrs=a["sfb_ptrs"] + torch.tensor([0, 4])))

for value in (0.0, -1.0, float("nan"), float("inf")):
    row("S8q G8q Soq Goq", "norm_const", put(norm_const=torch.tensor([value])))

# Overlaps
row("So Go", "d_row", lambda a: a.update(d_row=a["c"]))
row("Soq Goq", "d_row", lambda a: a.update(d_col=a["d_row"]))
row("So Go", "dprob", lambda a: a.update(dprob=a["prob"]))
row("Soq Goq", "sfd_row", lambda a: a.update(sfd_row=a["sfa"]))


def identifier(entry) -> str:
    index = TABLE.index(entry)
    return f"{index}-{entry[0]}-{entry[1]}"


@pytest.fixture(scope="module")
def reference():
    """The valid calls' bits, before any malformed one."""
    return {base: [cases.raw(t).clone() for t in Call(base).run()] for base in BASES}


@pytest.mark.parametrize(("base", "argument", "what"), TABLE, ids=[identifier(entry) for entry in TABLE])
def test_malformed_call(base, argument, what, reference):
    call = Call(base)
    outputs = {n: t for n, t in call.arguments.items() if n in cases.OUTPUTS and isinstance(t, torch.Tensor)}
    what(call.arguments)
    before = {n: cases.raw(t).clone() for n, t in outputs.items()}
    with pytest.raises(RuntimeError) as error:
        call.run()
    text = str(error.value)
    assert text.startswith(f"{argument}: expected "), text
    assert ", got " in text, text
    for name, tensor in outputs.items():
        assert torch.equal(cases.raw(tensor), before[name]), f"{name} was written"
    kind, named, message = cudnn_grouped.library.C.take_error()
    assert kind in ("value", "not_implemented")
    assert named == argument
    assert f"{named}: {message}" in text
    again = [cases.raw(t) for t in Call(base).run()]
    assert all(torch.equal(a, b) for a, b in zip(again, reference[base], strict=True))


def test_there_are_two_hundred():
    assert len(TABLE) >= 200


def test_valid_calls_leave_no_error():
    cudnn_grouped.library.C.take_error()
    Call("S8").run()
    assert cudnn_grouped.library.C.take_error() is None


def test_hints():
    """The two that users meet first say what to do."""
    call = Call("S8")
    call.arguments["sf_vec_size"] = 16
    with pytest.raises(RuntimeError, match="FP8 operands need sf_vec_size=32"):
        call.run()
    call = Call("S8")
    call.arguments["padded_offsets"] = torch.tensor([256, 128], dtype=I32)
    with pytest.raises(RuntimeError, match="multiple of 256"):
        call.run()


def test_weights_by_expert():
    """(L, N, K), as GroupedMLP and JAX have them."""
    a, b = torch.zeros(512, 64, dtype=torch.bfloat16), torch.zeros(2, 32, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([256, 512], dtype=I32)
    with pytest.raises(RuntimeError, match=re.escape("b: expected shape (N, K, L), got shape (2, 32, 64) (weights of")):
        torch.ops.cudnn_grouped.mm(a, [b], offsets)
    torch.ops.cudnn_grouped.mm(a, [b.permute(1, 2, 0)], offsets)
    a, b = torch.zeros(512, 32, dtype=torch.bfloat16), torch.zeros(32, 32, 32, dtype=torch.bfloat16)
    offsets = torch.arange(32, dtype=I32).clamp(max=2) * 256
    torch.ops.cudnn_grouped.mm(a, [b.permute(1, 2, 0)], offsets)  # both: N, K and L are the same


# Devices: a CPU machine has one, so these go to the validator as metadata. ---------------------------------------


def description(tensor, device="cpu", index=0):
    return (str(tensor.dtype).removeprefix("torch."), device, index, tuple(tensor.shape), tensor.stride(), 0)


def checked(base: str, moved: str | None, device=("cuda", 0)):
    call = Call(base)
    tensors, options = {}, {}
    for name, value in call.arguments.items():
        where = device if name == moved else ("cpu", 0)
        if isinstance(value, torch.Tensor):
            tensors[name] = description(value, *where)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            tensors[name] = [description(t, *where) for t in value]
        elif name != "b":
            options[name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    operation = call.case.op + ("_out" if call.case.form == "out" else "")
    return cudnn_grouped.library.C.check(operation, tensors, options)


@pytest.mark.parametrize("base", BASES)
def test_check_accepts_valid_metadata(base):
    assert checked(base, None) is None


@pytest.mark.parametrize(
    ("base", "moved"),
    [(b, n) for b in ("S8q", "G8q") for n in ("b", "c", "padded_offsets", "alpha", "prob", "sfa", "sfb", "norm_const")]
    + [("G8q", "beta"), ("SP", "b_ptrs"), ("SP", "sfb_ptrs"), ("SL", "b"), ("GL", "sfb")]
    + [(b, n) for b in ("Soq", "Goq") for n in ("d_row", "d_col", "dprob", "dbias", "amax", "sfd_row", "sfd_col")]
    + [("Sow", "dprob_workspace"), ("Sow", "dbias_workspace")],
)
def test_other_device(base, moved):
    kind, argument, text = checked(base, moved)
    assert kind == "value"
    assert argument.split("[")[0] == moved
    assert text.startswith("expected a tensor on cpu, got cuda")


def test_valid_after_all():
    """After everything above, results are what a fresh process would give: the oracle's."""
    for base in ("S8", "G8q", "GB"):
        cases.run(replace(BASES[base], seed=5))
