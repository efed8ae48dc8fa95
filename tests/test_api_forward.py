"""The forward wrappers and classes: against FP64, against the operators to the bit, and their rules."""

import contextlib
import inspect
from dataclasses import replace

import pytest
import torch
from forward_problem import (
    CLASSES,
    FORMATS,
    FP8,
    RETURNS,
    WRAPPERS,
    Case,
    activation,
    build,
    check_d,
    class_call,
    expected,
    operator_call,
    same_bits,
)

import cudnn_grouped
from cudnn_grouped.api import forward, glu, mm

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = FP8

PAIRS = [(op, f) for op in WRAPPERS for f in FORMATS if op in CLASSES or (op == "mm") == (f == "bf16")]
# A case of each wrapper and operand family, by a short name.
CASES = {f"{op}_{format}": Case(op, format) for op, format in PAIRS if format in ("bf16", "mxfp8", "nvfp4")}
ALL, SCALED = sorted(CASES), sorted(name for name, case in CASES.items() if case.scaled)
MXFP8 = [name for name in SCALED if CASES[name].format == "mxfp8"]
CLASS_CASES = [name for name in ALL if CASES[name].op in CLASSES]


def with_c(case, c_dtype=None):
    """Arguments that make every wrapper return C where it can."""
    c = {} if case.op == "quant" else {"c_dtype": c_dtype}
    return c | ({"generate_c": True} if case.op in ("mm", "glu") else {})


def check(problem, d_dtype, c_dtype=BF16):
    """Against FP64: C to the bit, D to its rounding; amax and the absent outputs."""
    case = problem.case
    result = problem.call(d_dtype=d_dtype, **with_c(case, c_dtype))
    assert tuple(result.keys()) == tuple(f"{name}_tensor" for name in RETURNS[case.op])
    c, d = expected(problem)
    if case.op != "quant":
        rounded = (
            c.float() if c_dtype not in FP8 else c.float().clamp(-torch.finfo(c_dtype).max, torch.finfo(c_dtype).max)
        )
        assert torch.equal(result["c_tensor"].reshape(c.shape).float(), rounded.to(c_dtype).float())
    check_d(result["d_tensor"], d)
    assert result.get("d_col_tensor") is None and result.get("sfd_row_tensor") is None
    if case.scaled:
        assert (result["amax_tensor"] is not None) == (d_dtype in (BF16, F16))
        if result["amax_tensor"] is not None:
            for g, (start, end) in enumerate(problem.ranges()):
                want = d[start:end].abs().max() if end > start else torch.tensor(-torch.inf)
                torch.testing.assert_close(result["amax_tensor"][g, 0].double(), want.double(), rtol=2**-20, atol=0)
    elif case.op != "mm":
        assert result["amax_tensor"] is None
    return result


@pytest.mark.parametrize("op, format", PAIRS)
@pytest.mark.parametrize("d_dtype, bias", [(F32, None), (BF16, F32), (F16, BF16)], ids=str)
def test_against_fp64(op, format, d_dtype, bias):
    check(build(Case(op, format, bias=bias)), d_dtype)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "sizes",
    [
        {"n": 64, "k": 32, "offsets": (256,), "m": 256},
        {"n": 320, "k": 96, "offsets": (0, 512, 512, 512, 768), "m": 768},
        {"n": 576, "k": 160, "offsets": (256, 256), "m": 1024, "rank": 2},
        {"offsets": (0, 0, 0), "m": 512},
    ],
    ids=str,
)
def test_sizes(name, sizes):
    check(build(replace(CASES[name], bias=F16, **sizes)), BF16)


@pytest.mark.parametrize(
    "name, c_dtype",
    [
        (name, c)
        for name in ALL
        if CASES[name].op != "quant"
        for c in (F32, F16, BF16, *(FP8 if CASES[name].scaled else ()))
    ],
    ids=str,
)
def test_c_dtypes(name, c_dtype):
    check(build(CASES[name]), BF16, c_dtype)


ACTIVATIONS = [
    ("srelu", {"tanh_clamp_scale": 3.0}),
    ("glu", {"act_func": "geglu"}),
    (
        "glu",
        {"act_func": "geglu", "geglu_alpha": 1.0, "glu_clamp_max": 2.0, "glu_clamp_min": -1.0, "linear_offset": 0.25},
    ),
    ("glu", {"act_func": "situglu"}),
    ("glu", {"act_func": "situglu", "situ_beta1": 2.0, "situ_beta2": 5.0}),
]


@pytest.mark.parametrize("op, options", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_activations(op, options, format):
    check(build(Case(op, format, options=options, bias=BF16)), F32)


@pytest.mark.parametrize("name", MXFP8)
@pytest.mark.parametrize("d_dtype", FP8, ids=str)
@pytest.mark.parametrize("discrete_col_sfd", [False, True])
@pytest.mark.parametrize("norm", [1.0, 0.75])
def test_fp8_d_is_the_quantised_fp32_d(name, d_dtype, discrete_col_sfd, norm):
    problem = build(replace(CASES[name], bias=BF16))
    norm_const = torch.tensor([norm])
    plain = problem.call(d_dtype=F32)["d_tensor"][..., 0]
    options = {"d_dtype": d_dtype, "norm_const_tensor": norm_const, "discrete_col_sfd": discrete_col_sfd}
    result = problem.call(**options)
    format = "mxfp8" if d_dtype == E4M3 else "mxfp8_e5m2"
    offsets = problem.arguments["padded_offsets"] if discrete_col_sfd else None
    rows = cudnn_grouped.quantize(plain, format, norm_const=norm_const)
    columns = cudnn_grouped.quantize(plain, format, axis="col", norm_const=norm_const, padded_offsets=offsets)
    for name_, data, scales in (("row", *rows), ("col", *columns)):
        got = result["d_tensor" if name_ == "row" else "d_col_tensor"]
        assert torch.equal(got[..., 0].view(torch.uint8), data.view(torch.uint8))
        assert same_bits(result[f"sfd_{name_}_tensor"], scales)
    assert result["amax_tensor"] is None and result["d_col_tensor"] is not result["d_tensor"]


D_DTYPES = [(name, d_dtype) for name in ALL for d_dtype in (BF16, *((E4M3,) if name in MXFP8 else ()))]


@pytest.mark.parametrize("name, d_dtype", D_DTYPES, ids=str)
def test_wrapper_and_operator_agree(name, d_dtype):
    case = CASES[name]
    problem = build(replace(case, bias=BF16, options={} if case.op != "glu" else {"act_func": "geglu"}))
    norm = {"norm_const_tensor": torch.tensor([2.0])} if d_dtype == E4M3 else {}
    result = problem.call(d_dtype=d_dtype, **norm, **with_c(case))
    problem.arguments |= norm
    outputs = operator_call(problem, d_dtype, generate_c=case.op != "quant")
    for output in RETURNS[case.op]:
        got, want = result[f"{output}_tensor"], outputs[output]
        assert same_bits(got, want if want.dim() > 1 else None), output


WEIGHTS = {
    n: ["list_k", "ptrs_k", *([] if c.format == "nvfp4" else ["list_n", "ptrs_n", "dense_n"])] for n, c in CASES.items()
}


@pytest.mark.parametrize("name, weights", [(name, weights) for name in ALL for weights in WEIGHTS[name]])
def test_weight_modes_agree(name, weights):
    case = replace(CASES[name], bias=BF16)
    want = build(case).call(**with_c(case))
    problem = build(replace(case, weights=weights))
    for one, other in zip(problem.call(**with_c(case)), want, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", ALL)
def test_no_rows(name):
    case = replace(CASES[name], offsets=(0, 0), m=0, bias=F32)
    problem = build(case)
    result = problem.call(**with_c(case))
    assert result["d_tensor"].shape == (0, case.n // case.width, 1)
    if case.op != "quant":
        assert result["c_tensor"].shape == (0, case.n, 1)
    if case.scaled:
        assert bool((result["amax_tensor"] == -torch.inf).all())
    with pytest.raises(ValueError, match="^alpha_tensor: "):
        problem.call(alpha_tensor=torch.ones(3))


@pytest.mark.parametrize("name", [name for name in SCALED if CASES[name].op != "srelu"])
def test_prob_is_one_when_left_out(name):
    case = replace(CASES[name], prob=False)
    check(build(case), F32)


def test_glu_takes_a_bfloat16_prob():
    problem = build(CASES["glu_mxfp8"])
    rounded = problem.arguments["prob_tensor"].to(BF16)
    result = problem.call(prob_tensor=rounded)
    assert same_bits(result["d_tensor"], problem.call(prob_tensor=rounded.float())["d_tensor"])
    with pytest.raises(ValueError, match="^prob_tensor: "):
        build(CASES["glu_bf16"]).call(prob_tensor=rounded)


def test_c_of_bf16_operands_is_an_option():
    for name in ("glu_bf16", "mm_bf16"):
        problem = build(CASES[name])
        with_c_, without = problem.call(generate_c=True), problem.call()
        assert without["c_tensor"] is None and same_bits(with_c_["d_tensor"], without["d_tensor"])
    assert build(CASES["glu_mxfp8"]).call(generate_c=False)["c_tensor"] is not None
    d, c = problem.call(generate_c=True)
    assert d.dtype == c.dtype == BF16


def test_norm_const_without_scale_factors_is_ignored():
    for name in SCALED:
        problem = build(CASES[name])
        norm = problem.call(norm_const_tensor=torch.tensor([3.0]))
        assert same_bits(norm["d_tensor"], problem.call()["d_tensor"])


@pytest.mark.parametrize("name", ["glu_mxfp8", "quant_nvfp4"])
def test_single_group_runtime_offsets(name):
    problem = build(replace(CASES[name], offsets=(512,), m=512))
    stale = torch.tensor([256], dtype=torch.int32)
    result = problem.call(padded_offsets=stale, use_single_group_runtime_offsets=True)
    for one, other in zip(result, problem.call(), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("stream", [0, 12345, type("Stream", (), {"cuda_stream": 7})()])
def test_any_stream_is_accepted_on_the_cpu(name, stream):
    problem = build(CASES[name])
    assert same_bits(problem.call(current_stream=stream)["d_tensor"], problem.call()["d_tensor"])


@pytest.mark.parametrize(
    "name, changes", [("glu_mxfp8", {}), ("quant_mxfp8", {"use_single_group_runtime_offsets": True})]
)
def test_conversions_are_ordered_with_the_stream(name, changes, monkeypatch):
    """What a wrapper computes beside the operator runs within the launch stream too."""
    inside, seen = [], []

    @contextlib.contextmanager
    def launch_stream(stream, device):
        inside.append(stream)
        yield lambda inputs, outputs: None
        inside.pop()

    def spy(function):
        return lambda *args: seen.append(list(inside)) or function(*args)

    monkeypatch.setattr(forward, "launch_stream", launch_stream)
    monkeypatch.setattr(glu, "_float_prob", spy(glu._float_prob))
    monkeypatch.setattr(mm, "_whole", spy(mm._whole))
    problem = build(replace(CASES[name], offsets=(512,), m=512))
    if name == "glu_mxfp8":
        changes = {"prob_tensor": problem.arguments["prob_tensor"].to(BF16)}
    problem.call(current_stream=7, **changes)
    assert seen == [[7]]


@pytest.mark.parametrize("name", ALL)
def test_meta_tensors_give_shapes(name):
    problem = build(CASES[name])
    real = problem.call(**with_c(CASES[name]))
    problem.arguments = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in problem.arguments.items()}
    for shape, output in zip(problem.call(**with_c(CASES[name])), real, strict=True):
        assert (shape is None) == (output is None)
        if shape is not None:
            assert shape.shape == output.shape and shape.dtype == output.dtype and shape.stride() == output.stride()


@pytest.mark.parametrize("name", ALL)
def test_compiles_into_one_graph(name):
    problem = build(replace(CASES[name], bias=BF16))

    def function(given):
        return WRAPPERS[CASES[name].op](**given, **with_c(CASES[name]))["d_tensor"]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    assert same_bits(compiled(problem.arguments), function(problem.arguments))


@pytest.mark.parametrize("name", ["srelu_bf16", "glu_bf16", "mm_bf16"])
def test_gradients_of_bf16_operands(name):
    """Through the wrapper, against torch's autograd of the FP64 formula, to what BF16 gradients can hold."""
    problem = build(replace(CASES[name], bias=F32, offsets=(256, 256, 768), m=768))
    leaves = {k: problem.arguments[f"{k}_tensor"].clone().requires_grad_() for k in ("a", "b", "prob")}
    stored = problem.arguments["bias_tensor"].t().clone().requires_grad_()
    result = problem.call(
        **{f"{k}_tensor": v for k, v in leaves.items()}, bias_tensor=stored.t(), d_dtype=F32, **with_c(problem.case)
    )
    upstream = torch.randn(result["d_tensor"].shape, generator=torch.Generator().manual_seed(2))
    (result["d_tensor"] * upstream).sum().backward()
    exact = {k: v.detach().double().requires_grad_() for k, v in {**leaves, "bias": stored}.items()}
    problem.a, problem.b = exact["a"][..., 0], list(exact["b"].unbind(2))
    problem.bias, problem.prob = exact["bias"], exact["prob"].flatten()
    d = differentiable(problem)
    (d * upstream[..., 0]).sum().backward()
    for k, leaf in {**leaves, "bias": stored}.items():
        got, want = leaf.grad.double(), exact[k].grad
        # a BF16 gradient of X, then a sum of independent roundings: well within 1 % of the whole
        assert float((got - want).norm()) <= 0.01 * float(want.norm()), k


def differentiable(problem):
    """D in FP64 with gradients."""
    parts = []
    for g, (start, end) in enumerate(problem.ranges()):
        x, prob = problem.alpha[g] * (problem.a[start:end] @ problem.b[g].t()), problem.prob[start:end, None]
        if problem.case.op == "mm":
            parts.append(x + prob * problem.bias[g])
        else:
            parts.append(prob * activation(problem.case, x + problem.bias[g]))
    return torch.cat(parts)


# The plain GEMM's own outputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [("d",), ("c",), ("c", "d")], ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, F16)], ids=str)
def test_mm_into_given_tensors(given, dtypes):
    problem = build(replace(CASES["mm_bf16"], bias=None))
    dtype = dict(zip(("c", "d"), dtypes, strict=True))
    want = problem.call(generate_c=True, c_dtype=dtype["c"], d_dtype=dtype["d"])
    shape = want["d_tensor"].shape
    buffers = {f"{k}_tensor": torch.full(shape, torch.nan, dtype=dtype[k]) for k in given}
    others = {f"{k}_dtype": dtype[k] for k in ("c", "d") if k not in given}
    result = problem.call(generate_c=True, **buffers, **others)
    for key, buffer in buffers.items():
        assert result[key] is buffer
    for one, other in zip(result, want, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name, d_dtype", [("quant_mxfp8", E4M3), ("quant_mxfp8", F16), ("quant_nvfp4", BF16)], ids=str)
def test_quant_into_a_given_tensor(name, d_dtype):
    problem = build(CASES[name])
    norm = {"norm_const_tensor": torch.ones(1)}
    want = problem.call(d_dtype=d_dtype, **norm)
    buffer = torch.empty(want["d_tensor"].shape, dtype=d_dtype)
    result = problem.call(d_tensor=buffer, **norm)
    assert result["d_tensor"] is buffer
    for one, other in zip(result, want, strict=True):
        assert same_bits(one, other)


def test_quant_without_amax():
    problem = build(CASES["quant_nvfp4"])
    assert problem.call(generate_amax=False)["amax_tensor"] is None
    assert problem.call()["amax_tensor"].shape == (3, 1)


# Classes ------------------------------------------------------------------------------------------------------


def wrapper_result(problem, d_dtype):
    norm = {"norm_const_tensor": torch.tensor([0.5])} if d_dtype in FP8 else {}
    problem.arguments |= norm
    return problem.call(d_dtype=d_dtype, **with_c(problem.case))


def assert_matches(outputs, want):
    for name, output in outputs.items():
        other = want[f"{name}_tensor"]
        if name == "d_col" and other is None:
            other = want["d_tensor"]  # a class's D_col without scale factors is a copy of D
        if other is not None:  # the class gives amax with any D dtype
            assert same_bits(output, other), name


CLASS_D_DTYPES = [
    (name, d_dtype, columns)
    for name, d_dtype in D_DTYPES
    for columns in ({}, *(({"discrete_col_sfd": True},) if d_dtype == E4M3 else ()))
    if name in CLASS_CASES
]


@pytest.mark.parametrize("name, d_dtype, options", CLASS_D_DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["dense_k", "list_k", "ptrs_k"])
def test_class_and_wrapper_agree(name, weights, d_dtype, options):
    problem = build(replace(CASES[name], weights=weights, bias=BF16, options=options))
    want = wrapper_result(problem, d_dtype)
    operation, execute, outputs = class_call(problem, d_dtype)
    with pytest.raises(RuntimeError, match="compile"):
        operation.execute(**execute)
    assert operation.check_support() is True
    assert operation.compile() is None and operation.compile() is None
    assert operation.execute(**execute) is None
    assert_matches(outputs, want)
    operation(**execute)  # again: nothing but amax's maximum is carried over
    assert_matches(outputs, want)


@pytest.mark.parametrize("name", CLASS_CASES)
@pytest.mark.parametrize("weights", ["dense_k", "ptrs_k"])
def test_meta_samples_and_another_m(name, weights):
    small = build(replace(CASES[name], weights=weights, bias=BF16, offsets=(0, 0, 256), m=256))
    problem = build(replace(CASES[name], weights=weights, bias=BF16))
    operation, _, _ = class_call(small, BF16)
    operation._samples = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in operation._samples.items()}
    _, execute, outputs = class_call(problem, BF16)
    operation(**execute)
    assert_matches(outputs, wrapper_result(problem, BF16))


@pytest.mark.parametrize("op, options", ACTIVATIONS, ids=str)
def test_activation_constants_of_classes(op, options):
    """sReLU's are the constructor's, GLU's those of execute."""
    problem = build(Case(op, "mxfp8", options=options))
    operation, execute, outputs = class_call(problem, F32)
    operation(**execute)
    assert_matches(outputs, wrapper_result(problem, F32))


def test_situ_beta1_of_the_constructor():
    problem = build(Case("glu", "mxfp8", options={"act_func": "situglu", "situ_beta1": 2.0}))
    operation, execute, outputs = class_call(problem, F32, situ_beta1=2.0)
    execute.pop("situ_beta1")
    operation(**execute)
    assert_matches(outputs, wrapper_result(problem, F32))


def test_class_amax_takes_the_maximum():
    problem = build(CASES["srelu_mxfp8"])
    operation, execute, outputs = class_call(problem, F32)
    outputs["amax"].copy_(torch.tensor([[1e9], [0.0], [-torch.inf]]))
    operation(**execute)
    d = wrapper_result(problem, F32)["d_tensor"]
    assert outputs["amax"].flatten().tolist() == [1e9, 0.0, float(d[256:768].abs().max())]


def test_bf16_glu_class_without_c():
    problem = build(CASES["glu_bf16"])
    operation, execute, outputs = class_call(problem, BF16, sample_c=None)
    execute["c_tensor"], _ = None, outputs.pop("c")
    operation(**execute)
    assert_matches(outputs, wrapper_result(problem, BF16))
    with pytest.raises(ValueError, match="^sample_c: "):
        class_call(problem, BF16, sample_c=None, generate_c=True)[0].check_support()


# Signatures ---------------------------------------------------------------------------------------------------

SIGNATURES = {
    "grouped_gemm_srelu_wrapper_sm100": """
        a_tensor=None b_tensor=None sfa_tensor=None sfb_tensor=None padded_offsets=None alpha_tensor=None bias_tensor=None
        b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k' norm_const_tensor=None prob_tensor=None acc_dtype=None
        c_dtype=None d_dtype=None cd_major='n' mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16 vector_f32=False
        m_aligned=256 discrete_col_sfd=False use_dynamic_sched=False tanh_clamp_scale=None current_stream=None""",
    "grouped_gemm_glu_wrapper_sm100": """
        a_tensor=None sfa_tensor=None padded_offsets=None alpha_tensor=None b_tensor=None sfb_tensor=None bias_tensor=None
        b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k' norm_const_tensor=None prob_tensor=None acc_dtype=None
        c_dtype=None d_dtype=None cd_major='n' mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16 vector_f32=False
        m_aligned=256 discrete_col_sfd=False act_func='swiglu' linear_offset=None geglu_alpha=1.702 glu_clamp_max=7.0
        glu_clamp_min=-7.0 situ_beta1=4.0 situ_beta2=25.0 use_dynamic_sched=False use_single_group_runtime_offsets=False
        current_stream=None generate_c=False""",
    "grouped_gemm_wrapper_sm100": """
        a_tensor=None padded_offsets=None alpha_tensor=None b_tensor=None bias_tensor=None b_ptrs=None n=None b_dtype=None
        b_major='k' prob_tensor=None acc_dtype=None c_dtype=None d_dtype=None c_tensor=None d_tensor=None cd_major='n'
        mma_tiler_mn=(256,256) cluster_shape_mn=None vector_f32=False m_aligned=256 generate_c=False use_dynamic_sched=False
        current_stream=None""",
    "grouped_gemm_quant_wrapper_sm100": """
        a_tensor=None sfa_tensor=None padded_offsets=None alpha_tensor=None b_tensor=None sfb_tensor=None bias_tensor=None
        b_ptrs=None sfb_ptrs=None n=None b_dtype=None b_major='k' norm_const_tensor=None prob_tensor=None
        row_scale_tensor=None acc_dtype=None d_dtype=None d_tensor=None cd_major='n' mma_tiler_mn=(256,256)
        cluster_shape_mn=None sf_vec_size=16 vector_f32=False m_aligned=256 discrete_col_sfd=False use_dynamic_sched=False
        use_single_group_runtime_offsets=False current_stream=None generate_amax=True""",
    "grouped_gemm_wgrad_wrapper_sm100": """
        a_tensor=None b_tensor=None sfa_tensor=None sfb_tensor=None offsets_tensor=None output_mode='dense' wgrad_tensor=None
        wgrad_ptrs=None global_scale_a=None global_scale_b=None acc_dtype=None wgrad_dtype=None mma_tiler_mn=(256,256)
        cluster_shape_mn=None sf_vec_size=16 accumulate_on_output=False input_order='tensor2d' current_stream=None""",
    "GroupedGemmSreluSm100": """
        sample_a=None sample_b=None sample_c=None sample_d=None sample_sfa=None sample_sfb=None sample_padded_offsets=None
        sample_alpha=None sample_d_col=None sample_bias=None num_experts=None b_shape=None b_dtype=None sample_sfd_row=None
        sample_sfd_col=None sample_amax=None sample_norm_const=None sample_prob=None acc_dtype=None mma_tiler_mn=(256,256)
        cluster_shape_mn=None sf_vec_size=16 vector_f32=False m_aligned=256 discrete_col_sfd=False b_major='k'
        use_dynamic_sched=False tanh_clamp_scale=None""",
    "GroupedGemmGluSm100": """
        sample_a=None sample_c=None sample_d=None sample_sfa=None sample_padded_offsets=None sample_alpha=None
        sample_d_col=None sample_b=None sample_sfb=None sample_bias=None num_experts=None b_shape=None b_dtype=None
        sample_sfd_row=None sample_sfd_col=None sample_amax=None sample_norm_const=None sample_prob=None acc_dtype=None
        mma_tiler_mn=(256,256) cluster_shape_mn=None sf_vec_size=16 vector_f32=False m_aligned=256 discrete_col_sfd=False
        act_func='swiglu' situ_beta1=4.0 b_major='k' use_dynamic_sched=False use_single_group_runtime_offsets=False
        generate_c=False""",
}
EXECUTE = """
    a_tensor c_tensor d_tensor sfa_tensor padded_offsets alpha_tensor b_tensor=None sfb_tensor=None bias_tensor=None
    b_ptrs=None sfb_ptrs=None d_col_tensor=None sfd_row_tensor=None sfd_col_tensor=None amax_tensor=None
    norm_const_tensor=None prob_tensor=None"""
GLU_EXECUTE = """
    linear_offset=None geglu_alpha=1.702 glu_clamp_max=7.0 glu_clamp_min=-7.0 situ_beta1=None situ_beta2=25.0"""


def spelled(function):
    """Positional parameters; keyword-only ones are this package's own and come after."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}".replace(" ", "") for p in parameters]
    return [text for text in shown if text != "self"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    function = getattr(cudnn_grouped, name)
    assert name in cudnn_grouped.__all__ and spelled(function) == SIGNATURES[name].split()


def test_signature_of_execute():
    assert spelled(CLASSES["srelu"].execute) == [*EXECUTE.split(), "current_stream=None"]
    assert spelled(CLASSES["glu"].execute) == [*EXECUTE.split(), *GLU_EXECUTE.split(), "current_stream=None"]
