"""Malformed calls of the forward wrappers and classes: the exception, and the argument's name at the head of its text.

Each row changes the arguments of a call that works; after every refusal that call gives the same bits as before.
"""

import math
import re

import pytest
import torch
from forward_problem import CLASSES, Case, build, class_call, same_bits

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {
    "SB": Case("srelu", "bf16", bias=F32),
    "S8": Case("srelu", "mxfp8", bias=F32),
    "S4": Case("srelu", "nvfp4", bias=F32),
    "GB": Case("glu", "bf16", bias=F32),
    "G8": Case("glu", "mxfp8", bias=F32),
    "G4": Case("glu", "uint8", bias=F32),
    "MB": Case("mm", "bf16", bias=F32),
    "Q8": Case("quant", "mxfp8", bias=F32),
    "Q4": Case("quant", "nvfp4", bias=F32),
}
EVERY = tuple(CASES)
PLAIN, EIGHT, FOUR = (tuple(x for x in EVERY if x[1] == kind) for kind in "B84")
SCALED, GLU, SRELU = (*EIGHT, *FOUR), ("GB", "G8", "G4"), ("SB", "S8", "S4")
WITH_SCALES = ("SB", "GB", *SCALED)  # wrappers that have scale parameters
NEEDS_PROB = (*SRELU, "GB", "MB")
WITH_C = (*SRELU, *GLU, "MB")


def some(*shape, dtype=F32):
    return torch.ones(shape, dtype=dtype)


def like(name, change):
    return lambda arguments: {name: change(arguments[name])}


def sliced(tensor):
    """The same values one element further in memory: aligned to the element only."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    room.view(raw).copy_(tensor.contiguous().view(raw).flatten())
    return room.view(tensor.shape)


def transposed(tensor):
    """The same shape, the other of the first two dimensions contiguous."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return raw.transpose(0, 1).contiguous().transpose(0, 1).view(tensor.dtype)


def with_value(index, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


def options(names, option, *values, **others):
    """A row for each bad value of an option, which both layers spell alike."""
    return [(names, "dense_k", {**others, option: value}, option, option) for value in values]


def both(names, change, argument, weights="dense_k"):
    """A row for the wrapper's argument and the sample of the same name."""
    bare = argument.replace("_tensor", "")
    return (names, weights, change, argument, f"sample_{bare}")


# (cases, weights, change: dict or function of the arguments, the wrapper's argument, the class's or None: no error there)
BOTH = [
    # required tensors
    *[both(EVERY, {f"{x}_tensor": None}, f"{x}_tensor") for x in ("a", "alpha")],
    both(EVERY, {"padded_offsets": None}, "padded_offsets"),
    both(NEEDS_PROB, {"prob_tensor": None}, "prob_tensor"),
    *[both(SCALED, {f"{x}_tensor": None}, f"{x}_tensor") for x in ("sfa", "sfb")],
    both(EVERY, {"a_tensor": [1.0]}, "a_tensor"),
    both(EVERY, {"bias_tensor": 1.0}, "bias_tensor"),
    both(PLAIN, like("b_tensor", lambda b: [b[..., 0], None, b[..., 2]]), r"b_tensor\[1\]"),
    both(PLAIN, {"b_tensor": []}, "b_tensor"),
    # shapes and strides
    both(EVERY, like("a_tensor", lambda a: a.flatten()), "a_tensor"),
    both(EVERY, like("a_tensor", lambda a: a[:-128]), "a_tensor"),
    both(EVERY, like("a_tensor", lambda a: a[:, :0]), "a_tensor"),
    both(EVERY, like("a_tensor", transposed), "a_tensor"),
    both(EVERY, like("b_tensor", lambda b: b[:, :-16]), "b_tensor"),
    both(FOUR, like("b_tensor", transposed), "b_tensor"),
    both(EVERY, like("b_tensor", lambda b: b[:2]), "b_tensor", "list_k"),
    both(EVERY, like("b_tensor", lambda b: [*b[:2], b[2][:64]]), r"b_tensor\[2\]", "list_k"),
    both(SCALED, like("sfa_tensor", lambda s: s[:, :, :-1]), "sfa_tensor"),
    both(SCALED, like("sfa_tensor", lambda s: s.contiguous()), "sfa_tensor"),
    both(SCALED, like("sfb_tensor", lambda s: s[..., :2]), "sfb_tensor"),
    both(SCALED, like("sfb_tensor", lambda s: s[:2]), "sfb_tensor", "list_k"),
    both(EVERY, {"alpha_tensor": some(4)}, "alpha_tensor"),
    both(EVERY, {"alpha_tensor": some(6)[::2]}, "alpha_tensor"),
    both(EVERY, {"prob_tensor": some(1024, 1)}, "prob_tensor"),
    both(EVERY, {"prob_tensor": some(768, 1, 1)}, "prob_tensor"),
    both(EVERY, {"prob_tensor": some(1024, 2, 1)[:, :1]}, "prob_tensor"),
    both(EVERY, like("padded_offsets", lambda o: o.view(3, 1)), "padded_offsets"),
    both(EIGHT, {"norm_const_tensor": some(2)}, "norm_const_tensor"),
    both(EVERY, {"bias_tensor": some(192)}, "bias_tensor"),
    both(EVERY, {"bias_tensor": some(3, 192)}, "bias_tensor"),
    both(EVERY, {"bias_tensor": some(3, 128).t()}, "bias_tensor"),
    both(EVERY, {"bias_tensor": some(2, 192).t()}, "bias_tensor"),
    both(EVERY, {"bias_tensor": some(192, 3)}, "bias_tensor"),
    both(EVERY, {"bias_tensor": some(3, 208)[:, :192].t()}, "bias_tensor"),
    both(EVERY, {"bias_tensor": some(192, 3)}, "bias_tensor", "ptrs_k"),
    # alignment
    both(EVERY, like("a_tensor", sliced), "a_tensor"),
    # dtypes
    both(EVERY, like("a_tensor", lambda a: some(*a.shape, dtype=F16)), "a_tensor"),
    both(EVERY, like("b_tensor", lambda b: some(*b.shape, dtype=F16)), "b_tensor"),
    both(EIGHT, like("b_tensor", lambda b: b.view(E5M2)), "b_tensor"),
    both(SCALED, like("sfa_tensor", lambda s: s.view(torch.int8)), "sfa_tensor"),
    both(("S4", "Q4"), like("sfb_tensor", lambda s: s.view(torch.float8_e8m0fnu)), "sfb_tensor"),
    both(EVERY, like("alpha_tensor", lambda x: x.to(BF16)), "alpha_tensor"),
    both(EVERY, like("prob_tensor", lambda x: x.half()), "prob_tensor"),
    both((*PLAIN, *SRELU), like("prob_tensor", lambda x: x.to(BF16)), "prob_tensor"),
    both(EVERY, like("padded_offsets", lambda x: x.long()), "padded_offsets"),
    both(EVERY, like("bias_tensor", lambda x: x.double()), "bias_tensor"),
    both(EIGHT, {"norm_const_tensor": some(1, dtype=F64)}, "norm_const_tensor"),
    # scale formats
    *options(SCALED, "sf_vec_size", 8),
    *options(("S4", "Q4"), "sf_vec_size", 32),
    *options(EIGHT, "sf_vec_size", 16),
    # BF16 operands take no scale controls
    *[both(("SB", "GB"), {f"{x}_tensor": some(512, dtype=torch.uint8)}, f"{x}_tensor") for x in ("sfa", "sfb")],
    both(("SB", "GB"), {"norm_const_tensor": some(1)}, "norm_const_tensor"),
    *options(("SB", "GB"), "sf_vec_size", 32),
    *options(("SB", "GB"), "discrete_col_sfd", True),
    # options
    *options(EVERY, "acc_dtype", BF16),
    *options(EVERY, "m_aligned", 128, None),
    *options(EVERY, "mma_tiler_mn", (64, 256), (256, 64), (256, 256, 1), 256),
    *options(EVERY, "cluster_shape_mn", (1, 1), (2, 3), (8, 1), (4, 1), (0, 1), (2,)),
    *options(WITH_SCALES, "sf_vec_size", "16", 16.0, None),
    *options(WITH_SCALES, "discrete_col_sfd", 1),
    *options(EVERY, "vector_f32", 1),
    *options(EVERY, "use_dynamic_sched", 1),
    *options(EVERY, "b_major", "n", "m", None),
    *options(SRELU, "tanh_clamp_scale", 0, -1.0, math.inf, math.nan, "1"),
    *options(GLU, "act_func", "dswiglu", "", None),
    *options(("GB",), "use_single_group_runtime_offsets", True),
    *options(("G8", "G4"), "use_single_group_runtime_offsets", True, 1),
    *options(GLU, "generate_c", 1, None),
    # a tensor on another device among real ones
    (EVERY, "dense_k", like("prob_tensor", lambda x: x.to("meta")), "prob_tensor", None),
    (EVERY, "list_k", like("b_tensor", lambda b: [b[0], b[1].to("meta"), b[2]]), r"b_tensor\[1\]", None),
]

# Of the wrapper alone: what the class settles in its constructor, has no parameter for or takes in execute, and values.
WRAPPER = [
    (PLAIN, "dense_k", {"b_tensor": None}, "b_tensor"),
    (SCALED, "dense_k", {"b_tensor": None, "sfb_tensor": None}, "b_tensor"),
    (EVERY, "dense_k", {"b_ptrs": torch.zeros(3, dtype=torch.int64)}, "b_tensor"),
    (WITH_SCALES, "dense_k", {"sfb_ptrs": torch.zeros(3, dtype=torch.int64)}, "sfb_ptrs"),
    (EVERY, "dense_k", {"n": 192}, "n"),
    (EVERY, "dense_k", {"b_dtype": torch.uint8}, "b_dtype"),
    (WITH_SCALES, "ptrs_k", {"sfb_tensor": some(512, dtype=torch.uint8)}, "sfb_tensor"),
    (EVERY, "ptrs_k", {"n": None}, "n"),
    (EVERY, "ptrs_k", {"b_dtype": None}, "b_dtype"),
    (EVERY, "ptrs_k", {"n": 0, "bias_tensor": None}, "n"),
    (GLU, "ptrs_k", {"n": 96, "bias_tensor": None}, "n"),
    (EVERY, "ptrs_k", {"n": 128}, "bias_tensor"),
    (EVERY, "ptrs_k", {"n": "96"}, "n"),
    (EVERY, "ptrs_k", {"b_dtype": F16}, "b_dtype"),
    (SCALED, "ptrs_k", {"sfb_ptrs": None}, "sfb_ptrs"),
    (FOUR, "ptrs_k", {"b_major": "n"}, "b_major"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p.int()), "b_ptrs"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p[:2]), "b_ptrs"),
    (EVERY, "ptrs_k", like("b_ptrs", with_value(0, 0)), r"b_ptrs\[0\]"),
    (SCALED, "ptrs_k", like("sfb_ptrs", with_value(2, 8)), r"sfb_ptrs\[2\]"),
    (EVERY, "dense_k", {"cd_major": "m"}, "cd_major"),
    (EVERY, "dense_k", {"cd_major": None}, "cd_major"),
    (FOUR, "dense_k", {"d_dtype": E4M3}, "d_dtype"),
    (PLAIN, "dense_k", {"d_dtype": E5M2}, "d_dtype"),
    (EVERY, "dense_k", {"d_dtype": F64}, "d_dtype"),
    (EVERY, "dense_k", {"d_dtype": "bfloat16"}, "d_dtype"),
    (EIGHT, "dense_k", {"d_dtype": E4M3}, "norm_const_tensor"),
    (WITH_C, "dense_k", {"c_dtype": torch.int32}, "c_dtype"),
    (WITH_C, "dense_k", {"c_dtype": 16}, "c_dtype"),
    (("SB", "GB", "MB"), "dense_k", {"c_dtype": E4M3}, "c_dtype"),
    (("S8", "G8"), "dense_k", {"c_dtype": E4M3, "vector_f32": True}, "vector_f32"),
    (EVERY, "dense_k", {"current_stream": "default"}, "current_stream"),
    (EVERY, "dense_k", like("padded_offsets", with_value(0, 128)), r"padded_offsets\[0\]"),
    (EVERY, "dense_k", like("padded_offsets", with_value(1, 0)), r"padded_offsets\[1\]"),
    (EVERY, "dense_k", like("padded_offsets", with_value(2, 1280)), r"padded_offsets\[2\]"),
    *[(GLU, "dense_k", {"act_func": "geglu", "geglu_alpha": x}, "geglu_alpha") for x in (0, -1.702, math.nan, None)],
    (GLU, "dense_k", {"act_func": "geglu", "glu_clamp_min": 7.0}, "glu_clamp_min"),
    (GLU, "dense_k", {"act_func": "geglu", "glu_clamp_max": math.nan}, "glu_clamp_max"),
    (GLU, "dense_k", {"act_func": "geglu", "linear_offset": math.nan}, "linear_offset"),
    (GLU, "dense_k", {"linear_offset": 1.0}, "linear_offset"),
    *[
        (GLU, "dense_k", {"act_func": "situglu", f"situ_beta{i}": x}, f"situ_beta{i}")
        for i in (1, 2)
        for x in (0.0, -1, math.inf, math.nan, None)
    ],
    # the plain GEMM's own
    (("MB",), "dense_k", lambda t: {"a_tensor": some(1024, 64, 1).to(E4M3)}, "a_tensor"),
    (("MB",), "dense_k", {"generate_c": 1}, "generate_c"),
    (("MB",), "dense_k", {"c_tensor": some(1024, 192, 1)}, "c_tensor"),
    (("MB",), "dense_k", {"c_tensor": some(1024, 160, 1), "generate_c": True}, "c_tensor"),
    (("MB",), "dense_k", {"c_tensor": some(1024, 192, 1), "c_dtype": BF16, "generate_c": True}, "c_dtype"),
    (("MB", "Q8", "Q4"), "dense_k", {"d_tensor": some(1024, 192, 1), "d_dtype": BF16}, "d_dtype"),
    (("MB", "Q8", "Q4"), "dense_k", {"d_tensor": some(768, 192, 1)}, "d_tensor"),
    (("MB", "Q8", "Q4"), "dense_k", {"d_tensor": transposed(some(1024, 192, 1))}, "d_tensor"),
    (("MB", "Q4"), "dense_k", {"d_tensor": some(1024, 192, 1).to(E4M3)}, "d_dtype"),
    (("MB", "Q8", "Q4"), "dense_k", {"d_tensor": some(1024, 192, 1).to("meta")}, "d_tensor"),
    (("MB", "Q8", "Q4"), "dense_k", {"d_tensor": 0}, "d_tensor"),
    (("MB", "Q8", "Q4"), "dense_k", {"d_tensor": some(1024, 192, 1), "alpha_tensor": some(4)}, "alpha_tensor"),
    (("Q8", "Q4"), "dense_k", {"use_single_group_runtime_offsets": True}, "use_single_group_runtime_offsets"),
    (("Q8", "Q4"), "dense_k", {"use_single_group_runtime_offsets": 1}, "use_single_group_runtime_offsets"),
    (("Q8", "Q4"), "dense_k", {"generate_amax": None}, "generate_amax"),
]

# Outputs and discrete parameters of the class: (cases, weights, change of constructor arguments, argument)
CONSTRUCTOR = [
    (("SB", "GB"), "dense_k", {"sample_b": None}, "sample_b"),
    (("S8", "G8"), "dense_k", {"num_experts": 3, "b_shape": (192, 64), "b_dtype": E4M3}, "sample_b"),
    (("S8", "G8"), "dense_k", {"b_shape": (192, 64)}, "b_shape"),
    (("S8", "GB"), "ptrs_k", {"num_experts": None}, "num_experts"),
    (("S8", "GB"), "ptrs_k", {"b_dtype": None}, "b_dtype"),
]
CLASS, CLASS_SCALED = (*SRELU, *GLU), ("S8", "S4", "G8", "G4")
SAMPLES = [
    (CLASS, "ptrs_k", {"num_experts": 4}, "num_experts"),
    (CLASS, "ptrs_k", {"b_shape": (192, 96)}, "b_shape"),
    (CLASS, "ptrs_k", {"b_shape": (128, 64)}, "sample_bias"),
    (GLU, "ptrs_k", {"b_shape": (96, 64), "sample_bias": None}, "b_shape"),
    *[(GLU, "dense_k", {"act_func": "situglu", "situ_beta1": x}, "situ_beta1") for x in (0.0, math.inf, None)],
    (CLASS, "dense_k", {"sample_d": None}, "sample_d"),
    ((*SRELU, "G8", "G4"), "dense_k", {"sample_c": None}, "sample_c"),
    (CLASS, "dense_k", like("sample_d", lambda d: d[:-256]), "sample_d"),
    (CLASS, "dense_k", like("sample_d", lambda d: some(*d.shape, dtype=F64)), "sample_d"),
    (CLASS, "dense_k", like("sample_d", transposed), "sample_d"),
    (GLU, "dense_k", like("sample_d", lambda d: some(1024, 192, 1)), "sample_d"),
    (CLASS, "dense_k", like("sample_c", lambda c: c[:, :64].contiguous()), "sample_c"),
    (("SB", "GB"), "dense_k", like("sample_c", lambda c: c.to(E4M3)), "sample_c"),
    (CLASS_SCALED, "dense_k", like("sample_d_col", lambda d: d.float()), "sample_d_col"),
    (CLASS_SCALED, "dense_k", like("sample_amax", lambda d: d.flatten()), "sample_amax"),
    (CLASS_SCALED, "dense_k", {"sample_sfd_row": some(512, dtype=torch.uint8)}, "sample_sfd_row"),
    (("SB", "GB"), "dense_k", lambda t: {"sample_d_col": t["sample_d"].clone()}, "sample_d_col"),
    (("SB", "GB"), "dense_k", {"sample_amax": some(3, 1)}, "sample_amax"),
]


def rows(table):
    """One test per case and row."""
    return [
        pytest.param(name, weights, change, *rest, id=f"{index}-{name}-{rest[0]}")
        for index, (names, weights, change, *rest) in enumerate(table)
        for name in names
    ]


def apply(arguments, change):
    return {**arguments, **(change(arguments) if callable(change) else change)}


def refused(call, argument):
    with pytest.raises(ValueError) as caught:
        call()
    assert type(caught.value) is ValueError
    assert re.match(rf"{argument}: expected .+, got .+", str(caught.value), re.DOTALL), str(caught.value)


@pytest.fixture(scope="module")
def reference():
    """Problem and result of the working call of each (case, weights)."""
    made = {}

    def get(name, weights):
        if (name, weights) not in made:
            problem = build(Case(**{**CASES[name].__dict__, "weights": weights}))
            made[name, weights] = problem, problem.call()
        return made[name, weights]

    return get


@pytest.mark.parametrize("name, weights, change, argument, class_argument", rows(BOTH))
def test_wrapper(reference, name, weights, change, argument, class_argument):
    problem, result = reference(name, weights)
    refused(lambda: problem.call(**apply(problem.arguments, change)), argument)
    for one, other in zip(problem.call(), result, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name, weights, change, argument", rows(WRAPPER))
def test_wrapper_only(reference, name, weights, change, argument):
    problem, _ = reference(name, weights)
    refused(lambda: problem.call(**apply(problem.arguments, change)), argument)


def class_rows(table):
    return [row for row in rows(table) if CASES[row.values[0]].op in CLASSES]


@pytest.mark.parametrize(
    "name, weights, change, argument, class_argument", class_rows(row for row in BOTH if row[-1] is not None)
)
def test_check_support(reference, name, weights, change, argument, class_argument):
    problem, _ = reference(name, weights)
    bad = build(problem.case)
    bad.arguments = apply(problem.arguments, change)
    refused(lambda: class_call(bad, BF16)[0].check_support(), class_argument)


@pytest.mark.parametrize("name, weights, change, argument", rows(CONSTRUCTOR))
def test_constructor(reference, name, weights, change, argument):
    problem, _ = reference(name, weights)
    refused(lambda: class_call(problem, BF16, **change), argument)


@pytest.mark.parametrize("name, weights, change, argument", rows(SAMPLES))
def test_outputs_and_discrete_parameters(reference, name, weights, change, argument):
    problem, _ = reference(name, weights)
    _, execute, outputs = class_call(problem, BF16)
    samples = {f"sample_{k.removesuffix('_tensor')}": v for k, v in execute.items()}
    operation, _, _ = class_call(problem, BF16, **(change(samples) if callable(change) else change))
    refused(operation.check_support, argument)


FIXED = [
    ("S8", {"k": 96}, "a_tensor"),
    ("S8", {"n": 128}, "b_tensor"),
    ("SB", {"weights": "dense_n"}, "b_tensor"),
    ("GB", {"weights": "list_k"}, "b_tensor"),
    ("GB", {"offsets": (256, 768)}, "b_tensor"),
    ("G8", {"format": "mxfp8_e5m2"}, "a_tensor"),
    ("G8", {"bias": BF16}, "bias_tensor"),
    ("G8", {"bias": None}, "bias_tensor"),
    ("S4", {"weights": "ptrs_k"}, "b_tensor"),
]


@pytest.mark.parametrize("name, change, argument", FIXED)
def test_what_compilation_fixed_is_checked(reference, name, change, argument):
    problem, _ = reference(name, "dense_k")
    operation, execute, outputs = class_call(problem, BF16)
    operation(**execute)
    before = {key: value.clone() for key, value in outputs.items()}
    other = build(Case(**{**problem.case.__dict__, **change}))
    execute = class_call(other, BF16)[1]
    refused(lambda: operation.execute(**{k: v for k, v in execute.items() if k not in ("n", "b_dtype")}), argument)
    assert all(same_bits(outputs[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", CLASS)
def test_execute_validates_again(reference, name):
    problem, _ = reference(name, "dense_k")
    operation, execute, _ = class_call(problem, BF16)
    operation.compile()
    for change, argument in [
        ({"prob_tensor": execute["prob_tensor"].double()}, "prob_tensor"),
        ({"prob_tensor": None}, "prob_tensor"),
        ({"bias_tensor": some(192, 3)}, "bias_tensor"),
        ({"bias_tensor": None}, "bias_tensor"),
        ({"padded_offsets": torch.tensor([128, 256, 768], dtype=torch.int32)}, r"padded_offsets\[0\]"),
        ({"d_tensor": execute["d_tensor"][:256]}, "d_tensor"),
        ({"c_tensor": execute["d_tensor"] if name in SRELU else None}, "d_tensor|c_tensor"),
        ({"current_stream": 1.0}, "current_stream"),
    ]:
        refused(lambda change=change: operation.execute(**{**execute, **change}), argument)
    operation.execute(**execute)
    if name in GLU:
        refused(lambda: operation.execute(**execute, geglu_alpha="1"), "geglu_alpha")
        refused(lambda: operation.execute(**execute, linear_offset=1.0), "linear_offset")


def test_row_scale_is_not_available(reference):
    problem, _ = reference("Q8", "dense_k")
    with pytest.raises(NotImplementedError, match="^row_scale_tensor: "):
        problem.call(row_scale_tensor=some(1024))


def test_the_operators_refuse_a_meta_tensor(reference):
    for operator, n in (("srelu", "SB"), ("glu", "GB"), ("mm", "MB")):
        given = reference(n, "dense_k")[0].arguments
        tensors = given["a_tensor"], [given["b_tensor"]], given["padded_offsets"], given["alpha_tensor"]
        with pytest.raises(RuntimeError, match="prob: expected a tensor on cpu, got meta"):
            getattr(torch.ops.cudnn_grouped, operator)(*tensors, given["prob_tensor"].to("meta"))
