"""Weights that the caller has dequantised: BF16 B without scale factors beside a block-scaled A. The oracle's numbers and
the bits of the quantised weights."""

from dataclasses import replace

import cases
import cases_forward as forward
import pytest
import torch
from cases import FP4, raw
from pairwise import pairwise

BACKWARD = ("dsrelu", "dglu")
OPTIONS = {
    "op": ["dsrelu", "dglu", "srelu", "glu", "mm"],
    "operands": [("e4m3", "e8m0", 32), ("e5m2", "e8m0", 32), ("fp4", "e4m3", 16), ("uint8", "e8m0", 16), ("fp4", "e8m0", 32)],
    "offsets": [((256, 512), None), ((0, 256, 256, 512, 512), 768)],
    "n": [64, 192, 320],
    "k": [32, 160, 288],
    "d": ["bf16", "f32", "e4m3", "e5m2"],
    "weights": ["dense_k", "list_k", "ptrs_k"],
    "rank": [2, 3],
    "form": ["functional", "out"],
    "poison": [False, True],
    "extras": [False, True],  # dbias, bias
}  # fmt: skip


def case_of(choice: dict):
    options = {name: choice[name] for name in ("n", "k", "d", "weights", "rank", "form", "poison")}
    options["ab"], options["sf"], options["vec"] = choice["operands"]
    options["offsets"], options["m"] = choice["offsets"]
    if choice["op"] in BACKWARD:
        return cases.Case(choice["op"], dequantized=True, dbias=choice["extras"], **options)
    bias = "bf16" if choice["extras"] else None
    return forward.Case(choice["op"], dequantized=True, bias=bias, prob=choice["extras"], **options)


def allowed(choice: dict) -> bool:
    return not (choice["d"] in ("e4m3", "e5m2") and choice["operands"][0] in FP4)


CASES = [case_of(choice) for choice in pairwise(OPTIONS, allowed)]


def suite_of(case):
    return cases if case.op in BACKWARD else forward


def exact(case):
    return suite_of(case).exact(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_oracle(case):
    """Exact and random data."""
    suite_of(case).run(case)
    suite_of(case).run(exact(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_quantised_weights(case):
    """Every output, to the bit."""
    results = []
    for dequantized in (False, True):
        built = suite_of(case).build(replace(case, dequantized=dequantized))
        results.append(suite_of(case).call(built)[0])
    for name, quantised in results[0].items():
        assert torch.equal(raw(quantised), raw(results[1][name])), name


# Columns that end within a block of 32: D in BF16 has no other.
@pytest.mark.parametrize("weights", ["dense_k", "list_k"])
@pytest.mark.parametrize("op", ["dsrelu", "srelu", "mm"])
def test_tails_of_columns(op, weights):
    for n in (8, 40, 72, 200):
        if op == "dsrelu":
            cases.run(cases.Case(op, dequantized=True, n=n, weights=weights))
        else:
            forward.run(forward.Case(op, dequantized=True, n=n, weights=weights, generate_c=False))


# Errors ----------------------------------------------------------------------------------------------------------


def arguments_of(**changes):
    """The arguments of an mm with dequantised weights."""
    return forward.build(forward.Case("mm", dequantized=True, offsets=(256, 512), **changes)).arguments


def other_layout(b):
    return (
        b.transpose(0, 1).contiguous().transpose(0, 1)
        if b.dim() == 2
        else b.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    )


ERRORS = {
    "scales": ({}, lambda a: {"sfb": [a["sfa"]]}, r"b: .*or bfloat16 without sfb, got bfloat16 with it"),
    "scale pointers": (
        {"weights": "ptrs_k"},
        lambda a: {"sfb_ptrs": a["b_ptrs"]},
        r"b_dtype: expected the dtype of a, float8_e4m3fn, or bfloat16 without sfb_ptrs, got bfloat16 with it",
    ),
    "n-major": ({}, lambda a: {"b": [other_layout(a["b"][0])]}, r"b: expected strides .* \(K-major\), got"),
    "n-major list": (
        {"weights": "list_k"},
        lambda a: {"b": [other_layout(b) for b in a["b"]]},
        r"b\[0\]: expected strides .* \(K-major\), got",
    ),
    "n-major pointers": (
        {"weights": "ptrs_k"},
        lambda a: {"b_major": "n"},
        r"b_major: expected K-major dequantised weights, got N-major",
    ),
    "fp16": (
        {},
        lambda a: {"b": [a["b"][0].half()]},
        r"b: expected the dtype of a, float8_e4m3fn, or bfloat16 without sfb, got float16",
    ),
    "one of a list": (
        {"weights": "list_k"},
        lambda a: {"b": [a["b"][0], a["b"][1].half()]},
        r"b\[1\]: expected dtype bfloat16, got float16",
    ),
    "packed k": (
        {"ab": "fp4", "sf": "e4m3", "vec": 16},
        lambda a: {"b": [a["b"][0][:, : a["b"][0].shape[1] // 2].contiguous()]},
        r"b: expected shape \(N, K, L\) = \(64, 64, 2\), got shape \(64, 32, 2\)",
    ),
    "columns": (
        {"n": 80},
        lambda a: {"d_dtype": torch.float8_e4m3fn, "norm_const": torch.ones(1)},
        r"b: expected N a multiple of 32 with dequantised weights and an FP8 D, got 80",
    ),
    "columns of pointers": (
        {"n": 80, "weights": "ptrs_k"},
        lambda a: {"d_dtype": torch.float8_e4m3fn, "norm_const": torch.ones(1)},
        r"n: expected N a multiple of 32 with dequantised weights and an FP8 D, got 80",
    ),
    "quantised b, bf16 a": (
        {},
        lambda a: {"a": a["a"].bfloat16(), "b": [a["b"][0].to(torch.float8_e4m3fn)], "sfa": None, "sf_vec_size": 16},
        r"b: expected the dtype of a, bfloat16, got float8_e4m3fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    case, change, message = ERRORS[name]
    arguments = arguments_of(**case)
    forward.invoke("mm", arguments)
    with pytest.raises(RuntimeError, match=message):
        forward.invoke("mm", {**arguments, **change(arguments)})


def test_weights_that_need_gradients():
    """Block-scaled operands are constants, and so are these: an error, and not a missing gradient."""
    arguments = arguments_of()
    arguments["b"] = [arguments["b"][0].requires_grad_()]
    with pytest.raises(RuntimeError, match=r"b: expected tensors that need no gradient with a block-scaled a, got one"):
        forward.invoke("mm", arguments)
