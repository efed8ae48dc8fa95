"""The device of the GPU tests: which one, how tensors get there, operators that run there on tensors of the CPU, and
the bounds of its arithmetic.

CUDNN_GROUPED_TEST_DEVICE=cpu makes it the CPU: a dry run of the tests' logic on a machine without a GPU.
"""

import contextlib
import functools
import os
import sys

import oracle
import torch
from oracle import Approx, gamma
from torch.utils._pytree import tree_map_only

from cudnn_grouped import library

DEVICE = torch.device(os.environ.get("CUDNN_GROUPED_TEST_DEVICE", "cuda:0"))
DRY_RUN = DEVICE.type == "cpu"


@functools.cache
def why_not() -> str | None:
    """Why the GPU tests cannot run here; None where they can."""
    if DRY_RUN:
        return None
    if not torch.cuda.is_available():
        return "no CUDA device (CUDNN_GROUPED_TEST_DEVICE=cpu runs these tests on the CPU engine)"
    major, minor = torch.cuda.get_device_capability(DEVICE)
    if library.load_cuda() and library.C.engine_for("cuda", (major, minor)):
        return None
    built = ", ".join(engine["name"] for engine in library.C.engines())
    return f"no built engine ({built}) serves compute capability {major}.{minor}; CUDA library: {library.cuda_status()}"


def synchronize() -> None:
    if not DRY_RUN:
        torch.cuda.synchronize()


# Tensors ------------------------------------------------------------------------------------------------------


class Moved:
    """Copies of tensors on another device: each storage whole and once, so that strides, offsets and overlaps are as
    they were. An int64 tensor is a pointer table: its addresses become those of the copies of `pointed`.

    shift: bytes by which each storage starts behind an aligned address.
    """

    def __init__(self, device=DEVICE, pointed=(), shift: int = 0):
        self.device, self.shift = device, shift
        self.pointed = {tensor.data_ptr(): tensor for tensor in pointed}
        self.storages = {}  # address -> the bytes and their copy

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.int64 and self.pointed:
            addresses = [self(self.pointed[x]).data_ptr() if x in self.pointed else x for x in tensor.tolist()]
            return torch.tensor(addresses, dtype=torch.int64).to(self.device)
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            original = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = torch.zeros(len(original) + self.shift, dtype=torch.uint8, device=self.device)
            copy[self.shift :].copy_(original)
            self.storages[storage.data_ptr()] = original, copy
        _, copy = self.storages[storage.data_ptr()]
        offset = tensor.storage_offset() + self.shift // tensor.element_size()
        empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return empty.set_(copy.untyped_storage(), offset, tensor.size(), tensor.stride())

    def tree(self, values):
        """Lists, tuples and dicts with tensors among other things."""
        return tree_map_only(torch.Tensor, self, values)

    def back(self) -> None:
        """What was written there, here."""
        for original, copy in self.storages.values():
            original.copy_(copy[self.shift :])


def to_cpu(values):
    return Moved("cpu").tree(values)


# Operators ----------------------------------------------------------------------------------------------------


class Settings:
    """Of the operators below."""

    engine = "device"  # or "cpu"
    shift = 0  # of Moved


@contextlib.contextmanager
def setting(**changes):
    before = {name: getattr(Settings, name) for name in changes}
    for name, value in changes.items():
        setattr(Settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(Settings, name, value)


def patch_operators(monkeypatch, device=DEVICE) -> None:
    """cases.operator gives operators that take tensors of the CPU, run on the device, and bring everything back."""
    import cases

    operator, pointer_table, pointed = cases.operator, cases.pointer_table, {}

    def recorded_table(tensors, case):
        pointed.update({tensor.data_ptr(): tensor for tensor in tensors})
        return pointer_table(tensors, case)

    def device_operator(name):
        function = operator(name)

        def call(*positional, **keywords):
            if Settings.engine == "cpu":
                return function(*positional, **keywords)
            moved = Moved(device, pointed.values(), Settings.shift)
            positional, keywords = moved.tree((positional, keywords))
            outputs = function(*positional, **keywords)
            if device == DEVICE:
                synchronize()
            moved.back()
            return to_cpu(outputs)

        return call

    monkeypatch.setattr(cases, "pointer_table", recorded_table)
    for name, module in list(sys.modules.items()):
        if name.startswith(("test_", "cases")) and getattr(module, "operator", None) is operator:
            monkeypatch.setattr(module, "operator", device_operator)


# Bounds -------------------------------------------------------------------------------------------------------

# A tensor core adds p products and the accumulator in one step: all are shifted to the largest exponent and truncated
# there, summed exactly, and the sum is truncated to FP32. The shifted numbers have at least the 24 bits of FP32 (V100;
# more bits later), and p is at least 4 (V100; 8 in A100, 16 in H100): Fasi, Higham, Mikaitis, Pranesh, Numerical behavior
# of NVIDIA tensor cores, PeerJ CS 7:e330 (2021); Khattak, Mikaitis, Accurate models of NVIDIA tensor cores,
# arXiv:2512.07004. A step then loses less than (p + 1) + 1 truncations of 2^-23 = 2 U of sum|terms|; K / p steps lose
# K (p + 2) / p 2 U, at most 3 U a term. Sums of exact cases fit 24 bits of the largest exponent: nothing is lost there.
TENSOR_CORE_UNITS = 3
# exp(x) = ex2.approx(x log2(e)), good to 2^-22 = 4 U; the product and the constant are a rounding of the argument each.
# rcp.approx is good to 1 ulp = 2 U (PTX ISA, ex2 and rcp). So the logistic function is exp, a sum and rcp.
LOGISTIC_UNITS = oracle.EXP_UNITS + 1 + 2
LOGISTIC_ARGUMENT_UNITS = 2
# core/elementary.h, bounded_tanh_of. |tanh| = r - 1 with r = 2 / (1 + e) is worst where it takes over from the polynomial,
# at tanh = 0.4: r = 1.4, e = 0.43. rcp errs by 2 U of r, 2.8 U. exp errs by 4 U, its product by 1, and 12 U are missing on
# purpose; of 17 U of e come r^2 e / 2 = 0.42, 7.1 U. A rounding of (1 + e) / 2 gives 1 U. Of 0.4 these are 28 U, and the
# last one 1. The slope e r^2 errs by 17 U of e, by 4 + 1 U of r^2, and by two products.
TANH_UNITS, TANH_SLOPE_UNITS = 29, 24
# The argument: a factor of three roundings, then the product.
TANH_ARGUMENT_UNITS = 4


def device_gamma(n: int, u: float) -> float:
    return gamma(TENSOR_CORE_UNITS * n, u)


def patch_bounds(monkeypatch) -> None:
    """The oracle's bounds for the device's arithmetic in place of the CPU's."""
    import oracle_forward

    gemm, function = oracle.gemm, oracle.Arithmetic.function

    def device_gemm(ar, a, b):
        product, terms = gemm(ar, a, b)
        return Approx(product.value, device_gamma(a.shape[1], ar.u) * terms + ar.tiny * (terms > 0)), terms

    def device_function(ar, x, value, slope, relative_units, argument_units=0):
        units = TANH_ARGUMENT_UNITS if argument_units else LOGISTIC_ARGUMENT_UNITS
        return function(ar, x, value, slope, relative_units, units)

    for module in (oracle, oracle_forward):
        monkeypatch.setattr(module, "gemm", device_gemm)
    monkeypatch.setattr(oracle.Arithmetic, "function", device_function)
    monkeypatch.setattr(oracle, "LOGISTIC_UNITS", LOGISTIC_UNITS)
    monkeypatch.setattr(oracle, "TANH_UNITS", TANH_UNITS)
    monkeypatch.setattr(oracle, "TANH_SLOPE_UNITS", TANH_SLOPE_UNITS)


def patch_reference_bounds(monkeypatch, *modules) -> None:
    """The same in the references of autograd and of GroupedMLP, whose UNITS are two tanhs' or slopes'."""
    import activation_reference

    units = 2 * (max(TANH_UNITS, TANH_SLOPE_UNITS) + TANH_ARGUMENT_UNITS)
    for module in (activation_reference, *modules):
        if hasattr(module, "UNITS"):
            monkeypatch.setattr(module, "UNITS", units)
        if hasattr(module, "gamma"):
            monkeypatch.setattr(module, "gamma", device_gamma)
