"""Gradients of srelu, glu and mm against torch autograd in FP64 on the same numbers (autograd_reference.py)."""

from itertools import product

import autograd_reference as reference
import pytest
import torch
from autograd_reference import BF16, F16, F32, GLU, SRELU, Case

ALL = (*SRELU, *GLU, "mm")
WEIGHTS = ("dense_k", "dense_n", "list_k", "list_n")


def check(case: Case):
    inputs = reference.build(case)
    reference.check(inputs, *reference.run(inputs))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("bias", [None, F32], ids=["", "bias"])
@pytest.mark.parametrize("activation", ALL)
def test_weights(activation, bias, weights):
    check(Case(activation, bias, weights))


@pytest.mark.parametrize("through", ["c", "dc"])
@pytest.mark.parametrize("bias", [None, BF16], ids=["", "bias"])
@pytest.mark.parametrize("activation", ALL)
def test_through_c(activation, bias, through):
    check(Case(activation, bias, through=through))


OTHERS = [
    Case(activation, bias, **options)
    for activation, bias in product(("srelu", "swiglu", "mm"), (None, F32))
    for options in (
        {"alpha": False, "prob": False},
        {"rank": 3, "through": "dc"},
        {"c_dtype": F32, "d_dtype": F32, "through": "dc"},
        {"c_dtype": F16, "d_dtype": F16, "through": "dc"},
    )
]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_arguments(case):
    check(case)


@pytest.mark.parametrize("bias", [None, F32], ids=["", "bias"])
@pytest.mark.parametrize("activation", ["srelu", "swiglu", "mm"])
@pytest.mark.parametrize("scaled", ["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"])
def test_block_scaled(scaled, activation, bias):
    """prob and bias have gradients, the operands have none."""
    case = Case(activation, bias, scaled=scaled)
    inputs = reference.build(case)
    c, got = reference.run(inputs)
    reference.check(inputs, c, got)
    assert list(got) == (["prob"] if bias is None else ["prob", "bias"])


def test_block_scaled_operands_are_constants():
    inputs = reference.build(Case("srelu", scaled="mxfp8"))
    a, b = inputs.positional[0].requires_grad_(), inputs.positional[1][0].requires_grad_()
    reference.call(inputs)[1].sum().backward()
    assert a.grad is None and b.grad is None
    assert inputs.leaves["prob"].grad.any()


@pytest.mark.parametrize("activation", ["srelu", "swiglu", "mm"])
def test_fp8_output_is_a_constant(activation):
    """No gradient flows through quantised values; C beside them has its own."""
    case = Case(activation, F32, scaled="mxfp8", d_dtype=torch.float8_e4m3fn, through="c")
    inputs = reference.build(case)
    outputs = reference.call(inputs)
    assert [x.requires_grad for x in outputs] == [True, *[False] * 5]
    reference.check(inputs, *reference.run(inputs))


def test_glu_needs_c():
    inputs = reference.build(Case("swiglu", c_dtype=None))
    with pytest.raises(RuntimeError, match="^generate_c: expected True for gradients"):
        reference.call(inputs)
    with torch.no_grad():
        c, d, *_ = reference.call(inputs)
    assert c.numel() == 0 and not d.requires_grad


@pytest.mark.parametrize("activation", ["srelu", "mm"])
def test_c_is_not_needed(activation):
    """srelu recomputes the pre-activation and mm has none: without C the gradients are the same bits."""
    (_, with_c), (c, without) = (reference.run(reference.build(Case(activation, F32, c_dtype=x))) for x in (BF16, None))
    assert c.numel() == 0
    for name, gradient in with_c.items():
        assert torch.equal(gradient, without[name]), name


@pytest.mark.parametrize("activation", ["srelu", "swiglu", "mm"])
@pytest.mark.parametrize("wanted", ["a", "b[1]", "prob", "bias"])
def test_one_leaf(activation, wanted):
    """With the other tensors frozen, a gradient is the same bits and the others do not exist."""
    case = Case(activation, F32, weights="list_k")
    inputs = reference.build(case)
    _, everything = reference.run(inputs)
    for name, leaf in inputs.leaves.items():
        leaf.requires_grad_(name == wanted)
    reference.call(inputs)[1].backward(inputs.gradients["d"])
    for name, leaf in inputs.leaves.items():
        assert (leaf.grad is not None) == (name == wanted), name
    assert torch.equal(inputs.leaves[wanted].grad, everything[wanted])


@pytest.mark.parametrize("activation", ["srelu", "swiglu", "mm"])
def test_pointers(activation):
    """A pointer table has no gradients: where the backward needs weights, the call says so."""
    inputs = reference.build(Case(activation, F32, weights="list_k"))
    a, b, offsets, *rest = inputs.positional
    a, table = a.detach(), torch.tensor([x.data_ptr() for x in b])
    inputs.positional = [a, [], offsets, *rest, None, None, None, table]
    inputs.keywords = {"n": b[0].shape[0], "b_dtype": BF16}
    with pytest.raises(RuntimeError, match="^b: expected tensors for gradients, got b_ptrs"):
        reference.call(inputs)
    with torch.no_grad():
        reference.call(inputs)


@pytest.mark.parametrize("activation", ["srelu", "swiglu", "mm"])
def test_no_second_derivatives(activation):
    """They would lack terms, so asking for one is an error."""
    inputs = reference.build(Case(activation, F32))
    d = reference.call(inputs)[1]
    gradients = torch.autograd.grad(d, list(inputs.leaves.values()), inputs.gradients["d"], create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="no second derivatives"):
            gradient.sum().backward(retain_graph=True)
