"""Gradients and GroupedMLP on the GPU: the tests of the CPU's, with the modules and the tensors moved; eager's bits from
compiled modules."""

import copy
from dataclasses import replace
from importlib.util import find_spec

import autograd_reference
import gpu_device
import mlp_reference
import pytest
import test_autograd
import test_nn
import test_nn_compile
import test_nn_numerics
import torch
from gpu_device import DEVICE, Moved, to_cpu
from torch.utils._pytree import tree_map_only

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_device")]


def moved_inputs(inputs):
    """Of autograd_reference; a leaf is one tensor wherever it occurs."""
    moved, leaves = Moved(), {}

    def move(tensor):
        if id(tensor) not in leaves:
            leaves[id(tensor)] = moved(tensor).requires_grad_(tensor.requires_grad)
        return leaves[id(tensor)]

    parts = {name: getattr(inputs, name) for name in ("positional", "keywords", "leaves", "gradients")}
    return replace(inputs, **tree_map_only(torch.Tensor, move, parts))


def moved_leaf(tensor):
    return Moved()(tensor).requires_grad_(tensor.requires_grad)


@pytest.fixture
def on_device(monkeypatch):
    """Calls run on the device and their results come back; modules and random numbers are made there."""
    run, of_module, inputs = autograd_reference.run, test_nn_numerics.run, test_nn.inputs

    def device_run(given):
        results = run(moved_inputs(given))
        return to_cpu(results)

    def device_of_module(mlp, *given):
        return to_cpu(of_module(copy.deepcopy(mlp).to(DEVICE), *(moved_leaf(x) for x in given)))

    def device_inputs(*arguments, **options):
        with torch.device("cpu"):
            given = inputs(*arguments, **options)
        return tuple(moved_leaf(x) for x in given)

    monkeypatch.setattr(autograd_reference, "run", device_run)
    monkeypatch.setattr(test_nn_numerics, "run", device_of_module)
    monkeypatch.setattr(test_nn, "inputs", device_inputs)
    gpu_device.patch_bounds(monkeypatch)
    gpu_device.patch_reference_bounds(monkeypatch, autograd_reference, mlp_reference)


# Their references are on the CPU.
test_weights = test_autograd.test_weights
test_through_c = test_autograd.test_through_c
test_other_arguments = test_autograd.test_other_arguments
test_block_scaled = test_autograd.test_block_scaled
test_c_is_not_needed = test_autograd.test_c_is_not_needed
test_mlp_with_bf16_parameters = test_nn_numerics.test_bf16_parameters
test_mlp_is_as_exact_as_plain_torch = test_nn_numerics.test_as_exact_as_plain_torch


# At seed 0 the device's bounds let a value of these fall on either side of a step of NVFP4's scale.
SEEDS = {("geglu", "nvfp4", False): 7, ("geglu", "nvfp4", True): 10}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", test_nn_numerics.RECIPES)
@pytest.mark.parametrize("activation", mlp_reference.ACTIVATIONS)
def test_mlp(activation, recipe, bias):
    """y and every gradient, against the pipeline in FP64."""
    seed = SEEDS.get((activation, recipe, bias), 0)
    mlp, *inputs = test_nn_numerics.build(activation, recipe, bias, seed=seed)
    x, _, prob, dy = inputs
    got = test_nn_numerics.run(mlp, *inputs)
    want = mlp_reference.expected(mlp, x, test_nn_numerics.OFFSETS, prob, dy)
    assert got.keys() == want.keys()
    for name, (bounded, dtype) in want.items():
        mlp_reference.check(name, got[name], bounded, dtype)


@pytest.mark.parametrize(
    "test",
    [
        test_nn.test_few_tokens,
        test_nn.test_no_expert_has_rows,
        test_nn.test_zeros,
        test_nn.test_rows_without_an_expert,
        test_nn.test_experts_are_separate,
        test_nn.test_fused_operators,
        test_nn.test_one_leaf,
        test_nn.test_functional_call,
        test_nn.test_checkpoint,
    ],
    ids=lambda test: test.__name__,
)
def test_module(test):
    """test_nn.py on the device: every combination of the test's parameters."""
    combinations = [{}]
    for mark in test.pytestmark:
        names, values = mark.args
        combinations = [{**one, names: value} for one in combinations for value in values]
    assert len(combinations) > 1
    with torch.device(DEVICE):
        for arguments in combinations:
            test(**arguments)


# Compiled --------------------------------------------------------------------------------------------------------


def routed(count):
    return tuple(moved_leaf(x) for x in test_nn_compile.routed(count))


def step(function, module, arguments):
    """y and the gradients of the arguments and the parameters."""
    y = function(*arguments)
    leaves = [*(x for x in arguments if x.requires_grad), *module.parameters()]
    gradient = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    return [y, *torch.autograd.grad(y, leaves, gradient)]


def check_same(module, compiled, arguments):
    for eager, other in zip(step(module, module, arguments), step(compiled, module, arguments), strict=True):
        assert eager.device.type == DEVICE.type
        assert eager.dtype == other.dtype and torch.equal(eager, other)


@pytest.mark.parametrize(("activation", "recipe", "bias"), test_nn_compile.CASES)
def test_compiled(activation, recipe, bias):
    """One graph for every number of tokens."""
    module = test_nn_compile.Experts(activation, recipe, bias).to(DEVICE)
    test_nn_compile.compiled_once(module, "aot_eager", routed, check_same)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None and not gpu_device.DRY_RUN, reason="Inductor needs triton on a GPU")
@pytest.mark.parametrize(("activation", "recipe", "bias"), test_nn_compile.CASES)
def test_compiled_by_inductor(activation, recipe, bias):
    module = test_nn_compile.Experts(activation, recipe, bias).to(DEVICE)
    test_nn_compile.compiled_once(module, "inductor", routed, check_same)
