"""One call of an operator on JAX arrays: its check, the shapes of its results, and the XLA custom call.

Nothing about an operator is said here again. Its arguments are those of the torch operator's schema, the check is the
validator's, and the results' shapes are those of the torch operator's fake; the handler in csrc/bindings/xla_ffi.cc
builds the same problem from the arguments' names.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .. import library
from ..api.arguments import OPTION_TYPES, check_options
from ..errors import raise_verdict
from ..scales import physical_scales
from .targets import target_name

_UNNAMED_RESULTS = {"wgrad": ["out"], "dequantize": ["x"]}
_READ_BY_CHECKS = ("padded_offsets", "norm_const", "b_ptrs", "sfb_ptrs")


class Operand(NamedTuple):
    """An array as an operator's argument.

    axes: the operator's dimension i is the array's dimension axes[i]; None: as it is. held: how a message says that.
    table: a pointer table, which may be packed bytes.
    """

    array: jax.Array
    axes: tuple | None = None
    held: str = ""
    table: bool = False

    @property
    def is_packed(self):
        return self.table and self.array.dtype == np.uint8 and self.array.ndim == 1

    def description(self, device="xla", address=0):
        """What ``_C.check`` takes. Where no values are read, the device is any: XLA places the arrays."""
        dtype, shape = str(self.array.dtype), self.array.shape
        if self.is_packed:
            dtype, shape = "int64", (shape[0] // 8,)
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * shape[i]
        axes = range(len(shape)) if self.axes is None else self.axes
        return (dtype, device, 0, tuple(shape[i] for i in axes), tuple(strides[i] for i in axes), address)

    def entry(self, name):
        """How the handler reads it: see ``Entry`` in csrc/bindings/xla_values.h."""
        if self.is_packed:
            return f"{name}:int64"
        return name if self.axes is None else f"{name}[{','.join(map(str, self.axes))}]"


@functools.cache
def schema(operation):
    """({tensor argument: whether it is a list}, option names, result names) of the torch operator."""
    definition = getattr(torch.ops.cudnn_grouped, operation).default._schema
    types = {argument.name: str(argument.type) for argument in definition.arguments}
    tensors = {name: "List" in type for name, type in types.items() if "Tensor" in type}
    results = _UNNAMED_RESULTS.get(operation) or [result.name for result in definition.returns]
    return tensors, [name for name in types if name not in tensors], results


def torch_dtype(name, dtype):
    """The torch dtype of a JAX, NumPy or torch one; None for None. ValueError for what no operator knows."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    try:
        named = jnp.dtype(dtype).name
    except TypeError:
        named = repr(dtype)
    found = getattr(torch, named, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}: expected a dtype that the operators know, got {named}")
    return found


def as_array(name, value):
    """A JAX array of a JAX or NumPy array. ValueError for anything else; NotImplementedError for a symbolic shape."""
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    if not isinstance(value, jax.Array):
        raise ValueError(f"{name}: expected a JAX array, got {type(value).__name__}")
    if is_concrete(value) and value.is_deleted():
        raise ValueError(f"{name}: expected an array, got one that is deleted or was donated")
    if not all(isinstance(size, int) for size in value.shape):
        raise NotImplementedError(f"{name}: expected sizes that are known when traced, got shape {value.shape}")
    return value


def is_concrete(array):
    return not isinstance(array, jax.core.Tracer)


def _from_numpy(name, array):
    """ValueError where JAX would change the dtype and so the values: without x64 mode it cuts int64 to its lower half."""
    becomes = jax.dtypes.canonicalize_dtype(array.dtype)
    if becomes != array.dtype:
        raise ValueError(
            f"{name}: expected a dtype that JAX keeps, got {array.dtype} (JAX without x64 mode makes it {becomes})"
        )
    try:
        return jnp.asarray(array)
    except TypeError:
        raise ValueError(f"{name}: expected an array of numbers, got dtype {array.dtype}") from None


def call(operation, operands, options, name_of=str):
    """The results by the names of the torch operator's schema, None for those that are absent.

    operands: {argument: Operand, list of Operands, or None}. options: {argument: value}, None for the default where
    that is None; dtypes as torch dtypes. name_of: the caller's name of an argument, for messages.
    Offsets, norm_const and pointer tables that are concrete arrays on the CPU are checked by value at once; otherwise the
    handler does it.

    ValueError or NotImplementedError for a bad argument. Under vmap and differentiation NotImplementedError.
    """
    check_options(options)
    options = {name: value for name, value in options.items() if value is not None}
    given = {name: value for name, value in operands.items() if value is not None}
    _check(operation, given, options, name_of)
    results = _results(operation, given, options)
    flat = [(name, one) for name, value in given.items() for one in (value if isinstance(value, list) else [value])]
    attributes = {
        "operation": operation,
        "operands": " ".join(operand.entry(name) for name, operand in flat),
        "results": " ".join(results),
        **{name: _attribute(name, value) for name, value in options.items()},
    }
    outputs = _bind(operation, [operand.array for _, operand in flat], list(results.values()), attributes)
    return dict.fromkeys(schema(operation)[2]) | dict(zip(results, outputs, strict=True))


def _check(operation, given, options, name_of):
    addresses = _addresses(given)

    def described(name, operand):
        if addresses is None:
            return operand.description()
        return operand.description("cpu", addresses.get(name, 0))

    tensors = {
        name: [described(name, one) for one in value] if isinstance(value, list) else described(name, value)
        for name, value in given.items()
    }
    plain = {name: _dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in options.items()}
    verdict = library.C.check(operation, tensors, plain, addresses is not None)
    if verdict is None:
        return
    kind, argument, text = verdict
    operand = given.get(argument.partition("[")[0])
    operand = operand[0] if isinstance(operand, list) and operand else operand
    if isinstance(operand, Operand) and operand.held and "shape" in text:
        text += f" (the array holds it as {operand.held})"
    raise_verdict((kind, argument, text), name_of)


def _addresses(given):
    """{argument: address} of what the checks read, if all of that is concrete and on the CPU; else None."""
    addresses = {}
    for name in _READ_BY_CHECKS:
        if name not in given:
            continue
        array = given[name].array
        if not is_concrete(array) or [device.platform for device in array.devices()] != ["cpu"]:
            return None
        addresses[name] = array.block_until_ready().unsafe_buffer_pointer() if array.size else 0
    return addresses


def _results(operation, given, options):
    """{name: jax.ShapeDtypeStruct} of the results that are present, as the torch operator's fake has them."""
    lists = schema(operation)[0]

    def meta(operand):
        dtype, _, _, shape, strides, _ = operand.description()
        return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")

    tensors = {name: [meta(one) for one in value] if lists[name] else meta(value) for name, value in given.items()}
    if lists.get("b"):
        tensors.setdefault("b", [])
    outputs = getattr(torch.ops.cudnn_grouped, operation).default(**tensors, **options)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    names = schema(operation)[2]
    # An absent result is an empty tensor of one dimension; dprob of a prob (M,) may be that with M = 0.
    present = {n: o for n, o in zip(names, outputs, strict=True) if n == "dprob" or tuple(o.shape) != (0,)}
    return {name: _physical(operation, output) for name, output in present.items()}


def _physical(operation, output):
    """C-contiguous, as JAX arrays are: scale factors and batches in their order in memory."""
    if output.dim() == 6:
        output = physical_scales(output)
    elif output.dim() == 3 and operation in ("quantize", "dequantize"):
        output = output.permute(2, 0, 1)
    packed = output.dtype == torch.float4_e2m1fn_x2
    return jax.ShapeDtypeStruct(tuple(output.shape), np.uint8 if packed else jnp.dtype(_dtype_name(output.dtype)))


def _dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def _attribute(name, value):
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    if OPTION_TYPES[name] == "a number":
        return float(value)
    return np.array(value, np.int64) if isinstance(value, (tuple, list)) else value


def _bind(operation, arrays, results, attributes):
    def custom_call(*arrays):
        arrays, varying = same_manual_axes(arrays)
        shapes = [jax.ShapeDtypeStruct(r.shape, r.dtype, **_manual_axes(varying)) for r in results]
        return jax.ffi.ffi_call(target_name(operation), shapes)(*arrays, **attributes)

    unbatched = jax.custom_batching.custom_vmap(custom_call)

    @unbatched.def_vmap
    def refuse_vmap(axis_size, in_batched, *arrays):
        raise NotImplementedError(
            f"cudnn_grouped {operation}: vmap is not supported; experts are the operator's own batch: give each its rows"
        )

    differentiable = jax.custom_jvp(unbatched)

    @differentiable.defjvp
    def refuse_derivative(primals, tangents):
        raise NotImplementedError(
            f"cudnn_grouped {operation}: the operator has no derivative; grouped_mlp is differentiable, or use jax.custom_vjp"
        )

    return differentiable(*arrays)


def same_manual_axes(arrays):
    """(arrays, axes) with every array varying over the same mesh axes of shard_map, as a custom call takes them."""
    axes = [jax.typeof(array).mat.varying for array in arrays]
    varying = frozenset().union(*axes)
    missing = [tuple(sorted(varying - of_array)) for of_array in axes]
    return [jax.lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing)], varying


def _manual_axes(varying):
    """How a result says that it varies over these mesh axes of shard_map."""
    if not varying:
        return {}
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return {"sharding": sharding, "manual_axis_type": jax.sharding.ManualAxisType(varying=varying)}
