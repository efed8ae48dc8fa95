"""The contract on the GPU: the tests of the operators, run on the device; sizes that tiles and pipelines may get wrong;
and the CPU engine's numbers."""

from dataclasses import replace

import cases
import cases_forward as forward
import gpu_device
import numpy as np
import pytest
import test_dact
import test_dequantized
import test_determinism
import test_dglu
import test_dsrelu
import test_forward
import test_forward_isolation
import test_isolation
import test_quantize
import test_wgrad
import torch
from cases import Case
from cases_forward import DactCase, WgradCase
from compare import round_to, within
from oracle_formats import FORMATS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cudnn_grouped

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("operators_on_device")]

# The tests of the operators --------------------------------------------------------------------------------------

MODULES = (
    test_dsrelu,
    test_dglu,
    test_forward,
    test_wgrad,
    test_quantize,
    test_dact,
    test_dequantized,
    test_isolation,
    test_forward_isolation,
)
NOT_HERE = {
    # nothing runs on a device in them
    "test_guards_notice",
    "test_mm_oracle",
    "test_autograd_of_the_forward_oracle_is_the_backward_oracle",
    # pointer values are checked where the host can read them
    "test_null_pointers_of_experts_with_rows_are_errors",
    # about CPU threads
    "test_threads_change_no_bit",
    # autograd of the operators, which the device's stand-ins do not pass on
    "test_weights_that_need_gradients",
    # test_gpu_runtime.py has it, with data made on the device
    "test_more_than_two_to_the_31_elements",
    # of the CPU's bounds
    "test_bounds_are_tight",
    # the same bits from two kernels, which the contract does not promise
    "test_is_the_epilogue_of_the_fused_operator",
    "test_quantizer_is_the_operators_quantizer",
    "test_d_is_of_the_unrounded_preactivation",
}


def adopt(module, name: str) -> None:
    globals()[f"{module.__name__}_{name.removeprefix('test_')}"] = getattr(module, name)


for module in MODULES:
    for name in vars(module):
        if name.startswith("test_") and name not in NOT_HERE and callable(getattr(module, name)):
            adopt(module, name)
adopt(test_determinism, "test_reordered_experts_keep_their_bits")


@pytest.mark.parametrize("op", ["srelu", "glu"])
def test_d_is_of_the_unrounded_preactivation(op):
    """D does not depend on C's dtype nor on its presence: within the bounds in each case, and C's rounding is beyond them."""
    case = forward.Case(op, d="f32", c="f32")
    for c in ("bf16", "fp16", "e4m3", "e5m2"):
        forward.run(replace(case, c=c))
    forward.run(replace(case, generate_c=False))


@pytest.mark.parametrize("op", ["dsrelu", "dglu", "srelu", "glu", "mm"])
def test_bounds_are_tight(op):
    """The device's bounds leave at most one BF16 D in four more than one value."""
    built = (cases if op in BACKWARD else forward).build(case_of(op, "mxfp8", n=128))
    d = built.expected().d
    assert np.mean(round_to("bf16", d.low) == round_to("bf16", d.high)) > 0.75


# Sizes -----------------------------------------------------------------------------------------------------------

FAMILIES = {
    "mxfp8": {"ab": "e4m3"},
    "mxfp8_e5m2": {"ab": "e5m2"},
    "nvfp4": {"ab": "fp4", "sf": "e4m3", "vec": 16},
    "mxfp4": {"ab": "fp4"},
    "bf16": {"ab": "bf16", "vec": 16},
}
# Not multiples of 64, one and several times through a ring of stages of 64.
K_TAILS = {
    "mxfp8": (16, 80, 1072),
    "mxfp8_e5m2": (48,),
    "nvfp4": (32, 96, 1056),
    "mxfp4": (160,),
    "bf16": (8, 72, 1032),
}
# Columns of the GEMM: tails of blocks of 32, of tiles of 128, 192 and 256, and of 2880.
N_TAILS = {
    "dsrelu": (8, 16, 24, 32, 40, 72, 96, 144, 200, 288, 2872, 2880),
    "srelu": (8, 16, 24, 32, 40, 72, 96, 144, 200, 288, 2872, 2880),
    "mm": (8, 16, 24, 32, 40, 72, 96, 144, 200, 288, 2872, 2880),
    "dglu": (32, 96, 160, 224, 288, 1440, 2880),
    "glu": (64, 128, 192, 320, 576, 1344, 2880),
}
BACKWARD = ("dsrelu", "dglu")


def case_of(op: str, family: str, **changes):
    """A case with everything the operator gives."""
    options = {**FAMILIES[family], **changes}
    if op in BACKWARD:
        return Case(op, dbias=True, **options)
    return forward.Case(op, bias="f32", **options)


def run(case) -> None:
    """Against the oracle, exact and random data."""
    if isinstance(case, WgradCase):
        forward.run_wgrad(case)
        forward.run_wgrad(replace(case, data="exact"))
    elif isinstance(case, DactCase):
        forward.run_dact(case)
        forward.run_dact(forward.exact(case))
    elif isinstance(case, forward.Case):
        forward.run(case)
        forward.run(forward.exact(case))
    else:
        cases.run(case)
        cases.run(cases.exact(case))


@pytest.mark.parametrize(("op", "n"), [(op, n) for op in N_TAILS for n in N_TAILS[op]])
@pytest.mark.parametrize("family", ["mxfp8", "nvfp4", "bf16"])
def test_tails_in_n(op, n, family):
    """One block of rows."""
    k = {"mxfp8": 80, "nvfp4": 96, "bf16": 72}[family]
    run(case_of(op, family, offsets=(256,), n=n, k=k, d="bf16"))
    run(case_of(op, family, offsets=(256,), n=n, k=k, d="f32", form="out"))
    if family == "mxfp8" and n % 16 == 0:
        run(case_of(op, family, offsets=(256,), n=n, k=k, d="e4m3", form="out", norm=3.0))


@pytest.mark.parametrize("op", N_TAILS)
@pytest.mark.parametrize(("family", "k"), [(family, k) for family, ks in K_TAILS.items() for k in ks])
def test_tails_in_k(op, family, k):
    run(case_of(op, family, offsets=(256, 512), n=64 if op in ("dglu", "glu") else 48, k=k))


# Hopper has wider tiles for them; gated ones where K is beyond 2048.
FP8_D = [
    *(Case("dsrelu", n=n, k=80, d="e4m3", dbias=b) for n in (144, 176, 192, 272, 384, 2688) for b in (False, True)),
    *(
        Case("dsrelu", n=560, k=96, d="e4m3", norm=3.0, options={"c_role": role})
        for role in ("grad_output", "preactivation")
    ),
    *(Case("dglu", n=n, k=2112, d="e4m3", dbias=dbias) for n in (160, 192, 320, 1504) for dbias in (False, True)),
    *(Case("dglu", n=544, k=2112, d="e4m3", dbias=b, options={"act_func": "dgeglu"}) for b in (False, True)),
]


@pytest.mark.parametrize("case", FP8_D, ids=str)
def test_fp8_d(case):
    """Ragged experts, one without rows, rows without an expert."""
    run(replace(case, offsets=(256, 1024, 1024, 2304), m=2560, poison=True, weights="list_k", discrete_col_sfd=True))
    run(replace(case, offsets=(512,), form="out"))


PATTERNS = {
    "one block": ((256,), 256),
    "rows without an expert": ((256, 512), 1536),
    "empty at the start": ((0, 0, 256, 768), 768),
    "empty in the middle": ((256, 256, 256, 768), 768),
    "empty at the end": ((512, 768, 768, 768), 1024),
    "only the last has rows": ((0, 0, 0, 512), 512),
    "ragged": ((256, 1024, 1280, 1280, 2304), 2560),
}


@pytest.mark.parametrize("op", [*N_TAILS, "wgrad", "dact"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_experts(op, pattern):
    """NaN in the rows without an expert."""
    offsets, m = PATTERNS[pattern]
    if op == "wgrad":
        for family in ("mxfp8", "nvfp4", "bf16"):
            run(WgradCase(offsets, m, **FAMILIES[family], m=48, n=80, poison=True))
    elif op == "dact":
        run(DactCase(offsets, m, n=96, poison=True))
    else:
        for family, d in (("mxfp8", "e4m3"), ("nvfp4", "bf16"), ("bf16", "f32")):
            case = case_of(op, family, offsets=offsets, m=m, n=192, k=96, d=d, poison=True, weights="ptrs_k")
            run(replace(case, discrete_col_sfd=d == "e4m3"))


@pytest.mark.parametrize("op", N_TAILS)
@pytest.mark.parametrize("weights", ["dense_k", "dense_n", "list_k", "list_n", "ptrs_k", "ptrs_n"])
def test_weights(op, weights):
    """Null pointers for the experts without rows; tails in N and K, more than one tile."""
    n, k = {"dglu": 288, "glu": 576}.get(op, 272), 336
    for family in ("mxfp8", "nvfp4", "bf16"):
        if family != "nvfp4" or weights.endswith("_k"):
            k = 352 if family == "nvfp4" else k
            run(case_of(op, family, offsets=(0, 256, 256, 768), m=1024, n=n, k=k, weights=weights, poison=True))


@pytest.mark.parametrize("op", ["dglu", "glu"])
@pytest.mark.parametrize("family", ["mxfp8", "nvfp4"])
def test_single_group(op, family):
    case = case_of(op, family, offsets=(1024,), n=192, k=96)
    run(replace(case, options={"use_single_group_runtime_offsets": True}))


EXPERTS = 16 if gpu_device.DRY_RUN else 128


@pytest.mark.parametrize("op", [*N_TAILS, "wgrad", "dact"])
def test_many_experts_of_256_rows(op):
    offsets = tuple(256 * (e + 1) for e in range(EXPERTS))
    if op == "wgrad":
        run(WgradCase(offsets, ab="e4m3", m=48, n=80))
    elif op == "dact":
        run(DactCase(offsets, n=64))
    else:
        run(case_of(op, "mxfp8", offsets=offsets, n=64, k=48, d="e4m3", weights="list_k", discrete_col_sfd=True))


@pytest.mark.parametrize("op", N_TAILS)
def test_operands_at_any_16_bytes(op):
    """Every tensor, inputs and outputs, 16 bytes behind a multiple of more."""
    with gpu_device.setting(shift=16):
        for family, d in (("mxfp8", "e4m3"), ("nvfp4", "bf16"), ("bf16", "bf16")):
            case = case_of(op, family, offsets=(256, 512), n=192, k=160, d=d)
            for weights in ("dense_k", "list_k", "ptrs_k"):
                run(replace(case, weights=weights))
                run(replace(case, weights=weights, form="out"))


@pytest.mark.parametrize("a_major", ["tokens", "rows"])
@pytest.mark.parametrize("b_major", ["tokens", "rows"])
@pytest.mark.parametrize(("m", "n"), [(16, 16), (208, 400), (2880, 32), (32, 2880)])
def test_wgrad_tails(a_major, b_major, m, n):
    for family in ("mxfp8", "bf16"):
        case = WgradCase((256, 768), **FAMILIES[family], m=m, n=n, a_major=a_major, b_major=b_major)
        run(case)
        run(replace(case, form="accumulate", d="f32"))


# The CPU engine's numbers ------------------------------------------------------------------------------------------


def both(call):
    """(outputs of the CPU engine, outputs of the device)."""
    with gpu_device.setting(engine="cpu"):
        on_cpu = call()
    return on_cpu, call()


def assert_same_bits(call) -> None:
    want, got = both(call)
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(cases.raw(got[name]), cases.raw(tensor)), name


def assert_near(name: str, want, got, error, dtype: str) -> None:
    """Both are within `error` of the true value before they are rounded: they differ by at most twice that, and by half
    an ulp of the format more, by which the CPU's value may have been rounded."""
    want, got = (cases.values_of(t.reshape(error.shape)) for t in (want, got))
    half_ulp = smallest = 0.0
    if dtype != "f32":
        largest, smallest = FORMATS[dtype].max, 2.0 ** (1 - FORMATS[dtype].bias)  # smallest: with all its digits
        half_ulp = 2.0 ** -(FORMATS[dtype].mantissa_bits + 1)
        want = np.nan_to_num(want, nan=np.nan, posinf=largest * (1 + half_ulp), neginf=-largest * (1 + half_ulp))
    reach = 2 * error + half_ulp * np.maximum(np.abs(want), smallest)
    within(f"{name} against the CPU", got, round_to(dtype, want - reach), round_to(dtype, want + reach))


def compared(case):
    """The case with outputs that are not FP8: those are compared by value."""
    if case.quantized:
        case = replace(case, d="f32", discrete_col_sfd=False)
    return replace(case, c="f32") if isinstance(case, forward.Case) and case.c in cases.FP8 else case


BACKWARD_PAIRS = [*test_dsrelu.PAIRS, *test_dglu.PAIRS]


@pytest.mark.parametrize("case", BACKWARD_PAIRS[::3], ids=str)
def test_backward_equals_the_cpu_on_exact_data(case):
    built = cases.build(cases.exact(case))
    assert_same_bits(lambda: cases.call(built)[0])


@pytest.mark.parametrize("case", test_forward.PAIRS[::3], ids=str)
def test_forward_equals_the_cpu_on_exact_data(case):
    built = forward.build(forward.exact(case))
    assert_same_bits(lambda: forward.call(built)[0])


@pytest.mark.parametrize("case", test_wgrad.PAIRS[::2], ids=str)
def test_wgrad_equals_the_cpu_on_exact_data(case):
    built = forward.build_wgrad(replace(case, data="exact"))
    assert_same_bits(lambda: {f"out[{e}]": t for e, t in enumerate(forward.call_wgrad(built)[0])})


@pytest.mark.parametrize("case", test_dact.PAIRS[::2], ids=str)
def test_dact_equals_the_cpu_on_exact_data(case):
    built = forward.build_dact(forward.exact(case))
    assert_same_bits(lambda: forward.call_dact(built))


@pytest.mark.parametrize("case", BACKWARD_PAIRS[1::3], ids=str)
def test_backward_is_near_the_cpu(case):
    case = compared(case)
    built = cases.build(case)
    want, (on_cpu, on_device) = built.expected(), both(lambda: cases.call(built)[0])
    # What a start value added to a sum rounds by.
    dprob = want.dprob.error + 2.0**-23 * (np.abs(want.dprob.value) + 2)
    dbias = want.dbias.error + 2.0**-23 * (np.abs(want.dbias.value) + 2)
    values = [("d_row", want.d.error, case.d), ("dprob", dprob, "f32")]
    if case.dbias:
        values.append(("dbias", dbias, "bf16"))
    if on_cpu.get("amax") is not None and on_cpu["amax"].numel():
        used = np.diff(case.offsets, prepend=0) > 0
        for outputs in (on_cpu, on_device):
            outputs["amax"] = outputs["amax"].flatten(1)[used]
        values.append(("amax", want.amax.error[used], "f32"))
    for name, error, dtype in values:
        assert_near(name, on_cpu[name], on_device[name], error, dtype)


@pytest.mark.parametrize("case", test_forward.PAIRS[1::3], ids=str)
def test_forward_is_near_the_cpu(case):
    case = compared(case)
    built = forward.build(case)
    want, (on_cpu, on_device) = built.expected(), both(lambda: forward.call(built)[0])
    if case.generate_c:
        assert_near("c", on_cpu["c"], on_device["c"], want.c.error, case.c)
    assert_near("d", on_cpu["d"], on_device["d"], want.d.error, case.d)


@pytest.mark.parametrize("case", [c for c in test_wgrad.PAIRS[1::2] if c.form != "accumulate"], ids=str)
def test_wgrad_is_near_the_cpu(case):
    built = forward.build_wgrad(case)
    on_cpu, on_device = both(lambda: forward.call_wgrad(built)[0])
    for e, want in enumerate(built.expected()):
        assert_near(f"out[{e}]", on_cpu[e].contiguous(), on_device[e].contiguous(), want.error, case.d)


# Every tile of a persistent kernel several times: 64 blocks of 128 rows by 9 of 192 columns, on at most 160 SMs.
LARGE_M, LARGE_N = (512, 576) if gpu_device.DRY_RUN else (8192, 1728)


@pytest.mark.parametrize(("family", "d"), [("mxfp8", "e4m3"), ("bf16", "bf16"), ("nvfp4", "bf16")])
@pytest.mark.parametrize("op", N_TAILS)
def test_many_tiles_equal_the_cpu(op, family, d):
    offsets = tuple(256 * e for e in (0, 1, 1, LARGE_M // 512, LARGE_M // 256))
    case = case_of(op, family, offsets=offsets, n=LARGE_N, k=96, d=d)
    if op in BACKWARD:
        built = cases.build(cases.exact(case))
        assert_same_bits(lambda: cases.call(built)[0])
    else:
        built = forward.build(forward.exact(case))
        assert_same_bits(lambda: forward.call(built)[0])


@pytest.mark.skipif(gpu_device.DRY_RUN, reason="the CPU engine keeps in FP32 what BF16 rounds")
@pytest.mark.parametrize("code", ["e4m3", "e5m2"])
def test_dequantized_weights_at_the_ends_of_the_range(code):
    """Every finite code times every scale: dequantize_weights rounds, below 2^-126 too, as a call on the quantised does."""
    device = gpu_device.DEVICE
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    codes[~codes.view(cases.DTYPES[code]).float().isfinite()] = 0
    b = codes.view(cases.DTYPES[code])[..., None].to(device)
    scale_bytes = torch.arange(256, dtype=torch.uint8).clamp(max=254)[:, None].repeat(1, 8)
    sfb = cudnn_grouped.pack_scales(scale_bytes.view(torch.float8_e8m0fnu)).to(device)
    a = torch.eye(256).to(cases.DTYPES[code]).to(device)
    sfa = cudnn_grouped.pack_scales(torch.full((256, 8), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)).to(device)
    offsets = torch.tensor([256], dtype=torch.int32, device=device)
    kept = cudnn_grouped.dequantize_weights(b, sfb, {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2"}[code])
    options = {"sfa": sfa, "sf_vec_size": 32, "d_dtype": torch.float32}
    results = [
        torch.ops.cudnn_grouped.mm(a, [weights], offsets, sfb=scales, **options)[1]
        for weights, scales in ((b, [sfb]), (kept, None))
    ]
    assert torch.equal(*map(cases.raw, results))
    smallest = results[0][results[0] != 0].abs().nan_to_num(torch.inf).min().item()
    assert smallest < 2.0**-126, smallest


class Devices(TorchDispatchMode):
    """The devices of the tensors that this package's operators are given."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cudnn_grouped":
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            self.seen |= {tensor.device for tensor in tensors}
        return func(*args, **(kwargs or {}))


def test_these_tests_run_on_the_device():
    with Devices() as devices:
        run(case_of("dsrelu", "mxfp8", weights="ptrs_k"))
        run(case_of("glu", "bf16", form="out"))
        run(WgradCase())
        test_quantize.check(np.ones((32, 32), np.float32), "mxfp8")
    assert devices.seen == {gpu_device.DEVICE}
