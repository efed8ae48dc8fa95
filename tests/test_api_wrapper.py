"""The wrappers: return rules, weight modes, accumulation, defaults, streams; values are compared with the operators'."""

import warnings
from dataclasses import replace

import api_problem
import cases
import pytest
import torch
from api_problem import CASES, RESULT_NAMES, call_wrapper, same_bits, wrapper_arguments

from cudnn_grouped.api import dglu, operation

ALL = sorted(CASES)


@pytest.fixture(autouse=True)
def warned_already():
    """The filter warning of BF16 dGeGLU has been given, except where a test asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dglu._warn_value_filter()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dbias", [False, True])
def test_returns_the_operators_outputs(name, dbias):
    arguments = wrapper_arguments(replace(CASES[name], dbias=dbias))
    case = arguments.case
    result = call_wrapper(arguments)
    assert tuple(result.keys()) == RESULT_NAMES
    d_row, d_col, dprob, dbias_out, amax, sfd_row, sfd_col = result
    outputs, starts = cases.call(arguments.built)
    cases.check(arguments.built, outputs, starts)
    for output, expected in zip(result.values(), outputs.values(), strict=True):
        if output is not None and not (output is d_col and not case.quantized):
            assert same_bits(output, expected)
    assert (dbias_out is not None) == dbias
    assert (sfd_row is not None) == (sfd_col is not None) == case.quantized
    assert (amax is not None) == (case.scaled and case.d in ("bf16", "fp16"))
    if case.quantized:
        assert d_col.data_ptr() != d_row.data_ptr()
    else:
        assert d_col is (d_row if case.scaled else None)
    assert dprob.shape == (case.rows, 1, 1)


WEIGHTS = {
    name: ["list_k", "ptrs_k", *([] if case.ab in cases.FP4 else ["list_n", "ptrs_n", "dense_n"])]  # FP4 is k-major
    for name, case in CASES.items()
}


@pytest.mark.parametrize("name, weights", [(name, weights) for name in ALL for weights in WEIGHTS[name]])
def test_weight_modes_agree(name, weights):
    case = CASES[name]
    expected = call_wrapper(wrapper_arguments(case))
    result = call_wrapper(wrapper_arguments(replace(case, weights=weights)))
    for one, other in zip(result, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rank", [2, 3])
def test_dprob_is_accumulated_onto(name, rank):
    arguments = wrapper_arguments(replace(CASES[name], rank=rank))
    fresh = call_wrapper(arguments)["dprob_tensor"]
    start = torch.randn(fresh.shape, generator=torch.Generator().manual_seed(1))
    buffer = start.clone()
    result = call_wrapper(arguments | {"dprob_tensor": buffer})
    assert result["dprob_tensor"] is buffer
    rows = int(arguments["padded_offsets"][-1])
    expected = (start + fresh)[:rows]
    assert same_bits(buffer[:rows], expected)
    assert not buffer[rows:].any()  # rows of no expert


def test_dprob_of_another_rank_than_prob():
    arguments = wrapper_arguments(CASES["dsrelu_fp4"])
    buffer = torch.zeros(arguments.case.rows)
    assert call_wrapper(arguments | {"dprob_tensor": buffer})["dprob_tensor"] is buffer
    assert torch.equal(buffer, call_wrapper(arguments)["dprob_tensor"].flatten())


@pytest.mark.parametrize("name", ALL)
def test_no_rows(name):
    case = replace(CASES[name], offsets=(0, 0), m=0, dbias=True)
    result = call_wrapper(wrapper_arguments(case))
    assert result["d_row_tensor"].shape == (0, case.columns, 1) and result["dprob_tensor"].shape == (0, 1, 1)
    assert bool((result["dbias_tensor"] == 0).all())
    if result["amax_tensor"] is not None:
        assert bool((result["amax_tensor"] == -torch.inf).all())
    with pytest.raises(ValueError, match="^alpha_tensor: "):
        call_wrapper(wrapper_arguments(case) | {"alpha_tensor": torch.ones(3)})


@pytest.mark.parametrize("name", ["dsrelu_mxfp8", "dglu_bf16"])
def test_documented_constants_may_be_spelled_out(name):
    arguments = wrapper_arguments(CASES[name])
    spelled = arguments | {"acc_dtype": torch.float32, "cd_major": "n", "m_aligned": 256, "current_stream": None}
    assert same_bits(call_wrapper(spelled)["d_row_tensor"], call_wrapper(arguments)["d_row_tensor"])


def test_defaults_are_bfloat16_and_sixteen():
    arguments = wrapper_arguments(CASES["dsrelu_fp4"]).without("d_dtype", "sf_vec_size", "generate_dbias")
    result = call_wrapper(arguments)
    assert result["d_row_tensor"].dtype == torch.bfloat16 and result["dbias_tensor"] is None


@pytest.mark.parametrize("name", ["dsrelu_fp4", "dglu_mxfp8"])
@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.parametrize("torch_flag", [False, True])
def test_deterministic_follows_torch(name, flag, torch_flag, monkeypatch):
    seen = []
    arguments = wrapper_arguments(CASES[name])
    monkeypatch.setattr("cudnn_grouped.api.operation._call", lambda *call: seen.append(call) or cases_outputs(call))

    def cases_outputs(call):
        return [torch.empty(0) for _ in RESULT_NAMES]

    torch.use_deterministic_algorithms(torch_flag)
    try:
        call_wrapper(arguments | ({} if flag is None else {"deterministic": flag}))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen[0][2]["deterministic"] is (torch_flag if flag is None else flag)


class StreamObject:
    cuda_stream = 7


class IntLike:
    def __int__(self):
        return 3


def test_single_group_takes_its_end_from_a():
    case = replace(CASES["dglu_mxfp8"], offsets=(1024,))
    arguments = wrapper_arguments(case)
    expected = call_wrapper(arguments)
    other = arguments | {"padded_offsets": torch.zeros(1, dtype=torch.int32), "use_single_group_runtime_offsets": True}
    assert same_bits(call_wrapper(other)["d_row_tensor"], expected["d_row_tensor"])
    samples, execute = api_problem.class_arguments(other, outputs := api_problem.buffers(case))
    api_problem.CLASSES["dglu"](**samples)(**execute)
    assert same_bits(outputs["d_row"], expected["d_row_tensor"])


COMMON = {
    **{"discrete_col_sfd": True, "mma_tiler_mn": (128, 256), "cluster_shape_mn": (2, 2), "vector_f32": True},
    **{"use_dynamic_sched": True, "deterministic": True},
}
OPTIONS = {
    "dsrelu_mxfp8": {**COMMON, "c_role": "preactivation", "tanh_clamp_scale": 2.5},
    "dglu_mxfp8": {
        **COMMON,
        **{
            "act_func": "dgeglu",
            "linear_offset": 0.5,
            "geglu_alpha": 1.25,
            "glu_clamp_max": 3.0,
            "glu_clamp_min": -2.0,
        },
        **{"clamp_grad": "mask", "situ_beta1": 2.0, "situ_beta2": 3.0, "epilogue_op": "srelu"},
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_operator(name, monkeypatch):
    """Each option with a value other than its default, from the wrapper and from the class."""
    options, seen, right = OPTIONS[name], [], operation._call
    monkeypatch.setattr(operation, "_call", lambda *call: seen.append(call) or right(*call))
    arguments = wrapper_arguments(replace(CASES[name], weights="ptrs_n")) | options
    result = call_wrapper(arguments)
    outputs = api_problem.buffers(arguments.case)
    spaces = {}
    if name.startswith("dsrelu"):
        class_type = api_problem.CLASSES["dsrelu"]
        spaces = {"dprob_workspace": torch.zeros(class_type.dprob_workspace_shape(1024, 96, (128, 256), (2, 2)))}
    samples, execute = api_problem.class_arguments(arguments, outputs | spaces)
    api_problem.CLASSES[arguments.case.op](**samples)(**execute)
    expected = {**options, "sf_vec_size": 32, "n": 96, "b_dtype": torch.float8_e4m3fn, "b_major": "n"}
    if name.startswith("dglu"):
        expected["use_single_group_runtime_offsets"] = False  # three experts; tested below
    (_, _, from_wrapper), (_, _, from_class) = seen
    assert from_class == expected
    assert from_wrapper == expected | {"d_dtype": torch.float8_e4m3fn, "generate_dbias": False}
    assert same_bits(outputs["d_row"], result["d_row_tensor"])
    assert not same_bits(result["d_row_tensor"], call_wrapper(wrapper_arguments(CASES[name]))["d_row_tensor"])


@pytest.mark.parametrize("stream", [None, 0, 12345, StreamObject(), IntLike()])
def test_any_stream_is_accepted_on_the_cpu(stream):
    arguments = wrapper_arguments(CASES["dglu_bf16"])
    expected = call_wrapper(arguments)["d_row_tensor"]
    assert same_bits(call_wrapper(arguments | {"current_stream": stream})["d_row_tensor"], expected)


@pytest.mark.parametrize("stream", ["0", 1.0, True, [], 2])
def test_other_streams_are_refused(stream):
    with pytest.raises(ValueError, match="^current_stream: "):
        call_wrapper(wrapper_arguments(CASES["dglu_bf16"]) | {"current_stream": stream})


def test_bf16_dgeglu_filters_by_value_and_says_so_once():
    case = replace(CASES["dglu_bf16"], options={"act_func": "dgeglu"})
    arguments = wrapper_arguments(case)
    dglu._warn_value_filter.cache_clear()
    with pytest.warns(UserWarning, match="clamp_grad") as caught:
        first = call_wrapper(arguments)
        call_wrapper(arguments)
    assert len(caught) == 1 and caught[0].filename.endswith("api_problem.py")
    dglu._warn_value_filter.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = call_wrapper(arguments | {"clamp_grad": "value"})
        mask = call_wrapper(arguments | {"clamp_grad": "mask"})
        call_wrapper(wrapper_arguments(replace(CASES["dglu_mxfp8"], options={"act_func": "dgeglu"})))
        call_wrapper(wrapper_arguments(CASES["dglu_bf16"]))
    assert same_bits(first["d_row_tensor"], value["d_row_tensor"])
    assert not same_bits(mask["d_row_tensor"], value["d_row_tensor"])


def test_c_role_is_a_choice():
    arguments = wrapper_arguments(CASES["dsrelu_fp4"])
    default, grad, pre = (
        call_wrapper(arguments | role) for role in ({}, {"c_role": "grad_output"}, {"c_role": "preactivation"})
    )
    assert same_bits(default["d_row_tensor"], grad["d_row_tensor"])
    assert not same_bits(default["d_row_tensor"], pre["d_row_tensor"])


def test_norm_const_without_scale_factors_is_ignored():
    arguments = wrapper_arguments(CASES["dglu_fp4"])
    norm = call_wrapper(arguments | {"norm_const_tensor": torch.tensor([3.0])})
    assert same_bits(norm["d_row_tensor"], call_wrapper(arguments)["d_row_tensor"])


@pytest.mark.parametrize("name", ALL)
def test_meta_tensors_give_shapes(name):
    arguments = wrapper_arguments(replace(CASES[name], dbias=True))
    meta = api_problem.Arguments(
        {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments.items()},
        arguments.built,
    )
    for shape, real in zip(call_wrapper(meta), call_wrapper(arguments), strict=True):
        assert (shape is None) == (real is None)
        if shape is not None:
            assert shape.shape == real.shape and shape.dtype == real.dtype


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("own_dprob", [False, True])
def test_compiles_into_one_graph(name, own_dprob):
    arguments = wrapper_arguments(CASES[name])
    extra = [{"dprob_tensor": torch.ones(arguments.case.rows, 1, 1)} if own_dprob else {} for _ in range(2)]

    def function(given):
        result = api_problem.WRAPPERS[arguments.case.op](**given)
        return result["d_row_tensor"], result["dprob_tensor"]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    results = [f(dict(arguments) | more) for f, more in zip((function, compiled), extra, strict=True)]
    for eager, graph in zip(*results, strict=True):
        assert same_bits(eager, graph)
