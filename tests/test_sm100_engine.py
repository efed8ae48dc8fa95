"""The contract on the shipped SM100 engine, in the simulator: how it takes the CPU engine's place; every pair of options;
what every schedule must agree on; with -m slow, the tests of the operators and every supported row under five schedules."""

from dataclasses import replace
from itertools import product

import cases
import cases_forward as forward
import gpu_device
import numpy as np
import oracle
import pytest
import sm100_cases
import test_dact
import test_determinism
import test_dglu
import test_dsrelu
import test_forward
import test_forward_isolation
import test_gpu_contract
import test_gpu_runtime
import test_isolation
import test_quantize
import torch
from cases import DTYPES, FP4, FP8, Case, raw
from cases_forward import DactCase, WgradCase
from pairwise import pairwise
from simulated_engine import simulated_engine
from sm100_simulator import SimulationError

import cudnn_grouped
from cudnn_grouped import library

pytestmark = sm100_cases.needs_nvcc


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """The kernels divide and take exponentials as on a GPU. The simulator's own rounding is within the GPU's."""
    gpu_device.patch_bounds(monkeypatch)
    monkeypatch.setattr(cases, "packed", packed)


def packed(scales: list, poison: bool) -> np.ndarray:
    """As cases.packed, but padding along K is finite, which this engine needs (decisions, "Scale-factor layout")."""
    rows, blocks = scales[0].shape
    whole = [np.pad(matrix, ((0, 0), (0, -blocks % 4))) for matrix in scales]
    return PACKED(whole, poison)


PACKED = cases.packed


# The engine in the CPU engine's place ----------------------------------------------------------------------------


def quantise_columns():
    x = torch.randn(512, 160, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([256, 512], dtype=torch.int32)
    return cudnn_grouped.quantize(x, "nvfp4", axis="col", norm_const=torch.tensor([3.0]), padded_offsets=offsets)


def dequantise():
    return [cudnn_grouped.dequantize(*DATA, "mxfp8", norm_const=torch.tensor([3.0]))]


def reduce_dbias():
    slots = torch.randn(8, 96, 1, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    dbias = torch.ones(3, 96, 1, dtype=torch.bfloat16)
    torch.ops.cudnn_grouped.reduce_dbias(slots, torch.tensor([256, 256, 1024], dtype=torch.int32), dbias)
    return [dbias]


DATA = cudnn_grouped.quantize(torch.randn(256, 128, generator=torch.Generator().manual_seed(2)), "mxfp8")
SCALES = ("norm_const", "data", "scales")


@pytest.mark.parametrize("call", [quantise_columns, dequantise, reduce_dbias])
def test_takes_the_place_and_gives_it_back(call):
    before = [engine["name"] for engine in library.C.engines()]
    want = call()
    with simulated_engine() as simulator:
        got = call()
    assert all(torch.equal(raw(x), raw(y)) for x, y in zip(got, want, strict=True))
    report = simulator.report()
    assert sum(kernel["launches"] for kernel in report.values()) == 1
    assert [engine["name"] for engine in library.C.engines()] == before
    assert call()
    assert simulator.report() == report


@pytest.mark.parametrize(
    ("call", "name"),
    [(quantise_columns, name) for name in ("x", "padded_offsets", *SCALES)]
    + [(dequantise, name) for name in ("x", *SCALES)]
    + [(reduce_dbias, name) for name in ("slots", "padded_offsets", "dbias")],
)
def test_a_range_a_byte_too_short_is_found(call, name):
    """The kernels may touch the operands to the byte; SimulationError is what comes out."""
    with pytest.raises(SimulationError) as error, simulated_engine(shorten=name):
        call()
    assert error.value.category == "out_of_bounds"


# No padding in the scale tensors. The names are shipped_engine.cu's.
WHOLE = {"offsets": (256, 512), "n": 128, "k": 128}
GEMMS = [
    (
        Case("dsrelu", **WHOLE, d="e4m3", dbias=True, weights="ptrs_k"),
        "a sfa b sfb b_ptrs sfb_ptrs c padded_offsets alpha prob norm_const d_row d_col sfd_row sfd_col dprob dbias",
    ),
    (Case("dglu", **WHOLE, form="out"), "b sfb beta d_row d_col dprob amax"),
    (forward.Case("glu", **WHOLE, ab="bf16", vec=16, weights="list_n", bias="f32"), "a b alpha prob bias c d_row"),
    (DactCase(n=128), "a c d_row dprob dbias"),
]


@pytest.mark.parametrize(("case", "name"), [(case, name) for case, names in GEMMS for name in names.split()], ids=str)
def test_a_range_of_a_gemm_a_byte_too_short_is_found(case, name):
    with pytest.raises(SimulationError) as error, simulated_engine(shorten=name):
        run(case)
    assert error.value.category == "out_of_bounds"


def test_two_at_once_are_refused():
    with simulated_engine(), pytest.raises(RuntimeError, match="another one is active"), simulated_engine():
        pass


# What the engine does not serve ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "argument"),
    [(Case("dsrelu", dequantized=True), "b"), (forward.Case("mm", dequantized=True), "b"), (WgradCase(), "device")],
)
def test_what_is_not_served_is_refused(case, argument):
    with pytest.raises(RuntimeError, match=rf"^{argument}: expected .* compute capability 10\.x"), simulated_engine():
        run(case)


def served(case) -> bool:
    return not isinstance(case, WgradCase) and case != "wgrad" and not getattr(case, "dequantized", False)


# Every pair of options -------------------------------------------------------------------------------------------


def run(case) -> None:
    if isinstance(case, WgradCase):
        forward.run_wgrad(case)
    elif isinstance(case, DactCase):
        forward.run_dact(case)
    else:
        (forward if isinstance(case, forward.Case) else cases).run(case)


def exact(case):
    return (cases if type(case) is Case else forward).exact(case)


OPERANDS = {
    ("e4m3", "e8m0", 32): (16, 80, 208, 528),  # K: less than a stage of a ring, tails, several times through it
    ("e5m2", "e8m0", 32): (48, 128, 272, 784),
    ("fp4", "e4m3", 16): (32, 96, 352, 1056),
    ("uint8", "e8m0", 16): (64, 160, 256, 544),
    ("fp4", "e8m0", 32): (96, 224, 288, 800),
    ("bf16", "e8m0", 16): (8, 72, 264, 520),
}
COLUMNS = {"dglu": (32, 96, 160, 288), "glu": (64, 192, 320, 576)}
BACKWARD = ("dsrelu", "dglu")
OPTIONS = {
    "operation": [
        ("dsrelu", {}),
        ("dsrelu", {"tanh_clamp_scale": 2.0, "c_role": "preactivation"}),
        ("dglu", {"act_func": "dswiglu"}),
        ("dglu", {"act_func": "dgeglu", "glu_clamp_max": 5.05, "linear_offset": 0.5}),
        ("dglu", {"act_func": "dgeglu", "clamp_grad": "value"}),
        ("dglu", {"act_func": "dsituglu", "situ_beta1": 0.7}),
        ("dglu", {"act_func": "dswiglu", "epilogue_op": "relu"}),
        ("srelu", {}),
        ("srelu", {"tanh_clamp_scale": 2.0}),
        ("glu", {"act_func": "swiglu"}),
        ("glu", {"act_func": "geglu", "glu_clamp_max": 5.05, "glu_clamp_min": -3.1}),
        ("glu", {"act_func": "situglu"}),
        ("mm", {}),
    ],
    "operands": list(OPERANDS),
    "c": ["f32", "fp16", "bf16", "e4m3", "e5m2", None],  # None: srelu, glu and mm do not give it
    "d": ["bf16", "fp16", "f32", "e4m3", "e5m2"],
    "weights": ["dense_k", "dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"],
    "extras": [None, "f32", "bf16", "fp16"],  # dbias; the bias's dtype
    "tile": [(256, 256), (256, 128), (128, 256), (128, 128)],
    "cluster": [None, (1, 1), (2, 1), (1, 2), (2, 4)],
    "sched": [
        {},
        {"use_dynamic_sched": True},
        {"use_dynamic_sched": True, "deterministic": False},
        {"vector_f32": True},
    ],
    "offsets": [((256, 512), None), ((0, 256, 256, 768, 768), 1024), ((256,), None), ((512, 768), 1280)],
    "columns": [0, 1, 2, 3],
    "depth": [0, 1, 2, 3],
    "sf_form": ["view", "physical", "flat"],
    "scales": [(False, 1.0), (True, 3.0), (False, 448.0)],  # discrete_col_sfd, norm_const
    "form": ["functional", "out"],
    "poison": [False, True],
    "exact": [True, False],
    "schedule": ["immediate", "adversarial"],
}


def allowed(row: dict) -> bool:
    (op, options), ab, tile, cluster = row["operation"], row["operands"][0], row["tile"], row["cluster"]
    fp8_c, fp8_d = row["c"] in FP8, row["d"] in FP8
    if ab in FP4 and (row["weights"].endswith("_n") or fp8_d):
        return False
    if ab == "bf16" and (fp8_c or fp8_d or row["sf_form"] != "view" or "epilogue_op" in options):
        return False
    if ab != "bf16" and "clamp_grad" in options:
        return False
    if op in BACKWARD and (row["c"] is None or row["extras"] in ("bf16", "fp16")):
        return False
    if op == "dglu" and tile[1] != 256 or cluster and cluster[0] == 1 and tile[0] == 256:
        return False
    if fp8_c and "vector_f32" in row["sched"]:
        return False
    return fp8_d or row["scales"] == OPTIONS["scales"][0]


def case_of(row: dict, seed: int):
    op, options = row["operation"]
    options = {**options, **row["sched"], "mma_tiler_mn": list(row["tile"])}
    if row["cluster"]:
        options["cluster_shape_mn"] = list(row["cluster"])
    (offsets, m), (ab, sf, vec), (discrete, norm) = row["offsets"], row["operands"], row["scales"]
    same = {name: row[name] for name in ("d", "weights", "sf_form", "form", "poison")}
    same |= {"offsets": offsets, "m": m, "ab": ab, "sf": sf, "vec": vec, "discrete_col_sfd": discrete, "norm": norm}
    same |= {"n": COLUMNS.get(op, (32, 80, 144, 272))[row["columns"]], "k": OPERANDS[row["operands"]][row["depth"]]}
    if op in BACKWARD:
        case = Case(op, c=row["c"], dbias=row["extras"] is not None, options=options, seed=seed, **same)
    else:
        given = {"c": row["c"] or "bf16", "generate_c": row["c"] is not None, "bias": row["extras"]}
        given |= {"alpha": seed % 4 > 0, "prob": seed % 3 > 0}
        case = forward.Case(op, options=options, seed=seed, **given, **same)
    return exact(case) if row["exact"] else case


ROWS = pairwise(OPTIONS, allowed)
PAIRS = [(case_of(row, seed), row["schedule"], seed) for seed, row in enumerate(ROWS)]
PAIRS += [
    (exact(case) if seed % 2 else case, "adversarial" if seed % 3 else "immediate", seed)
    for seed, case in enumerate(test_dact.PAIRS)
]


@pytest.mark.parametrize(("case", "schedule", "seed"), PAIRS, ids=str)
def test_pairwise(case, schedule, seed):
    with simulated_engine(schedule, seed):
        run(case)


# The kernels have a body for usual calls (engine.cu, is_usual): BF16 C, and D in BF16 or E4M3.
USUAL = [
    make(op, n=96 if op == "dglu" else 192 if op == "glu" else 80, d=d, k=48)
    for make, ops in ((Case, ("dsrelu", "dglu")), (forward.Case, ("srelu", "glu", "mm")))
    for op in ops
    for d in ("bf16", "e4m3")
]


def one_away(case):
    """The case, and every case that is another in one thing that such a call does without."""
    ahead = isinstance(case, forward.Case)
    yield case
    yield replace(case, c="fp16")
    yield replace(case, d="e5m2" if case.quantized else "fp16")
    yield replace(case, form="out")  # D by rows and by columns in two buffers
    yield replace(case, bias="f32") if ahead else replace(case, dbias=True)
    if ahead:
        yield replace(case, generate_c=False)
    if case.op == "dglu":
        yield replace(case, options={"epilogue_op": "srelu"})


@pytest.mark.parametrize("case", [other for case in USUAL for other in one_away(case)], ids=str)
def test_usual_calls_and_their_neighbours(case):
    with simulated_engine():
        run(case)


# Values that are not finite ----------------------------------------------------------------------------------------

# N ends inside a chunk of 32 columns, and inside the first or the second half of a tile.
TAILS = [
    Case("dsrelu", (256, 512), n=272, dbias=True, d="e4m3", form="out", options={"c_role": "preactivation"}),
    Case("dsrelu", (256, 512), n=80, dbias=True, d="e5m2", discrete_col_sfd=True, poison=True),
    Case("dsrelu", (256, 512), n=48, dbias=True, c="f32", options={"tanh_clamp_scale": 2.0}),
    Case("dglu", (256, 512), n=288, dbias=True, d="e4m3", form="out"),
    forward.Case("srelu", (256, 512), n=272, d="e4m3", bias="bf16"),
    forward.Case("srelu", (256, 512), n=80, ab="fp4", sf="e4m3", vec=16, options={"tanh_clamp_scale": 2.0}),
    forward.Case("mm", (256, 512), n=16, d="e5m2", bias="f32", discrete_col_sfd=True),
    forward.Case("glu", (256, 512), n=576, d="e5m2"),
]


def factors(case) -> list:
    """The operands of a case that an infinity can come from."""
    if isinstance(case, forward.Case):
        return ["alpha", "prob", *(["bias"] if case.bias else [])]
    return ["alpha", "prob", "c"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("case", "name"), [(case, name) for case in TAILS for name in factors(case)], ids=str)
def test_infinities_and_nans_as_on_the_cpu(case, name, value):
    """Zeros stand in for the columns past N, and nothing that comes of them with such a factor is part of a result."""
    ahead = isinstance(case, forward.Case)
    built = (forward if ahead else cases).build(exact(case))
    if ahead:
        given = built.arguments
    else:
        given = {"c": built.positional[2], "alpha": built.positional[4], "prob": built.positional[-1]}
    # All but row 7's and expert 1's are positive: their infinities stay infinities where no zero meets them.
    given[name].view(-1)[{"alpha": 1, "prob": 7, "c": 7 * case.columns + 3, "bias": case.n + 3}[name]] = value
    call = (forward if ahead else cases).call
    want = call(built)[0]
    with simulated_engine("adversarial"):
        got = call(built)[0]
    for output, expected in want.items():
        if output.startswith("sfd"):
            assert torch.equal(raw(got[output]), raw(expected)), output
        elif expected is not None and expected.numel():
            x, y = got[output].float(), expected.float()  # which zero it is depends on the order of a sum
            assert torch.equal(x.isnan(), y.isnan()), f"{output}: NaN at other places"
            assert torch.equal(x.nan_to_num(7, torch.inf, -torch.inf), y.nan_to_num(7, torch.inf, -torch.inf)), output


PREACTIVATION = {"c_role": "preactivation"}


@pytest.mark.parametrize(
    "case",
    [
        Case("dsrelu", (256,), n=80, d="e4m3", dbias=True, options=PREACTIVATION),
        Case("dsrelu", (256,), n=272, dbias=True, options=PREACTIVATION),
        forward.Case("mm", (256,), n=80, d="e5m2"),
        forward.Case("mm", (256,), n=272),
    ],
    ids=str,
)
def test_an_infinite_prob_is_no_nan_past_n(case):
    """Infinity times a zero that stands in for a column past N must not reach the row's scale, or the maximum."""
    ahead = isinstance(case, forward.Case)
    built = (forward if ahead else cases).build(case)
    prob = built.arguments["prob"] if ahead else built.positional[-1]
    prob.view(-1)[7] = torch.inf
    if not ahead:
        built.positional[2][7] = 1.0
        built.positional[4].fill_(1.0)
    with simulated_engine():
        outputs = (forward if ahead else cases).call(built)[0]
    d = outputs["d" if ahead else "d_row"].float().reshape(256, case.columns)[7]
    if case.quantized:
        scales = cases.scale_matrix(outputs["sfd_row"])
        places = cases.formats.scale_offsets(256, cases.ceil_div(case.columns, 32))
        assert (scales[places[7]] == 0xFE).all()
        assert not d.isnan().any()
    else:
        assert outputs["amax"].isposinf().all()
        assert d.isinf().all()


# The engine's own tanh -------------------------------------------------------------------------------------------------


def products(generator):
    """A and B with one value in a row, and the FP32 products of them: every size from 2^-60 to 2^9."""
    a, b = torch.zeros(256, 64), torch.zeros(256, 64)
    a[:, 0] = torch.exp2(torch.arange(256) % 69 - 60.0)
    b[:, 0] = 1 + torch.rand(256, generator=generator)
    a, b = a.bfloat16(), b.bfloat16()
    return a, b, torch.outer(a[:, 0].double(), b[:, 0].double())


@pytest.mark.parametrize("scale", [2.0**-20, 0.3, 4.0, 25.0])
def test_tanh_and_its_slope_of_small_and_large(scale):
    generator = torch.Generator().manual_seed(0)
    a, b, x = products(generator)
    offsets, one = torch.tensor([256], dtype=torch.int32), torch.ones(1)
    common = {"d_dtype": torch.float32, "sf_vec_size": 16, "tanh_clamp_scale": scale}
    with simulated_engine():
        ops = torch.ops.cudnn_grouped
        squares = ops.srelu(a, [b], offsets, one, torch.ones(256), generate_c=False, **common)[1]
        c = torch.ones(256, 256, dtype=torch.bfloat16)
        slopes = ops.dsrelu(a, [b], c, offsets, one, torch.ones(256), **common)[0]
    # exp's argument: its error is |x| / scale units; tanh and its slope see less of it than the slope of -2|x| does.
    z = x / scale
    value, slope = z.tanh() * scale, 1 / z.clamp(max=200).cosh().square()
    of_value = gpu_device.TANH_UNITS + gpu_device.TANH_ARGUMENT_UNITS
    of_slope = gpu_device.TANH_SLOPE_UNITS + 2 * gpu_device.TANH_ARGUMENT_UNITS * z
    assert close(squares, value.square(), 2 * of_value + 2)
    assert close(slopes, 2 * value * slope, of_value + of_slope + 3, 2 * scale * oracle.TINY)


def close(got, expected, units, tiny=oracle.TINY):
    return ((got.double() - expected).abs() <= expected * units * oracle.U + tiny).all()


@pytest.mark.parametrize("beta", [2.0**100, -1e38, torch.nan])
def test_zero_times_a_large_beta(beta):
    """Is zero: the factor of an exponent stays finite, and a NaN of beta one."""
    case = Case("dglu", (256,), n=32, c="f32", options={"act_func": "dsituglu", "situ_beta1": 1e-3, "situ_beta2": 1e-3})
    built = cases.build(case)
    built.positional[2].view(256, 2, 32)[:, :, ::3] = 0.0
    built.positional[5].fill_(beta)
    want = cases.call(built)[0]
    with simulated_engine():
        got = cases.call(built)[0]
    for name in ("d_row", "dprob"):
        assert torch.equal(got[name].isnan(), want[name].isnan()), name
    assert torch.equal(got["d_row"] == 0, want["d_row"] == 0)


# Values that nobody checked -----------------------------------------------------------------------------------------

THREE = {"offsets": (256, 512, 768), "k": 160, "n": 288}
DYNAMIC = {"use_dynamic_sched": True}
UNCHECKED = [
    Case("dsrelu", **THREE, d="e4m3", discrete_col_sfd=True, dbias=True, options=DYNAMIC),
    Case("dsrelu", **THREE, dbias=True, weights="ptrs_k", options={"mma_tiler_mn": [128, 128]}),
    Case("dglu", **THREE, d="e5m2", discrete_col_sfd=True, dbias=True, weights="list_n"),
    Case("dglu", **THREE, ab="bf16", vec=16, c="f32", options={**DYNAMIC, "cluster_shape_mn": [2, 2]}),
    forward.Case("srelu", **THREE, ab="fp4", bias="bf16", weights="ptrs_k", options=DYNAMIC),
    forward.Case("glu", **{**THREE, "n": 320}, d="e4m3", discrete_col_sfd=True, bias="f32"),
    DactCase((256, 512, 768), n=96),
    DactCase((256, 512, 768), n=72, options={"act_func": "identity"}, c_per_expert=True, generate_d=False),
]


def returns(case, **unchecked) -> None:
    """The call ends, and the kernels touch nothing but the operands, the outputs and the workspace."""
    if isinstance(case, DactCase):
        build, call = forward.build_dact, forward.call_dact
    else:
        module = forward if isinstance(case, forward.Case) else cases
        build, call = module.build, module.call
    built = build(case)
    with simulated_engine("adversarial", **unchecked):
        call(built)


@pytest.mark.parametrize("values", test_gpu_runtime.BAD_OFFSETS.values(), ids=test_gpu_runtime.BAD_OFFSETS.keys())
@pytest.mark.parametrize("case", UNCHECKED, ids=str)
def test_offsets_that_nobody_checked(case, values):
    returns(case, offsets=torch.tensor(values, dtype=torch.int32))


@pytest.mark.parametrize("address", [0, 8, 1 << 60], ids=["null", "odd", "far"])
@pytest.mark.parametrize("case", [UNCHECKED[1], UNCHECKED[4]], ids=str)
def test_addresses_that_nobody_checked(case, address):
    """A null or misaligned one is not followed; any other is, and the simulator shows that it is."""
    addresses = torch.full((3,), address)
    if address < 16:
        returns(case, b_ptrs=addresses, sfb_ptrs=addresses)
        return
    with pytest.raises(SimulationError, match="out_of_bounds"):
        returns(case, b_ptrs=addresses)


# Schedules -------------------------------------------------------------------------------------------------------

# Three N tiles: the sum of two is the same in any order.
ORDERED = [replace(case, offsets=(256, 256, 768)) for case in test_determinism.SEVERAL]


@pytest.mark.parametrize("case", ORDERED, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_schedule_gives_the_same_bits(case, dynamic):
    """Nor does the number of SMs matter: which of them computes a tile, and after which other, is chance."""
    case = replace(case, options={**case.options, "use_dynamic_sched": dynamic})
    built, results = cases.build(case), []
    for schedule, seed, sms in (("immediate", 1, 4), ("adversarial", 1, 4), ("adversarial", 2, 2)):
        with simulated_engine(schedule, seed, sms):
            results.append(cases.call(built)[0])
    for name, tensor in results[0].items():
        assert all(torch.equal(raw(tensor), raw(other[name])) for other in results[1:]), name
    assert all(results[0][name].any() for name in ("d_row", "dprob", "dbias"))


NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def supported():
    """Every row of the support table: its operands, scales, dtypes of D and activations, the rest in turn."""
    for row in library.C.support_table():
        op, turn = row["operation"], 0
        dtypes = {name: [NAMES[x] for x in row[name]] for name in ("operands", "c", "d")}
        for act, ab, scales, d in product(
            row["activations"] or [None], dtypes["operands"], row["scales"] or [None], dtypes["d"]
        ):
            turn += 1
            options = {"act_func": act} if act else {}
            c = dtypes["c"][turn % len(dtypes["c"])]
            if op == "dact":
                yield DactCase((256, 256, 768), 1024, n=160, r=ab, c=c, d=d, options=options)
                continue
            if turn % 2 and op in ("dsrelu", "srelu"):
                options["tanh_clamp_scale"] = 2.0
            sf, vec = (NAMES[scales[0]], scales[1]) if scales else ("e8m0", 16)
            kinds = [f"{kind}_{major}" for kind in ("dense", "list", "ptrs") for major in row["b_majors"]]
            same = {"offsets": (256, 256, 768), "m": 1024, "ab": ab, "sf": sf, "vec": vec, "c": c, "d": d, "k": 544}
            same |= {"weights": kinds[turn % len(kinds)], "poison": True, "options": options}
            if op in BACKWARD:
                yield Case(op, n=288 if op == "dglu" else 272, dbias=True, **same)
            else:
                yield forward.Case(op, n=576 if op == "glu" else 272, bias=("f32", "bf16", None)[turn % 3], **same)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(supported()), ids=str)
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_supported_row(case, seed):
    with simulated_engine("adversarial", seed):
        run(exact(case) if seed % 2 else case)


# The tests of the operators --------------------------------------------------------------------------------------

MODULES = (
    test_dsrelu,
    test_dglu,
    test_forward,
    test_dact,
    test_isolation,
    test_forward_isolation,
    test_quantize,
)
NOT_HERE = test_gpu_contract.NOT_HERE
# In the default run: the smallest of each kind.
QUICK = {
    "test_accumulates_onto_outputs",
    "test_corner_cases",
    "test_d_col_may_be_d_row_where_it_is_its_copy",
    "test_extreme_scales",
    "test_nan_in_prob",
    "test_nan_row_and_nan_column",
    "test_no_rows_at_all",
    "test_output_tails_are_zero",
    "test_per_expert_columns",
    "test_reduce_dbias_keeps_experts_apart",
    "test_single_group_ignores_the_offset_value",
    "test_sizes_of_fp32",
}
# Of the sizes that tiles and pipelines may get wrong.
SIZES = (
    "test_d_is_of_the_unrounded_preactivation",
    "test_bounds_are_tight",
    "test_tails_in_n",
    "test_tails_in_k",
    "test_patterns_of_experts",
    "test_weights",
    "test_single_group",
    "test_many_experts_of_256_rows",
)


def adopt_all(adopters: dict, served, modules=MODULES) -> None:
    """The tests as tests of a module, in the simulator, on the values of their parameters that the engine serves."""

    def only_served(mark):
        if mark.name != "parametrize" or mark.args[0] not in ("case", "op"):
            return mark
        values = [value for value in mark.args[1] if served(value)]
        return pytest.mark.parametrize(mark.args[0], values, **mark.kwargs).mark

    def adopt(module, name: str, *marks) -> None:
        test = simulated_engine()(getattr(module, name))
        test.pytestmark = [*map(only_served, getattr(test, "pytestmark", ())), *(mark.mark for mark in marks)]
        adopters[f"{module.__name__}_{name.removeprefix('test_')}"] = test

    for module in modules:
        for name in vars(module):
            if name.startswith("test_") and name not in NOT_HERE and callable(getattr(module, name)):
                adopt(module, name, *([] if name in QUICK else [pytest.mark.slow]))
    for name in SIZES:
        adopt(test_gpu_contract, name, pytest.mark.slow)
    adopt(test_determinism, "test_reordered_experts_keep_their_bits", pytest.mark.slow)
    adopt(test_gpu_contract, "test_operands_at_any_16_bytes", pytest.mark.slow, pytest.mark.usefixtures("moved"))


adopt_all(globals(), served)


@pytest.fixture
def moved(monkeypatch):
    """Operators on copies of their tensors."""
    gpu_device.patch_operators(monkeypatch, torch.device("cpu"))


@pytest.mark.parametrize(
    "case", [Case("dsrelu", (256, 512), n=80, k=80), forward.Case("glu", ab="bf16", vec=16)], ids=str
)
def test_operands_at_16_bytes(case, moved):
    with simulated_engine(), gpu_device.setting(shift=16):
        run(case)
