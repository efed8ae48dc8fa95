"""The operators on JAX arrays, by the names of the torch operators' arguments; block quantisation by format name."""

import jax
import jax.numpy as jnp
import numpy as np

from ..api.arguments import as_list
from ..quantize import block_format
from .call import Operand, as_array, call, is_concrete, schema, torch_dtype
from .targets import OPERATIONS

_TABLES = ("b_ptrs", "sfb_ptrs")


def operator(operation, **arguments):
    """Run one of ``torch.ops.cudnn_grouped`` on JAX arrays; under ``jax.jit`` too.

    operation: "dsrelu", "dglu", "dact", "srelu", "glu", "mm", "wgrad", "quantize" or "dequantize".
    arguments: the torch operator's, by name and with its defaults; dtypes may be JAX's. JAX arrays are C-contiguous, so
    what the torch operators take as a view is given as it lies in memory:
        b, dense      (L, N, K), or with b_major="n" (L, K, N); FP4 as uint8 (L, N, K/2). Or a list of L arrays (N, K).
        sfa, sfb      physical (L, ceil(rows/128), ceil(blocks/4), 32, 4, 4), L = 1 for sfa, or flat; sfb may be a list.
        b_ptrs, sfb_ptrs  (L,) int64 (x64 mode), or packed uint8 (8 L,), see ``pointer_table``.
        wgrad         a (T, m) and b (T, n), tokens first; FP4, whose pairs lie along T, as uint8 (m, T/2) and (n, T/2).
        quantize      x (R, C) or (L, R, C). dequantize: data as quantize gives it.

    Returns a dict by the names of the torch operator's results (wgrad: "out"; dequantize: "x"), None for absent ones, in
    the same forms. Results are new on every call, and rows that belong to no expert are zero.

    ValueError or NotImplementedError for a bad argument, RuntimeError from XLA (``jax.errors.JaxRuntimeError``) for what
    only the handler can see: values under tracing, the device. TypeError for an unknown argument. vmap, differentiation
    and symbolic shapes raise NotImplementedError.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation: expected one of {', '.join(OPERATIONS)}, got {operation!r}")
    tensors, options, _ = schema(operation)
    unknown = [name for name in arguments if name not in tensors and name not in options]
    if unknown:
        raise TypeError(f"{operation}: expected arguments {', '.join([*tensors, *options])}, got {unknown[0]}")
    given = {name: arguments.get(name) for name in tensors}
    chosen = {
        name: torch_dtype(name, value) if name.endswith("dtype") else value
        for name, value in arguments.items()
        if name in options
    }
    return call(operation, operands_of(operation, given, chosen), chosen)


def operands_of(operation, tensors, options, name_of=str):
    """{argument: Operand, list of Operands or None} of {argument: array, list of arrays or None}."""
    lists, b_major = schema(operation)[0], options.get("b_major")
    operands = {}
    for name, value in tensors.items():
        if value is None or (lists[name] and isinstance(value, (list, tuple)) and not value):
            operands[name] = None
        elif lists[name]:
            listed = isinstance(value, (list, tuple))
            names = [f"{name_of(name)}[{i}]" if listed else name_of(name) for i in range(len(as_list(value)))]
            arrays = [as_array(n, one) for n, one in zip(names, as_list(value))]
            operands[name] = [_weight(one, b_major) if name == "b" else Operand(one) for one in arrays]
        elif name in _TABLES:
            operands[name] = Operand(_table(name_of(name), value), table=True)
        else:
            operands[name] = _oriented(operation, name, as_array(name_of(name), value))
    return operands


def _weight(array, b_major):
    """The operator's (N, K, L) or (N, K) of (L, N, K) or (N, K); n-major: of (L, K, N) or (K, N)."""
    if array.ndim == 3:
        return Operand(array, *(((2, 1, 0), "(L, K, N)") if b_major == "n" else ((1, 2, 0), "(L, N, K)")))
    return Operand(array, (1, 0), "(K, N)") if array.ndim == 2 and b_major == "n" else Operand(array)


def _oriented(operation, name, array):
    if operation == "wgrad" and name in ("a", "b") and array.ndim == 2:
        # There a is (m, T) and b (T, n); the arrays are (T, m) and (T, n), or for FP4 (m, T/2) and (n, T/2).
        packed = array.dtype == np.uint8
        turned = (name == "a") != packed
        return Operand(array, (1, 0), "(n, T/2)" if packed else "(T, m)") if turned else Operand(array)
    if operation in ("quantize", "dequantize") and name in ("x", "data") and array.ndim == 3:
        return Operand(array, (1, 2, 0), "(L, R, C)")
    return Operand(array)


def _table(name, value):
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        value = np.ascontiguousarray(value).view(np.uint8)  # without x64 mode JAX would cut the addresses
    array = as_array(name, value)
    packed = array.dtype == np.uint8 and array.ndim == 1 and array.size % 8 == 0
    if array.dtype != np.int64 and not packed:
        raise ValueError(
            f"{name}: expected addresses as int64 (x64 mode) or packed uint8 of shape (8 L,), got {array.dtype} of shape "
            f"{tuple(array.shape)}"
        )
    return array


def pointer_table(arrays):
    """The packed uint8 table (8 L,) of the addresses of the experts' arrays, on their device; None counts as null.

    arrays: a list of concrete JAX arrays on one device. They must stay alive and unmoved for every execution that uses the
    table: do not donate or delete them. ValueError for a tracer, arrays of several devices, and memory that the operators
    would not read as the array's values.
    """
    if not isinstance(arrays, (list, tuple)):  # iterating anything else makes arrays that nobody keeps
        raise ValueError(f"arrays: expected a list of arrays that stay alive, got {type(arrays).__name__}")
    addresses, device = [], None
    for i, array in enumerate(arrays):
        if array is None:
            addresses.append(0)
            continue
        _check_pointed_to(f"arrays[{i}]", array, device)
        (device,) = array.devices()
        addresses.append(array.block_until_ready().unsafe_buffer_pointer())
    return jax.device_put(np.array(addresses, np.int64).view(np.uint8), device)


def _check_pointed_to(name, array, device):
    if not isinstance(array, jax.Array) or not is_concrete(array):
        raise ValueError(f"{name}: expected a concrete JAX array or None, got {type(array).__name__}")
    devices = as_array(name, array).devices()
    if len(devices) != 1 or device not in (None, *devices):
        expected = "one device" if device is None else f"{device}, like the arrays before it"
        raise ValueError(f"{name}: expected an array on {expected}, got {', '.join(sorted(map(str, devices)))}")
    if array.dtype == jnp.float4_e2m1fn:
        raise ValueError(f"{name}: expected FP4 as uint8, two values a byte, got float4_e2m1fn")
    layout = array.format.layout
    if layout is not None and tuple(layout.major_to_minor) != tuple(range(array.ndim)):
        raise ValueError(f"{name}: expected row-major memory, got layout {tuple(layout.major_to_minor)}")


def quantize(x, format="mxfp8", *, axis="row", norm_const=None, padded_offsets=None):
    """``cudnn_grouped.quantize`` on JAX arrays; returns ``(data, scales)``.

    x: (R, C) or (L, R, C), float32, bfloat16 or float16. format, axis, norm_const, padded_offsets, and the formulas: there.
    data: the shape of ``x``; FP4 is uint8, two values a byte: (R, C/2), or with axis "col" (C, R/2), after L.
    scales: physical (L, ceil(rows/128), ceil(blocks/4), 32, 4, 4). ValueError for a bad argument.
    """
    arguments = {"norm_const": norm_const, "padded_offsets": padded_offsets, **block_format(format)._asdict()}
    outputs = operator("quantize", x=x, axis=axis, **arguments)
    return outputs["data"], outputs["scales"]


def dequantize(data, scales, format="mxfp8", *, axis="row", norm_const=None, padded_offsets=None, dtype=None):
    """``cudnn_grouped.dequantize`` on JAX arrays: the inverse of ``quantize``, in float32 when dtype is None."""
    return operator(
        "dequantize",
        data=data,
        scales=scales,
        sf_vec_size=block_format(format).sf_vec_size,
        axis=axis,
        norm_const=norm_const,
        padded_offsets=padded_offsets,
        dtype=dtype,
    )["x"]
