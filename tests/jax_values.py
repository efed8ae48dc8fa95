"""Between torch tensors and JAX arrays, to the bit; cases of the backward operators as calls on JAX arrays.

Imported before any JAX backend starts: two CPU devices for shard_map, no preallocated GPU memory beside torch, and the
CPU as the default device on any machine.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
jax.config.update("jax_num_cpu_devices", 2)

import jax.export  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from cases import Case, operator  # noqa: E402

import cudnn_grouped.jax as on_jax  # noqa: E402
from cudnn_grouped.jax.call import schema  # noqa: E402

jax.config.update("jax_default_device", "cpu")  # by name: asking for the device would start every backend

_PACKED = torch.float4_e2m1fn_x2
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(array) -> np.ndarray:
    """The bits of a JAX or NumPy array as integers."""
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(_INTEGERS[array.dtype.itemsize])


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous NumPy array of JAX's dtype: FP4 becomes uint8."""
    name = "uint8" if tensor.dtype == _PACKED else str(tensor.dtype).removeprefix("torch.")
    integers = tensor.detach().cpu().contiguous().view(_TORCH_INTEGERS[tensor.element_size()])
    return integers.numpy().view(jnp.dtype(name))


def to_jax(tensor: torch.Tensor, device=None):
    """A copy of its own, on the CPU unless a device is named."""
    return jax.device_put(to_numpy(tensor).copy(), device)


def to_torch(array) -> torch.Tensor:
    array = np.array(array)
    name = str(array.dtype)
    return torch.from_numpy(array.view(_INTEGERS[array.dtype.itemsize])).view(getattr(torch, name))


def in_memory_order(name: str, tensor: torch.Tensor, n_major=False) -> torch.Tensor:
    """The C-contiguous tensor that cudnn_grouped.jax takes for a torch operator's argument."""
    if name == "b" and tensor.dim() == 3:
        return tensor.permute(2, 1, 0) if n_major else tensor.permute(2, 0, 1)
    if name == "b" and n_major:
        return tensor.transpose(0, 1)
    if tensor.dim() == 6 and name.startswith("sf") and tensor.shape[:2] == (32, 4):
        return tensor.permute(5, 2, 4, 0, 1, 3)
    return tensor


def jax_arguments(built, device=None) -> dict:
    """The arguments of ``on_jax.operator`` for a built case. Pointer tables are packed."""
    case, tensors = built.case, list(schema(built.case.op)[0])
    named = dict(zip(tensors, built.positional)) | built.keywords
    n_major = case.weights.endswith("_n")
    arguments = {}
    for name, value in named.items():
        if isinstance(value, list):
            arrays = [to_jax(in_memory_order(name, one, n_major), device) for one in value]
            dense = case.weights.startswith("dense")
            arguments[name] = (arrays[0] if dense else arrays) if arrays else None
        elif name in ("b_ptrs", "sfb_ptrs"):
            arguments[name] = jax.device_put(value.numpy().view(np.uint8), device)
        elif isinstance(value, torch.Tensor):
            arguments[name] = to_jax(in_memory_order(name, value), device)
        else:
            arguments[name] = value
    if n_major:
        arguments["b_major"] = "n"
    return arguments


def split(arguments: dict) -> tuple:
    """(arrays, everything else): what jit traces and what it does not."""
    arrays = {n: v for n, v in arguments.items() if isinstance(v, jax.Array | list)}
    return arrays, {n: v for n, v in arguments.items() if n not in arrays}


def options_of(case: Case) -> dict:
    from cases import DTYPES

    return {"d_dtype": DTYPES[case.d], "generate_dbias": case.dbias}


def torch_results(built) -> dict:
    """{name: tensor, or None for an absent one} of the torch operator."""
    case = built.case
    outputs = operator(case.op)(*built.positional, **built.keywords, **options_of(case))
    names = schema(case.op)[2]
    return {n: None if tuple(o.shape) == (0,) and n != "dprob" else o for n, o in zip(names, outputs, strict=True)}


def assert_same(got: dict, want: dict) -> None:
    """Every result: presence, shape, dtype and bits. want: torch tensors."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor is None:
            assert got[name] is None, f"{name} is there"
            continue
        expected = to_numpy(in_memory_order(name, tensor))
        assert got[name] is not None, f"{name} is absent"
        assert got[name].shape == expected.shape and got[name].dtype == expected.dtype, name
        different = int((bits(got[name]) != bits(expected)).sum())
        assert different == 0, f"{name}: {different} of {expected.size} elements have other bits"


__all__ = ["Case", "jax", "jnp", "on_jax"]
