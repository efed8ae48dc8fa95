"""The weight-gradient wrapper: values, destinations, accumulation, scale forms, rules."""

import re

import pytest
import torch
from forward_problem import ROUNDING, Case, build, same_bits

import cudnn_grouped
from cudnn_grouped import grouped_gemm_wgrad_wrapper_sm100 as wgrad

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OFFSETS, TOKENS, M, N = (256, 256, 768), 1024, 96, 160


def integers(*shape, seed=0):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def quantised(x, format):
    """(T, rows) values as column-quantised operand: (data with T along the first axis, scales of each expert, FP32 values)."""
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    data, scales = cudnn_grouped.quantize(x, format, axis="col", padded_offsets=offsets)
    values = cudnn_grouped.dequantize(data, scales, format, axis="col", padded_offsets=offsets)
    return data, scales, values


def problem(format="bf16", a_tokens_contiguous=False, b_tokens_contiguous=False):
    """(arguments, FP64 A (m, T), FP64 B (T, n)). FP4 data comes transposed, (rows, T/2): T is contiguous there."""
    x, y = integers(TOKENS, M), integers(TOKENS, N, seed=1)
    arguments = {"offsets_tensor": torch.tensor(OFFSETS, dtype=torch.int32)}
    if format == "bf16":
        a, b = x.to(BF16), y.to(BF16)
    else:
        (a, sfa, x), (b, sfb, y) = quantised(x, format), quantised(y, format)
        vec = 16 if format == "nvfp4" else 32
        arguments |= {"sfa_tensor": sfa, "sfb_tensor": sfb, "sf_vec_size": vec}
        if format == "nvfp4":
            arguments |= {
                "global_scale_a": torch.tensor([0.5, 1.0, 2.0]),
                "global_scale_b": torch.tensor([1.0, 3.0, -0.25]),
            }
    if format.endswith("fp4"):
        a, b = a, b.t()
    else:
        a = a.t().contiguous() if a_tokens_contiguous else a.t()
        b = b.t().contiguous().t() if b_tokens_contiguous else b
    return arguments | {"a_tensor": a, "b_tensor": b}, x.t().double(), y.double()


def expected(arguments, a, b):
    scale = torch.ones(3, dtype=torch.float64)
    for name in ("global_scale_a", "global_scale_b"):
        scale = scale * arguments.get(name, torch.ones(3)).double()
    starts = (0, *OFFSETS[:-1])
    return torch.stack([scale[g] * (a[:, s:e] @ b[s:e]) for g, (s, e) in enumerate(zip(starts, OFFSETS, strict=True))])


def check(got, want):
    """The sums are exact: only the rounding of the output remains."""
    relative, absolute = ROUNDING[got.dtype]
    error = (got.double() - want).abs()
    assert bool((error <= want.abs() * (relative + 2.0**-23) + absolute).all()), float(error.max())


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [None, BF16, F16, F32], ids=str)
def test_against_fp64(format, dtype):
    arguments, a, b = problem(format)
    result = wgrad(**arguments, wgrad_dtype=dtype)
    assert tuple(result.keys()) == ("wgrad_tensor",)
    (w,) = result
    assert w.shape == (3, M, N) and w.dtype == (dtype or BF16)
    check(w, expected(arguments, a, b))
    assert not w[1].any()  # the expert without tokens


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("a_tokens", [False, True])
@pytest.mark.parametrize("b_tokens", [False, True])
def test_either_dimension_may_be_contiguous(format, a_tokens, b_tokens):
    arguments, a, b = problem(format, a_tokens, b_tokens)
    check(wgrad(**arguments)["wgrad_tensor"], expected(arguments, a, b))


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", ["dense", "discrete_stack", "list"])
def test_destinations(format, accumulate, form):
    arguments, a, b = problem(format)
    start = integers(3, M, N, seed=3)
    buffer = start.clone()
    given = {"wgrad_tensor": buffer}
    if form == "list":
        given = {"wgrad_ptrs": [one.clone() for one in start]}
    result = wgrad(
        **arguments, **given, output_mode="dense" if form == "dense" else "discrete", accumulate_on_output=accumulate
    )
    (written,) = given.values()
    assert result["wgrad_tensor"] is written
    written = torch.stack(written) if form == "list" else written
    check(written, expected(arguments, a, b) + (start.double() if accumulate else 0))
    assert torch.equal(written[1], start[1] if accumulate else torch.zeros(M, N))


def test_accumulation_rounds_once():
    """2^-9 added to 1 a second time is lost in BF16 alone: the old value is added to the FP32 sum."""
    a, b = torch.zeros(16, 256, dtype=BF16), torch.zeros(256, 16, dtype=BF16)
    a[0, 0], b[0, 0] = 2.0**-9, 1.0
    a[0, 1], b[1, 0] = 1.0, 1.0
    w = torch.full((1, 16, 16), -1.0, dtype=BF16)
    wgrad(a, b, offsets_tensor=torch.tensor([256], dtype=torch.int32), wgrad_tensor=w, accumulate_on_output=True)
    assert float(w[0, 0, 0]) == 2.0**-9


def test_without_a_destination_accumulation_starts_from_zero():
    arguments, _, _ = problem()
    for mode in ("dense", "discrete"):
        result = wgrad(**arguments, accumulate_on_output=True, output_mode=mode)
        assert same_bits(result["wgrad_tensor"], wgrad(**arguments)["wgrad_tensor"])


def test_no_tokens():
    offsets = torch.zeros(2, dtype=torch.int32)
    a, b = torch.empty(M, 0, dtype=BF16), torch.empty(0, N, dtype=BF16)
    assert torch.equal(wgrad(a, b, offsets_tensor=offsets)["wgrad_tensor"], torch.zeros(2, M, N, dtype=BF16))
    w = torch.ones(2, M, N)
    wgrad(a, b, offsets_tensor=offsets, wgrad_tensor=w, accumulate_on_output=True)
    assert bool((w == 1).all())
    wgrad(a, b, offsets_tensor=offsets, wgrad_tensor=w)
    assert not w.any()


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_scale_forms(format):
    """The 6-D view, the physical form, the flat buffer and the documents' 2-D form hold the same bytes."""
    arguments, _, _ = problem(format)
    want = wgrad(**arguments)["wgrad_tensor"]
    physical = {k: arguments[k].permute(5, 2, 4, 0, 1, 3) for k in ("sfa_tensor", "sfb_tensor")}
    rows = {"sfa_tensor": 128, "sfb_tensor": 256}
    for form in (
        physical,
        {k: v.reshape(-1) for k, v in physical.items()},
        {k: v.reshape(rows[k], -1) for k, v in physical.items()},
    ):
        assert same_bits(wgrad(**{**arguments, **form})["wgrad_tensor"], want)


@pytest.mark.parametrize("discrete", [True, False])
def test_column_outputs_of_the_forward_are_operands(discrete):
    """D_col and SFD_col of a fused operator, either form, without another quantisation."""
    case = build(Case("srelu", "mxfp8", n=160, k=96, offsets=OFFSETS))
    outputs = case.call(d_dtype=torch.float8_e4m3fn, norm_const_tensor=torch.ones(1), discrete_col_sfd=discrete)
    d, scales = outputs["d_col_tensor"][..., 0], outputs["sfd_col_tensor"]
    offsets = case.arguments["padded_offsets"]
    values = cudnn_grouped.dequantize(d, scales, axis="col", padded_offsets=offsets if discrete else None)
    result = wgrad(d.t(), d, scales, scales, offsets, sf_vec_size=32, wgrad_dtype=F32, discrete_col_sfd=discrete)
    for g, (start, end) in enumerate(case.ranges()):
        x = values[start:end].double()
        want, magnitude = x.t() @ x, x.abs().t() @ x.abs()
        assert bool(((result[0][g].double() - want).abs() <= (end - start) * 2.0**-24 * magnitude + 1e-30).all())


def test_operator_and_wrapper_agree():
    arguments, _, _ = problem("nvfp4")
    given = {k.removesuffix("_tensor").replace("offsets", "padded_offsets"): v for k, v in arguments.items()}
    want = torch.ops.cudnn_grouped.wgrad(**given, d_dtype=F16)
    assert same_bits(wgrad(**arguments, wgrad_dtype=F16)["wgrad_tensor"], want)


@pytest.mark.parametrize("given", [False, True])
def test_meta_and_compile(given):
    arguments, _, _ = problem("mxfp8")
    w = {"wgrad_tensor": torch.ones(3, M, N), "accumulate_on_output": True} if given else {}
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in {**arguments, **w}.items()}
    assert wgrad(**meta)["wgrad_tensor"].shape == (3, M, N)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **k: wgrad(**k)["wgrad_tensor"], backend="aot_eager", fullgraph=True, dynamic=True)
    clones = [{k: v.clone() if k == "wgrad_tensor" else v for k, v in w.items()} for _ in range(2)]
    assert same_bits(compiled(**arguments, **clones[0]), wgrad(**arguments, **clones[1])["wgrad_tensor"])


def some(*shape, dtype=F32):
    return torch.ones(shape, dtype=dtype)


def options(name, *values, **others):
    return [("bf16", {**others, name: value}, name) for value in values]


BAD = [
    *[("mxfp8", {f"{name}_tensor": None}, f"{name}_tensor") for name in ("a", "b", "offsets", "sfa", "sfb")],
    *[("bf16", {f"{name}_tensor": 1.0}, f"{name}_tensor") for name in ("a", "b", "offsets", "sfa")],
    ("bf16", {"b_tensor": [some(TOKENS, N, dtype=BF16)]}, "b_tensor"),
    # shapes, layouts, dtypes
    ("bf16", lambda t: {"a_tensor": t["a_tensor"][..., None]}, "a_tensor"),
    ("bf16", lambda t: {"a_tensor": t["a_tensor"][:, :-128]}, "a_tensor"),
    ("bf16", lambda t: {"b_tensor": t["b_tensor"][:-256]}, "b_tensor"),
    ("bf16", lambda t: {"b_tensor": t["b_tensor"][:, :-16]}, "b_tensor"),
    ("bf16", lambda t: {"a_tensor": t["a_tensor"].half()}, "a_tensor"),
    ("bf16", lambda t: {"b_tensor": t["b_tensor"].half()}, "b_tensor"),
    ("mxfp8", lambda t: {"b_tensor": t["b_tensor"].view(torch.float8_e5m2)}, "b_tensor"),
    ("mxfp4", lambda t: {"a_tensor": t["a_tensor"].view(torch.uint8).t().contiguous().t()}, "a_tensor"),
    ("bf16", lambda t: {"offsets_tensor": t["offsets_tensor"].long()}, "offsets_tensor"),
    ("bf16", lambda t: {"offsets_tensor": t["offsets_tensor"].view(3, 1)}, "offsets_tensor"),
    ("bf16", {"offsets_tensor": torch.tensor([256, 0, 512], dtype=torch.int32)}, r"offsets_tensor\[1\]"),
    ("bf16", {"offsets_tensor": torch.tensor([256, 512, 1280], dtype=torch.int32)}, r"offsets_tensor\[2\]"),
    ("bf16", {"offsets_tensor": torch.tensor([128, 256, 512], dtype=torch.int32)}, r"offsets_tensor\[0\]"),
    ("bf16", lambda t: {"b_tensor": t["b_tensor"].to("meta")}, "b_tensor"),
    # scales
    ("bf16", {"sfa_tensor": some(512, dtype=torch.uint8)}, "sfa_tensor"),
    ("bf16", {"sfb_tensor": some(512, dtype=torch.uint8)}, "sfb_tensor"),
    ("bf16", {"sf_vec_size": 32}, "sf_vec_size"),
    ("mxfp8", {"sf_vec_size": 16}, "sf_vec_size"),
    ("nvfp4", {"sf_vec_size": 32}, "sf_vec_size"),
    ("mxfp8", lambda t: {"sfa_tensor": t["sfa_tensor"][:, :, :0]}, "sfa_tensor"),
    ("mxfp8", lambda t: {"sfb_tensor": t["sfb_tensor"].contiguous()}, "sfb_tensor"),
    ("mxfp8", {"sfb_tensor": some(128, 32, dtype=torch.uint8).view(torch.float8_e8m0fnu)}, "sfb_tensor"),
    ("mxfp8", lambda t: {"sfa_tensor": t["sfa_tensor"].view(torch.float8_e4m3fn)}, "sfa_tensor"),
    ("mxfp4", lambda t: {"sfb_tensor": t["sfb_tensor"].view(torch.float8_e4m3fn)}, "sfb_tensor"),
    ("nvfp4", {"global_scale_a": None}, "global_scale_a"),
    ("nvfp4", {"global_scale_a": None, "global_scale_b": None}, "global_scale_a"),
    ("mxfp8", {"global_scale_a": some(3)}, "global_scale_b"),
    ("nvfp4", {"global_scale_b": some(2)}, "global_scale_b"),
    ("nvfp4", {"global_scale_b": some(3, dtype=torch.float64)}, "global_scale_b"),
    # outputs
    ("bf16", {"wgrad_tensor": some(2, M, N)}, "wgrad_tensor"),
    ("bf16", {"wgrad_tensor": some(M, N)}, "wgrad_tensor"),
    ("bf16", {"wgrad_tensor": some(3, N, M)}, r"wgrad_tensor\[0\]"),
    ("bf16", {"wgrad_tensor": some(3, N, M).transpose(1, 2)}, r"wgrad_tensor\[0\]"),
    ("bf16", {"wgrad_tensor": some(3, M, N, dtype=torch.float64)}, r"wgrad_tensor\[0\]"),
    ("bf16", {"wgrad_tensor": [some(M, N)] * 3}, "wgrad_tensor"),
    ("bf16", {"wgrad_tensor": some(3, M, N).to("meta")}, r"wgrad_tensor\[0\]"),
    ("bf16", {"wgrad_tensor": some(3, M, N), "wgrad_dtype": BF16}, "wgrad_dtype"),
    ("bf16", {"wgrad_ptrs": [some(M, N) for _ in range(3)]}, "wgrad_ptrs"),
    ("bf16", {"output_mode": "discrete", "wgrad_ptrs": [some(M, N)] * 3}, r"wgrad_ptrs\[0\]"),
    ("bf16", {"output_mode": "discrete", "wgrad_ptrs": [some(M, N), some(M, N)]}, "wgrad_ptrs"),
    ("bf16", {"output_mode": "discrete", "wgrad_ptrs": []}, "wgrad_ptrs"),
    ("bf16", {"output_mode": "discrete", "wgrad_ptrs": [some(M, N), None, some(M, N)]}, r"wgrad_ptrs\[1\]"),
    ("bf16", {"output_mode": "discrete", "wgrad_ptrs": [some(M, N), some(M, N), some(M, M)]}, r"wgrad_ptrs\[2\]"),
    (
        "bf16",
        {"output_mode": "discrete", "wgrad_ptrs": [some(M, N), some(M, N, dtype=BF16), some(M, N)]},
        r"wgrad_ptrs\[1\]",
    ),
    ("bf16", {"output_mode": "discrete", "wgrad_ptrs": 7}, "wgrad_ptrs"),
    (
        "bf16",
        {"output_mode": "discrete", "wgrad_ptrs": [some(M, N) for _ in range(3)], "wgrad_tensor": some(3, M, N)},
        "wgrad_tensor",
    ),
    # options
    *options("output_mode", "stacked", None),
    *options("input_order", "ragged", None, 0),
    *options("acc_dtype", BF16),
    *options("wgrad_dtype", torch.float64, torch.float8_e4m3fn, "bfloat16"),
    *options("mma_tiler_mn", (64, 256), (256, 64), (256,), "256"),
    *options("cluster_shape_mn", (1, 1), (2, 3), (8, 1), (0, 1), (2,)),
    *options("cluster_shape_mn", (3, 1), mma_tiler_mn=(128, 128)),
    *options("accumulate_on_output", 1, None),
    *options("sf_vec_size", "16", None),
    *options("discrete_col_sfd", 1),
    *options("current_stream", "default"),
]


@pytest.mark.parametrize("format, change, argument", BAD, ids=[f"{i}-{row[0]}-{row[2]}" for i, row in enumerate(BAD)])
def test_bad_arguments(format, change, argument):
    arguments, a, b = problem(format)
    with pytest.raises(ValueError) as caught:
        wgrad(**{**arguments, **(change(arguments) if callable(change) else change)})
    assert type(caught.value) is ValueError and re.match(rf"{argument}: expected .+, got .+", str(caught.value)), (
        caught.value
    )
    check(wgrad(**arguments)["wgrad_tensor"], expected(arguments, a, b))


def test_not_available():
    arguments, _, _ = problem()
    with pytest.raises(NotImplementedError, match="^input_order: .*tensor_ragged"):
        wgrad(**arguments, input_order="tensor_ragged")
    with pytest.raises(NotImplementedError, match="^wgrad_ptrs: .*list of tensors"):
        wgrad(**arguments, output_mode="discrete", wgrad_ptrs=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("tiles", [(256, 256), (128, 256), (256, 128), (128, 128)])
def test_tiles_and_clusters(tiles):
    arguments, _, _ = problem()
    want = wgrad(**arguments)["wgrad_tensor"]
    for cluster in (None, (2, 1), (4, 4)):
        assert same_bits(wgrad(**arguments, mma_tiler_mn=tiles, cluster_shape_mn=cluster)["wgrad_tensor"], want)
