"""dsrelu and dsrelu_out against the oracle: every option pair, exact and random data; then single points of the contract."""

import itertools
from dataclasses import replace

import cases
import numpy as np
import oracle
import oracle_formats as formats
import pytest
import torch
from cases import DTYPES, FP4, Case, operator
from pairwise import pairwise

OPTIONS = {
    "operands": [(ab, sf, vec) for ab in FP4 for sf, vec in (("e4m3", 16), ("e8m0", 16), ("e8m0", 32))]
    + [("e4m3", "e8m0", 32), ("e5m2", "e8m0", 32)],
    "offsets": [((256, 512), None), ((0, 256, 256, 768, 768), 1024), ((256,), None), ((512, 768), 1280)],
    "n": [32, 64, 80, 160, 272],
    "k": [32, 64, 96, 160, 544],  # beyond one and two slices of K of the CPU engine (256)
    "c": ["f32", "fp16", "bf16", "e4m3", "e5m2"],
    "d": ["bf16", "fp16", "f32", "e4m3", "e5m2"],
    "weights": ["dense_k", "dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"],
    "sf_form": ["view", "physical", "flat"],
    "rank": [2, 3],
    "dbias": [False, True],
    "discrete_col_sfd": [False, True],
    "norm": [0.01, 1.0, 3.0, 448.0],
    "form": ["functional", "out"],
    "poison": [False, True],
    "c_role": ["grad_output", "preactivation"],
    "tanh_clamp_scale": [None, 2.0],
    "schedule": [
        {},
        {"deterministic": True, "mma_tiler_mn": [128, 256]},
        {"vector_f32": True, "mma_tiler_mn": [256, 128], "cluster_shape_mn": [2, 4]},
        {"use_dynamic_sched": True, "deterministic": False, "mma_tiler_mn": [128, 128], "cluster_shape_mn": [2, 1]},
    ],
}


def allowed(row: dict) -> bool:
    ab = row["operands"][0]
    if ab in FP4 and (row["weights"].endswith("_n") or row["d"] in cases.FP8):
        return False
    if ab not in FP4 and row["weights"].endswith("_n") and row["n"] % 16:
        return False
    if row["schedule"].get("vector_f32") and row["c"] in cases.FP8:
        return False
    # The scale options mean nothing without a quantised D: keep one value, so that pairs are not wasted.
    return row["d"] in cases.FP8 or not row["discrete_col_sfd"]


def case_of(row: dict, seed: int = 0) -> Case:
    row = dict(row)
    ab, sf, vec = row.pop("operands")
    offsets, m = row.pop("offsets")
    options = {**row.pop("schedule"), "c_role": row.pop("c_role")}
    clamp = row.pop("tanh_clamp_scale")
    if clamp:
        options["tanh_clamp_scale"] = clamp
    return Case("dsrelu", offsets, m, ab=ab, sf=sf, vec=vec, options=options, seed=seed, **row)


PAIRS = [case_of(row, seed) for seed, row in enumerate(pairwise(OPTIONS, allowed))]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_random(case):
    cases.run(case)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairwise_exact(case):
    """Every bit of D, scales, dbias and amax."""
    cases.run(cases.exact(case))


@pytest.mark.slow
@pytest.mark.parametrize("ab", OPTIONS["operands"], ids=str)
@pytest.mark.parametrize("d", OPTIONS["d"])
@pytest.mark.parametrize("weights", OPTIONS["weights"])
def test_full_product(ab, d, weights):
    for c, role in itertools.product(OPTIONS["c"], OPTIONS["c_role"]):
        row = {name: values[0] for name, values in OPTIONS.items()}
        row.update(operands=ab, c=c, d=d, weights=weights, c_role=role, n=80, k=96, dbias=True)
        if not allowed(row):
            continue
        for clamp, discrete, form in ((None, False, "out"), (2.0, d in cases.FP8, "functional")):
            case = case_of({**row, "tanh_clamp_scale": clamp, "discrete_col_sfd": discrete, "form": form})
            cases.run(case)
            cases.run(cases.exact(case))


# Sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 32, 48, 96, 128, 192, 320])
@pytest.mark.parametrize("k", [16, 48, 144, 256, 272, 560])
def test_fp8_sizes(n, k):
    """Partial last K and N blocks have their own scale."""
    cases.run(cases.exact(Case("dsrelu", (256,), n=n, k=k, d="e4m3", dbias=True)))


@pytest.mark.parametrize("n", [8, 24, 64, 200])
@pytest.mark.parametrize("k", [32, 96, 224, 288])
@pytest.mark.parametrize(("sf", "vec"), [("e4m3", 16), ("e8m0", 32)])
def test_fp4_sizes(n, k, sf, vec):
    cases.run(cases.exact(Case("dsrelu", (256,), n=n, k=k, ab="fp4", sf=sf, vec=vec, dbias=True)))


@pytest.mark.parametrize(
    "offsets", [(256,) * 3, (0, 0, 512), (512, 512, 512), (0, 256, 256, 512, 512), (1024,)], ids=str
)
def test_offsets(offsets):
    for d in ("bf16", "e4m3"):
        cases.run(
            Case("dsrelu", offsets, m=offsets[-1] + 256, d=d, dbias=True, poison=True, discrete_col_sfd=d == "e4m3")
        )


def test_many_experts():
    """64 experts, most of them empty."""
    sizes = np.zeros(64, int)
    sizes[[0, 7, 8, 63]] = 256
    cases.run(Case("dsrelu", tuple(np.cumsum(sizes).tolist()), n=32, k=32, dbias=True, weights="ptrs_k"))


@pytest.mark.slow
def test_1024_experts():
    sizes = np.zeros(1024, int)
    sizes[[0, 511, 1023]] = 256
    cases.run(Case("dsrelu", tuple(np.cumsum(sizes).tolist()), n=32, k=32, dbias=True))


# Single points ------------------------------------------------------------------------------------------------


def zero_of(case: Case, name: str, index) -> cases.Built:
    built = cases.build(case)
    position = {"alpha": 4, "prob": 5}[name]
    built.positional[position][index] = 0.0
    getattr(built.problem, name)[index] = 0.0
    return built


def test_prob_zero_keeps_dprob():
    built = zero_of(cases.exact(Case("dsrelu", d="f32")), "prob", slice(None))
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    assert not outputs["d_row"].any()
    assert outputs["dprob"].any()


@pytest.mark.parametrize("norm", [0.01, 1.0, 448.0])
def test_zero_row_is_zero_scale(norm):
    """A D block of zeros gives scale byte 0 and data 0 for any norm_const, by rows and by columns."""
    built = zero_of(Case("dsrelu", d="e4m3", norm=norm), "prob", slice(0, 32))
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    assert not (outputs["d_row"][:32].view(torch.uint8) & 0x7F).any()  # a zero keeps its sign
    assert not (outputs["d_col"][:32].view(torch.uint8) & 0x7F).any()
    rows = cases.scale_matrix(outputs["sfd_row"])[formats.scale_offsets(512, 2)]
    columns = cases.scale_matrix(outputs["sfd_col"])[formats.scale_offsets(64, 16)]
    assert not rows[:32].any()
    assert not columns[:, 0].any()
    assert rows[32:].any()
    assert columns[:, 1:].any()


def test_alpha_is_applied_once():
    one, two = (cases.build(cases.exact(Case("dsrelu", d="f32", seed=3))) for _ in range(2))
    for built, factor in ((one, 2.0), (two, 8.0)):
        built.positional[4].fill_(factor)
    c_role = {"c_role": "preactivation"}
    first, second = (
        operator("dsrelu")(*b.positional, **{**b.keywords, **c_role, "d_dtype": torch.float32}) for b in (one, two)
    )
    assert torch.equal(first[0] * 4, second[0])
    assert torch.equal(first[2] * 4, second[2])
    assert first[0].any()


def test_norm_const_without_scales_is_ignored():
    built = cases.build(Case("dsrelu"))
    plain = operator("dsrelu")(*built.positional, **built.keywords)
    given = operator("dsrelu")(*built.positional, **built.keywords, norm_const=torch.tensor([0.01]))
    assert torch.equal(plain[0], given[0])


def test_no_clamp_is_none():
    built = cases.build(Case("dsrelu", d="f32"))
    plain = operator("dsrelu")(*built.positional, **built.keywords, d_dtype=torch.float32)
    none = operator("dsrelu")(*built.positional, **built.keywords, d_dtype=torch.float32, tanh_clamp_scale=None)
    assert torch.equal(plain[0], none[0])


def test_clamp_saturates():
    """Far above s the slope is zero: D = 0 exactly, while dprob keeps s^2."""
    case = Case("dsrelu", d="f32", c="f32", options={"tanh_clamp_scale": 0.5, "c_role": "preactivation"})
    built = cases.build(case)
    built.positional[2].fill_(512.0)
    built.problem.c[:] = 512.0
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    assert not outputs["d_row"].any()
    assert outputs["dprob"].any()


def test_amax_of_each_expert():
    """One expert's outlier stays its own; an expert without rows keeps -inf."""
    case = Case("dsrelu", (256, 256, 512), d="bf16", c="f32", dbias=True)
    built = cases.build(case)
    built.positional[4][:] = 1.0
    built.problem.alpha[:] = 1.0
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    amax = outputs["amax"].flatten().tolist()
    assert amax[1] == -np.inf
    d = outputs["d_row"][..., 0].float().abs()
    for g, rows in ((0, slice(0, 256)), (2, slice(256, 512))):
        assert abs(amax[g] - d[rows].max().item()) <= 2.0**-8 * amax[g]


def test_amax_is_taken_before_rounding():
    """257 rounds to 256 in BF16."""
    case = Case("dsrelu", (256,), n=32, k=32, c="f32", options={"c_role": "grad_output"})
    built = cases.build(cases.exact(case))
    a = np.zeros((256, 32))
    a[:, 0] = 1
    built.positional[0].copy_(cases.tensor_of(formats.E4M3.encode(a), "e4m3").unsqueeze(-1))
    built.positional[1][0].copy_(cases.tensor_of(formats.E4M3.encode(np.ones((32, 32))), "e4m3").unsqueeze(-1))
    built.keywords["sfa"].view(torch.uint8).fill_(127)
    built.keywords["sfb"][0].view(torch.uint8).fill_(127)
    built.positional[4].fill_(1.0)
    built.positional[5].fill_(0.5)
    built.positional[2].fill_(257.0)
    outputs, _ = cases.call(built)
    assert outputs["amax"].item() == 257.0
    assert (outputs["d_row"] == 256.0).all()


@pytest.mark.parametrize("d", ["bf16", "e4m3"])
def test_accumulates_onto_outputs(d):
    """Two calls into the same buffers: dprob, dbias and amax accumulate, D and the scales are overwritten."""
    case = cases.exact(Case("dsrelu", (256, 512), m=768, d=d, dbias=True, form="out"))
    built = cases.build(case)
    guarded = cases.Guarded()
    buffers = cases.output_buffers(case, guarded)
    for name in ("dprob", "dbias", "amax"):
        buffers[name].zero_()
    operator("dsrelu_out")(*built.positional, **built.keywords, **buffers)
    first = {name: t.clone() for name, t in buffers.items()}
    operator("dsrelu_out")(*built.positional, **built.keywords, **buffers)
    guarded.check()
    assert torch.equal(buffers["dprob"], 2 * first["dprob"])
    want = built.expected()
    rounded = formats.BF16.round(want.dbias.value + formats.BF16.round(want.dbias.value))
    np.testing.assert_array_equal(cases.values_of(buffers["dbias"])[..., 0], rounded)
    for name in buffers.keys() - {"dprob", "dbias"}:
        assert torch.equal(cases.raw(buffers[name]), cases.raw(first[name])), name


def test_dbias_is_rounded_once():
    """512 rows whose FP32 sum is not what a running BF16 sum gives."""
    case = Case("dsrelu", (512,), n=32, k=32, dbias=True, c="f32", d="f32")
    cases.run(case)
    built = cases.build(case)
    built.positional[5].fill_(1.0)
    built.problem.prob[:] = 1.0
    outputs, starts = cases.call(built)
    cases.check(built, outputs, starts)
    running = torch.zeros(32, dtype=torch.bfloat16)
    for block in outputs["d_row"][..., 0].split(128):
        running += block.sum(0).to(torch.bfloat16)
    assert not torch.equal(running, outputs["dbias"][0, :, 0])


# Workspaces of the documented class API -----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "tile_n", "cluster_n"), [(64, 256, 1), (320, 256, 1), (320, 128, 1), (320, 128, 2)])
@pytest.mark.parametrize(("d", "with_amax"), [("bf16", True), ("e4m3", True), ("e4m3", False)])
def test_workspaces(n, tile_n, cluster_n, d, with_amax):
    case = cases.exact(Case("dsrelu", (256, 256, 768), m=1024, n=n, k=64, d=d, dbias=True, form="out"))
    built = cases.build(case)
    want = built.expected()
    guarded = cases.Guarded()
    buffers = cases.output_buffers(case, guarded)
    buffers["dprob"].fill_(5.0)
    buffers["dbias"].fill_(3.0)
    buffers["amax"].zero_()
    if not with_amax:
        del buffers["amax"]
    slots = formats.ceil_div(n, tile_n * cluster_n) * cluster_n
    dprob_workspace = guarded.tensor((1024, slots, 1), torch.float32)
    dbias_workspace = guarded.tensor((8, n, 1), torch.bfloat16)
    operator("dsrelu_out")(
        *built.positional,
        **built.keywords,
        **buffers,
        deterministic=True,
        mma_tiler_mn=[256, tile_n],
        cluster_shape_mn=[2, cluster_n],
        dprob_workspace=dprob_workspace,
        dbias_workspace=dbias_workspace,
    )
    guarded.check()
    assert (buffers["dprob"] == 5.0).all()
    assert (buffers["dbias"] == 3.0).all()
    # One slot per (row, N tile): the tile's own sum; the oracle of one tile is the oracle of those columns.
    ar = oracle.Arithmetic(True)
    for t in range(slots):
        columns = slice(t * tile_n, min((t + 1) * tile_n, n))
        part = replace_columns(built.problem, columns)
        tile = oracle.expected(part, exact=True).dprob.value if columns.start < n else np.zeros(1024)
        np.testing.assert_array_equal(dprob_workspace[:, t, 0].numpy(), tile)
    d_values = want.d.value.reshape(8, 128, n)
    block_sums = ar.total(oracle.Approx(d_values, 0 * d_values), 1).value
    np.testing.assert_array_equal(cases.values_of(dbias_workspace)[..., 0], formats.BF16.round(block_sums))
    start = buffers["dbias"].clone()
    operator("reduce_dbias")(dbias_workspace, built.positional[3], buffers["dbias"])
    slots_of = [range(s // 128, e // 128) for s, e in built.problem.experts]
    sums = np.stack([cases.values_of(dbias_workspace)[list(r), :, 0].sum(0) for r in slots_of])
    np.testing.assert_array_equal(
        cases.values_of(buffers["dbias"])[..., 0], formats.BF16.round(cases.values_of(start)[..., 0] + sums)
    )


def replace_columns(p: oracle.Problem, columns: slice) -> oracle.Problem:
    return replace(p, b=[b[columns] for b in p.b], c=p.c[:, columns])


def test_reduce_dbias_keeps_experts_apart():
    """One expert's NaN slot reaches no other expert; slots past the last offset are not read."""
    slots = torch.ones(8, 32, 1, dtype=torch.bfloat16)
    slots[2] = torch.nan  # rows 256 to 384: expert 1
    slots[6:] = torch.nan  # past the last offset
    offsets = torch.tensor([256, 512, 512, 768], dtype=torch.int32)
    dbias = torch.full((4, 32, 1), 0.5, dtype=torch.bfloat16)
    operator("reduce_dbias")(slots, offsets, dbias)
    assert (dbias[0] == 2.5).all()
    assert dbias[1].isnan().all()
    assert (dbias[2] == 0.5).all()
    assert (dbias[3] == 2.5).all()


def test_list_equals_dense_equals_pointers():
    """The three ways of giving weights are one problem: same bits."""
    case = Case("dsrelu", (256, 256, 512), n=96, k=64, d="e4m3", dbias=True)
    reference = cases.call(cases.build(case))[0]
    for weights in ("dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"):
        outputs = cases.call(cases.build(replace(case, weights=weights)))[0]
        for name in cases.OUTPUTS:
            assert torch.equal(cases.raw(outputs[name]), cases.raw(reference[name])), (weights, name)


def test_default_d_dtype_is_bf16():
    built = cases.build(Case("dsrelu"))
    assert operator("dsrelu")(*built.positional, **built.keywords)[0].dtype == DTYPES["bf16"]
