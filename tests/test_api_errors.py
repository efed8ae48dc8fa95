"""Malformed calls of both layers: the exception's type, and the argument's name at the head of its text.

The rows follow the error tables of the contracts, as far as the package keeps them. Each row changes the arguments of a
call that works. After every refusal the working call gives the same bits as before.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from api_problem import (
    CASES,
    CLASSES,
    buffers,
    call_wrapper,
    class_arguments,
    same_bits,
    wrapper_arguments,
)

S8, S4, GB, G8, G4 = "dsrelu_mxfp8", "dsrelu_fp4", "dglu_bf16", "dglu_mxfp8", "dglu_fp4"
SCALED, GLU, EVERY = (S8, S4, G8, G4), (GB, G8, G4), (S8, S4, GB, G8, G4)
MASKED = {"act_func": "dgeglu", "clamp_grad": "mask"}


def some(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def like(name, change):
    return lambda arguments: {name: change(arguments[name])}


def sliced(tensor):
    """The same values one element further in memory: aligned to the element only."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    room.view(raw).copy_(tensor.contiguous().view(raw).flatten())
    return room.view(tensor.shape)


def second_sliced(scales):
    return [scales[0], sliced(scales[1].permute(5, 2, 4, 0, 1, 3)), scales[2]]


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


def cut_columns(tensor):
    return tensor[:, :-16]


def padded_copy(tensor):
    """A view into wider rows."""
    wide = torch.zeros(tensor.shape[0], tensor.shape[1] + 16, *tensor.shape[2:], dtype=tensor.dtype)
    return wide[:, : tensor.shape[1]]


def options(names, option, *values, **others):
    """A row for each bad value of an option, which both layers spell alike."""
    return [(names, "dense_k", {**others, option: value}, option, option) for value in values]


# (cases, weights, change: dict or function of the arguments, the wrapper's argument, the class's or None: no error there)
BOTH = [
    # required tensors
    *[(EVERY, "dense_k", {f"{x}_tensor": None}, f"{x}_tensor", f"sample_{x}") for x in ("a", "c", "alpha", "prob")],
    (EVERY, "dense_k", {"padded_offsets": None}, "padded_offsets", "sample_padded_offsets"),
    (GLU, "dense_k", {"beta_tensor": None}, "beta_tensor", "sample_beta"),
    (SCALED, "dense_k", {"sfa_tensor": None}, "sfa_tensor", "sample_sfa"),
    (SCALED, "dense_k", {"sfb_tensor": None}, "sfb_tensor", "sample_sfb"),
    ((S8, G8), "dense_k", {"norm_const_tensor": None}, "norm_const_tensor", "sample_norm_const"),
    (EVERY, "dense_k", {"a_tensor": np.ones((256, 32))}, "a_tensor", "sample_a"),
    (EVERY, "dense_k", {"prob_tensor": 1.0}, "prob_tensor", "sample_prob"),
    (EVERY, "dense_k", {"c_tensor": torch.eye(256).to_sparse()}, "c_tensor", "sample_c"),
    ((S8, GB), "dense_k", like("b_tensor", lambda b: [b, None]), r"b_tensor\[1\]", r"sample_b\[1\]"),
    ((S8, GB), "dense_k", {"b_tensor": []}, "b_tensor", "sample_b"),
    # shapes
    (EVERY, "dense_k", like("a_tensor", lambda a: a.flatten()), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("a_tensor", lambda a: a[:-128]), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("a_tensor", lambda a: a[:, :0]), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("c_tensor", lambda c: c[:-256]), "c_tensor", "sample_c"),
    (EVERY, "dense_k", like("c_tensor", lambda c: c[:, :64].contiguous()), "c_tensor", "sample_c"),
    (EVERY, "dense_k", like("b_tensor", cut_columns), "b_tensor", "sample_b"),
    (EVERY, "dense_k", like("b_tensor", lambda b: b[..., :2]), "b_tensor", "sample_b"),
    (EVERY, "list_k", like("b_tensor", lambda b: b[:2]), "b_tensor", "sample_b"),
    (EVERY, "list_k", like("b_tensor", lambda b: [*b[:2], b[2][:64]]), r"b_tensor\[2\]", r"sample_b\[2\]"),
    (SCALED, "dense_k", like("sfa_tensor", lambda s: s[:, :, :-1]), "sfa_tensor", "sample_sfa"),
    (SCALED, "dense_k", like("sfb_tensor", lambda s: s[..., :2]), "sfb_tensor", "sample_sfb"),
    (SCALED, "list_k", like("sfb_tensor", lambda s: s[:2]), "sfb_tensor", "sample_sfb"),
    (EVERY, "dense_k", {"alpha_tensor": some(4)}, "alpha_tensor", "sample_alpha"),
    (EVERY, "dense_k", {"alpha_tensor": some(3, 1)}, "alpha_tensor", "sample_alpha"),
    (GLU, "dense_k", {"beta_tensor": some(2)}, "beta_tensor", "sample_beta"),
    (EVERY, "dense_k", {"prob_tensor": some(1024, 1)}, "prob_tensor", "sample_prob"),
    (EVERY, "dense_k", {"prob_tensor": some(768, 1, 1)}, "prob_tensor", "sample_prob"),
    (EVERY, "dense_k", like("padded_offsets", lambda o: o.view(3, 1)), "padded_offsets", "sample_padded_offsets"),
    (EVERY, "dense_k", like("padded_offsets", lambda o: o[:0]), "padded_offsets", "sample_padded_offsets"),
    (
        EVERY,
        "dense_k",
        {"padded_offsets": torch.zeros(1025, dtype=torch.int32)},
        "padded_offsets",
        "sample_padded_offsets",
    ),
    ((S8, G8), "dense_k", {"norm_const_tensor": some(2)}, "norm_const_tensor", "sample_norm_const"),
    # strides
    (EVERY, "dense_k", like("a_tensor", transposed), "a_tensor", "sample_a"),
    ((S4, G4), "dense_k", like("b_tensor", transposed), "b_tensor", "sample_b"),
    (EVERY, "dense_k", like("b_tensor", padded_copy), "b_tensor", "sample_b"),
    (
        (S8, GB),
        "list_k",
        like("b_tensor", lambda b: [b[0], transposed(b[1]), b[2]]),
        r"b_tensor\[1\]",
        r"sample_b\[1\]",
    ),
    (EVERY, "dense_k", like("c_tensor", transposed), "c_tensor", "sample_c"),
    (SCALED, "dense_k", like("sfa_tensor", lambda s: s.contiguous()), "sfa_tensor", "sample_sfa"),
    (SCALED, "dense_k", like("sfb_tensor", lambda s: s.contiguous()), "sfb_tensor", "sample_sfb"),
    (EVERY, "dense_k", {"alpha_tensor": some(6)[::2]}, "alpha_tensor", "sample_alpha"),
    (EVERY, "dense_k", {"prob_tensor": some(1024, 2, 1)[:, :1]}, "prob_tensor", "sample_prob"),
    # alignment
    (EVERY, "dense_k", like("a_tensor", sliced), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("c_tensor", sliced), "c_tensor", "sample_c"),
    (SCALED, "list_k", like("sfb_tensor", second_sliced), r"sfb_tensor\[1\]", r"sample_sfb\[1\]"),
    # dtypes
    (EVERY, "dense_k", like("a_tensor", lambda a: some(*a.shape, dtype=torch.float16)), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("a_tensor", lambda a: some(*a.shape, dtype=torch.int8)), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("b_tensor", lambda b: some(*b.shape, dtype=torch.float16)), "b_tensor", "sample_b"),
    ((S8, G8), "dense_k", like("b_tensor", lambda b: b.view(torch.float8_e5m2)), "b_tensor", "sample_b"),
    ((S8,), "dense_k", like("a_tensor", lambda a: a.to(torch.float32)), "a_tensor", "sample_a"),
    (EVERY, "dense_k", like("c_tensor", lambda c: c.to(torch.float64)), "c_tensor", "sample_c"),
    ((GB,), "dense_k", like("c_tensor", lambda c: c.to(torch.float8_e4m3fn)), "c_tensor", "sample_c"),
    (SCALED, "dense_k", like("sfa_tensor", lambda s: s.view(torch.int8)), "sfa_tensor", "sample_sfa"),
    ((S4,), "dense_k", like("sfb_tensor", lambda s: s.view(torch.float8_e8m0fnu)), "sfb_tensor", "sample_sfb"),
    (EVERY, "dense_k", like("alpha_tensor", lambda x: x.to(torch.bfloat16)), "alpha_tensor", "sample_alpha"),
    (GLU, "dense_k", like("beta_tensor", lambda x: x.double()), "beta_tensor", "sample_beta"),
    (EVERY, "dense_k", like("prob_tensor", lambda x: x.half()), "prob_tensor", "sample_prob"),
    (EVERY, "dense_k", like("padded_offsets", lambda x: x.long()), "padded_offsets", "sample_padded_offsets"),
    (
        (S8, G8),
        "dense_k",
        {"norm_const_tensor": some(1, dtype=torch.float64)},
        "norm_const_tensor",
        "sample_norm_const",
    ),
    # scale formats
    *options(SCALED, "sf_vec_size", 8),
    *options((S4,), "sf_vec_size", 32),
    *options((S8, G8), "sf_vec_size", 16),
    ((S8, G8), "dense_k", like("sfa_tensor", lambda s: s.view(torch.float8_e4m3fn)), "sfb_tensor", "sample_sfb"),
    # BF16 operands take no scale controls
    ((GB,), "dense_k", {"sfa_tensor": some(512, dtype=torch.uint8)}, "sfa_tensor", "sample_sfa"),
    ((GB,), "dense_k", {"sfb_tensor": some(512, dtype=torch.uint8)}, "sfb_tensor", "sample_sfb"),
    ((GB,), "dense_k", {"norm_const_tensor": some(1)}, "norm_const_tensor", "sample_norm_const"),
    *options((GB,), "sf_vec_size", 32),
    *options((GB,), "discrete_col_sfd", True),
    *options((GB,), "epilogue_op", "relu"),
    # options
    *options(EVERY, "acc_dtype", torch.bfloat16),
    *options(EVERY, "m_aligned", 128, None),
    *options(EVERY, "mma_tiler_mn", (64, 256), (256, 64), (256, 256, 1), 256, ("256", 256)),
    *options(GLU, "mma_tiler_mn", (256, 128)),
    *options(EVERY, "cluster_shape_mn", (1, 1), (2, 3), (8, 1), (4, 1), (2, 8), (0, 1), (2,)),
    *options(EVERY, "cluster_shape_mn", (4, 1), mma_tiler_mn=(128, 256)),
    *options(EVERY, "sf_vec_size", "16", 16.0, None, True, 2**70),
    *options(EVERY, "discrete_col_sfd", 1),
    *options(EVERY, "vector_f32", 1),
    *options(EVERY, "use_dynamic_sched", 1),
    *options(EVERY, "deterministic", 1),
    *options(EVERY, "b_major", "n", "m", None),
    (
        SCALED,
        "dense_k",
        lambda t: {"c_tensor": t["c_tensor"].to(torch.float8_e5m2), "vector_f32": True},
        *("vector_f32", "vector_f32"),
    ),
    # dsReLU's own
    *options((S8, S4), "tanh_clamp_scale", 0, -1.0, math.inf, math.nan, "1"),
    *options((S8,), "c_role", "gradient", None),
    # dGLU's own
    *options(GLU, "act_func", "swiglu", "", None),
    *options((G8, G4), "situ_beta1", 0.0, -1, math.inf, math.nan, None, act_func="dsituglu"),
    *options((G8, G4), "situ_beta2", 0.0, -1, math.inf, math.nan, None, act_func="dsituglu"),
    *options(GLU, "geglu_alpha", 0, -1.702, math.nan, math.inf, None, 10**400, **MASKED),
    *options(GLU, "glu_clamp_min", 7.0, **MASKED),
    *options(GLU, "glu_clamp_max", math.nan, **MASKED),
    *options(GLU, "linear_offset", math.nan, **MASKED),
    *options(GLU, "linear_offset", 1.0),
    *options(GLU, "clamp_grad", "none"),
    *options((GB,), "clamp_grad", "value"),
    *options((G8,), "clamp_grad", "value", act_func="dgeglu"),
    *options((G8, G4), "epilogue_op", "gelu", "", 0),
    *options((G8, GB), "use_single_group_runtime_offsets", True),
    # a tensor on another device among real ones
    (EVERY, "dense_k", like("prob_tensor", lambda x: x.to("meta")), "prob_tensor", None),
    (EVERY, "list_k", like("b_tensor", lambda b: [b[0], b[1].to("meta"), b[2]]), r"b_tensor\[1\]", None),
]

# Of the wrapper alone: what the class settles in its constructor or has no parameter for, and values.
WRAPPER = [
    (EVERY, "dense_k", {"b_tensor": None, "sfb_tensor": None}, "b_tensor"),
    (EVERY, "dense_k", {"b_ptrs": torch.zeros(3, dtype=torch.int64)}, "b_tensor"),
    (EVERY, "dense_k", {"sfb_ptrs": torch.zeros(3, dtype=torch.int64)}, "sfb_ptrs"),
    (EVERY, "dense_k", {"n": 96}, "n"),
    (EVERY, "dense_k", {"b_dtype": torch.uint8}, "b_dtype"),
    (EVERY, "ptrs_k", {"sfb_tensor": some(512, dtype=torch.uint8)}, "sfb_tensor"),
    (EVERY, "ptrs_k", {"n": None}, "n"),
    (EVERY, "ptrs_k", {"b_dtype": None}, "b_dtype"),
    (SCALED, "ptrs_k", {"sfb_ptrs": None}, "sfb_ptrs"),
    ((GB,), "ptrs_k", {"sfb_ptrs": torch.zeros(3, dtype=torch.int64)}, "sfb_ptrs"),
    (EVERY, "ptrs_k", {"n": 0}, "n"),
    (EVERY, "ptrs_k", {"n": 64}, "c_tensor"),
    (EVERY, "ptrs_k", {"n": "96"}, "n"),
    (GLU, "ptrs_k", {"n": 48}, "n"),
    (EVERY, "ptrs_k", {"b_dtype": torch.float16}, "b_dtype"),
    ((S8, G8), "ptrs_k", {"b_dtype": torch.float8_e5m2}, "b_dtype"),
    (EVERY, "ptrs_k", {"b_dtype": "bfloat16"}, "b_dtype"),
    (EVERY, "ptrs_k", {"b_major": "m"}, "b_major"),
    ((S4, G4), "ptrs_k", {"b_major": "n"}, "b_major"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p.int()), "b_ptrs"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p[:2]), "b_ptrs"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p.view(3, 1)), "b_ptrs"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p.repeat_interleave(2)[::2]), "b_ptrs"),
    (EVERY, "ptrs_k", like("b_ptrs", with_value(0, 0)), r"b_ptrs\[0\]"),
    (EVERY, "ptrs_k", like("b_ptrs", lambda p: p + torch.tensor([0, 0, 8])), r"b_ptrs\[2\]"),
    (EVERY, "ptrs_k", {"b_ptrs": [1, 2, 3]}, "b_ptrs"),
    (SCALED, "ptrs_k", like("sfb_ptrs", with_value(2, 0)), r"sfb_ptrs\[2\]"),
    (SCALED, "ptrs_k", like("sfb_ptrs", lambda p: p.float()), "sfb_ptrs"),
    (EVERY, "dense_k", {"cd_major": "m"}, "cd_major"),
    (EVERY, "dense_k", {"cd_major": None}, "cd_major"),
    ((S4, G4), "dense_k", {"d_dtype": torch.float8_e4m3fn}, "d_dtype"),
    ((GB,), "dense_k", {"d_dtype": torch.float8_e5m2}, "d_dtype"),
    (EVERY, "dense_k", {"d_dtype": torch.float64}, "d_dtype"),
    (EVERY, "dense_k", {"d_dtype": torch.int8}, "d_dtype"),
    (EVERY, "dense_k", {"d_dtype": "bfloat16"}, "d_dtype"),
    (EVERY, "dense_k", {"generate_dbias": 1}, "generate_dbias"),
    (EVERY, "dense_k", {"generate_dbias": None}, "generate_dbias"),
    (EVERY, "dense_k", {"dprob_tensor": some(768, 1, 1)}, "dprob_tensor"),
    (EVERY, "dense_k", {"dprob_tensor": some(1024, 1, 1, dtype=torch.float64)}, "dprob_tensor"),
    (EVERY, "dense_k", {"dprob_tensor": some(2048, 1, 1)[::2]}, "dprob_tensor"),
    (EVERY, "dense_k", {"dprob_tensor": some(1024, 1, 1).to("meta")}, "dprob_tensor"),
    (EVERY, "dense_k", {"dprob_tensor": 0.0}, "dprob_tensor"),
    (EVERY, "dense_k", {"current_stream": "default"}, "current_stream"),
    # values of the offsets
    (EVERY, "dense_k", like("padded_offsets", with_value(0, 128)), r"padded_offsets\[0\]"),
    (EVERY, "dense_k", like("padded_offsets", with_value(1, 0)), r"padded_offsets\[1\]"),
    (EVERY, "dense_k", like("padded_offsets", with_value(2, 1280)), r"padded_offsets\[2\]"),
    (EVERY, "dense_k", like("padded_offsets", with_value(0, -256)), r"padded_offsets\[0\]"),
]

# Whole rows of 16 bytes, and N of dGLU: other cases than the small ones.
SIZES = [
    (replace(CASES[S8], k=24), "a_tensor"),
    (replace(CASES[S4], k=48), "a_tensor"),
    (replace(CASES[GB], k=12), "a_tensor"),
    (replace(CASES[S8], n=4, d="f32"), "c_tensor"),
    (replace(CASES[S8], n=8, c="f32"), "d_dtype"),
    (replace(CASES[S8], n=8, c="e4m3", d="f32"), "c_tensor"),
    (replace(CASES[S8], n=24, d="bf16", weights="dense_n"), "b_tensor"),
    (replace(CASES[S8], n=24, d="bf16", weights="ptrs_n"), "n"),
    (replace(CASES[GB], n=64, offsets=(512,), m=640), "a_tensor"),
]

# Outputs and discrete parameters of the class: (case, weights, change of constructor arguments, argument)
CONSTRUCTOR = [
    (EVERY, "dense_k", {"sample_b": None, "sample_sfb": None}, "sample_b"),
    (EVERY, "dense_k", {"num_experts": 3, "b_shape": (96, 64), "b_dtype": torch.uint8}, "sample_b"),
    (EVERY, "dense_k", {"b_shape": (96, 64)}, "b_shape"),
    (EVERY, "dense_k", {"b_dtype": torch.uint8}, "b_dtype"),
    (EVERY, "ptrs_k", {"num_experts": None}, "num_experts"),
    (EVERY, "ptrs_k", {"b_shape": None}, "b_shape"),
    (EVERY, "ptrs_k", {"b_dtype": None}, "b_dtype"),
    (EVERY, "ptrs_k", {"sample_sfb": some(512, dtype=torch.uint8)}, "sample_sfb"),
]
SAMPLES = [
    (EVERY, "ptrs_k", {"num_experts": 4}, "num_experts"),
    (EVERY, "ptrs_k", {"num_experts": 0}, "num_experts"),
    (EVERY, "ptrs_k", {"num_experts": 3.0}, "num_experts"),
    (EVERY, "ptrs_k", {"b_shape": (96, 128)}, "b_shape"),
    (EVERY, "ptrs_k", {"b_shape": (0, 64)}, "b_shape"),
    (EVERY, "ptrs_k", {"b_shape": 96}, "b_shape"),
    (GLU, "ptrs_k", {"b_shape": (48, 64)}, "b_shape"),
    (EVERY, "ptrs_k", {"b_dtype": torch.float16}, "b_dtype"),
    ((S4, G4), "ptrs_k", {"b_major": "n"}, "b_major"),
    (EVERY, "dense_k", {"sample_d_row": None}, "sample_d_row"),
    (EVERY, "dense_k", {"sample_dprob": None}, "sample_dprob"),
    *[((S8, G8), "dense_k", {f"sample_{x}": None}, f"sample_{x}") for x in ("d_col", "sfd_row", "sfd_col")],
    *[
        ((S4, G4), "dense_k", {f"sample_{x}": some(512, dtype=torch.uint8)}, f"sample_{x}")
        for x in ("sfd_row", "sfd_col")
    ],
    ((GB,), "dense_k", like("sample_d_row", lambda d: {"d": d}), "sample_d_row"),
    (EVERY, "dense_k", like("sample_d_row", lambda d: d[:-256]), "sample_d_row"),
    (EVERY, "dense_k", like("sample_d_row", lambda d: torch.zeros(d.shape, dtype=torch.float64)), "sample_d_row"),
    (
        (GB, S4, G4),
        "dense_k",
        like("sample_d_row", lambda d: torch.zeros(d.shape, dtype=torch.float8_e4m3fn)),
        "sample_d_row",
    ),
    (EVERY, "dense_k", like("sample_d_row", transposed), "sample_d_row"),
    (SCALED, "dense_k", like("sample_d_col", lambda d: torch.zeros(d.shape, dtype=torch.float32)), "sample_d_col"),
    (SCALED, "dense_k", like("sample_d_col", lambda d: d[:, :-16]), "sample_d_col"),
    (EVERY, "dense_k", like("sample_dprob", lambda d: d[:-256]), "sample_dprob"),
    (EVERY, "dense_k", like("sample_dprob", lambda d: d.double()), "sample_dprob"),
    (EVERY, "dense_k", like("sample_dbias", lambda d: d.float()), "sample_dbias"),
    (EVERY, "dense_k", like("sample_dbias", lambda d: d[:2]), "sample_dbias"),
    (EVERY, "dense_k", like("sample_dbias", lambda d: d[..., 0]), "sample_dbias"),
    (SCALED, "dense_k", like("sample_amax", lambda d: d.half()), "sample_amax"),
    (SCALED, "dense_k", like("sample_amax", lambda d: d.flatten()), "sample_amax"),
    ((S8, G8), "dense_k", like("sample_sfd_row", lambda s: s.view(torch.float8_e4m3fn)), "sample_sfd_row"),
    ((S8, G8), "dense_k", like("sample_sfd_col", lambda s: s.contiguous()), "sample_sfd_col"),
    ((S8,), "dense_k", like("sample_sfd_col", lambda s: s[:, :, :, :, :1]), "sample_sfd_col"),
    ((GB,), "dense_k", lambda t: {"sample_d_col": t["sample_d_row"].clone()}, "sample_d_col"),
    ((GB,), "dense_k", {"sample_amax": some(3, 2, 1)}, "sample_amax"),
    ((GB,), "dense_k", {"sample_sfd_row": some(512, dtype=torch.uint8)}, "sample_sfd_row"),
]


def rows(table):
    """One test per case and row."""
    return [
        pytest.param(name, weights, change, *rest, id=f"{index}-{name}-{rest[0]}")
        for index, (names, weights, change, *rest) in enumerate(table)
        for name in names
    ]


def changed(arguments, change):
    return arguments | (change(arguments) if callable(change) else change)


def refused(call, argument):
    with pytest.raises(ValueError) as caught:
        call()
    assert type(caught.value) is ValueError
    assert re.match(rf"{argument}: expected .+, got .+", str(caught.value), re.DOTALL), str(caught.value)


@pytest.fixture(scope="module")
def reference():
    """Arguments and result of the working call of each (case, weights)."""
    made = {}

    def get(name, weights):
        if (name, weights) not in made:
            arguments = wrapper_arguments(replace(CASES[name], weights=weights, dbias=True))
            made[name, weights] = arguments, call_wrapper(arguments)
        return made[name, weights]

    return get


def still_works(reference, name, weights):
    arguments, result = reference(name, weights)
    for one, other in zip(call_wrapper(arguments), result, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name, weights, change, argument, class_argument", rows(BOTH))
def test_wrapper(reference, name, weights, change, argument, class_argument):
    arguments, _ = reference(name, weights)
    refused(lambda: call_wrapper(changed(arguments, change)), argument)
    still_works(reference, name, weights)


@pytest.mark.parametrize("name, weights, change, argument", rows(WRAPPER))
def test_wrapper_only(reference, name, weights, change, argument):
    arguments, _ = reference(name, weights)
    refused(lambda: call_wrapper(changed(arguments, change)), argument)
    still_works(reference, name, weights)


@pytest.mark.parametrize("name, weights, change, argument, class_argument", rows(r for r in BOTH if r[-1]))
def test_check_support(reference, name, weights, change, argument, class_argument):
    arguments, _ = reference(name, weights)
    samples, _ = class_arguments(changed(arguments, change), buffers(arguments.case))
    refused(lambda: CLASSES[arguments.case.op](**samples).check_support(), class_argument)


@pytest.mark.parametrize("name, weights, change, argument", rows(CONSTRUCTOR))
def test_constructor(reference, name, weights, change, argument):
    arguments, _ = reference(name, weights)
    samples, _ = class_arguments(arguments, buffers(arguments.case))
    refused(lambda: CLASSES[arguments.case.op](**{**samples, **change}), argument)


@pytest.mark.parametrize("name, weights, change, argument", rows(SAMPLES))
def test_outputs_and_discrete_parameters(reference, name, weights, change, argument):
    arguments, _ = reference(name, weights)
    samples, _ = class_arguments(arguments, buffers(arguments.case))
    samples |= change(samples) if callable(change) else change
    operation = CLASSES[arguments.case.op](**samples)
    refused(operation.check_support, argument)


@pytest.mark.parametrize("case, argument", SIZES, ids=str)
def test_sizes(case, argument):
    refused(lambda: call_wrapper(wrapper_arguments(case)), argument)


@pytest.mark.parametrize("name", EVERY)
def test_execute_refuses_overlap(reference, name):
    arguments, _ = reference(name, "dense_k")
    samples, execute = class_arguments(arguments, buffers(arguments.case))
    operation = CLASSES[arguments.case.op](**samples)
    operation.compile()
    shared = execute["prob_tensor"]
    refused(lambda: operation.execute(**{**execute, "dprob_tensor": shared}), "dprob_tensor")
    operation.execute(**execute)


def test_fp8_hint_names_the_vector_size(reference):
    arguments, _ = reference(S8, "dense_k")
    with pytest.raises(ValueError, match="sf_vec_size=32"):
        call_wrapper(arguments.without("sf_vec_size"))


def test_the_operator_alone_raises_runtime_errors(reference):
    arguments, _ = reference(S8, "dense_k")
    built = arguments.built
    with pytest.raises(RuntimeError, match="^sf_vec_size: expected"):
        torch.ops.cudnn_grouped.dsrelu(*built.positional, **{**built.keywords, "sf_vec_size": 16})
    positional = [*built.positional[:-1], built.positional[-1].to("meta")]
    with pytest.raises(RuntimeError, match="prob: expected a tensor on cpu, got meta"):
        torch.ops.cudnn_grouped.dsrelu(*positional, **built.keywords)


def test_a_stale_verdict_is_not_taken_for_another_error(reference):
    arguments, _ = reference(S8, "dense_k")
    built = arguments.built
    with pytest.raises(RuntimeError, match="^sf_vec_size: "):
        torch.ops.cudnn_grouped.dsrelu(*built.positional, **{**built.keywords, "sf_vec_size": 16})
    leaf = torch.zeros(built.case.rows, 1, 1, requires_grad=True)  # torch refuses to add onto it in place
    with pytest.raises(RuntimeError, match="leaf"):
        call_wrapper(arguments | {"dprob_tensor": leaf})
