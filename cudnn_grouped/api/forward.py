"""What the wrappers and classes of the forward operators share: the layout of bias, the call, the life cycle."""

import itertools

import torch

from ..errors import translated_errors
from .arguments import as_list, call_name
from .operation import GroupedGemmOperation, _call, _flat
from .stream import launch_stream
from .tuple_dict import TupleDict

OUTPUTS = ("c", "d", "d_col", "amax", "sfd_row", "sfd_col")


def run_forward(operator, tensors, options, current_stream, run=_call, given=()):
    """Run the functional operator on checked arguments; returns ``{name: tensor or None}`` of OUTPUTS.

    tensors, options: by the operator's argument names, None where not given; bias as the documents lay it out.
    run: another callable with ``_call``'s arguments and result. given: the caller's tensors that it writes into.
    """
    tensors = {**tensors, "bias": operator_bias(tensors, options["n"], call_name)}
    with launch_stream(current_stream, tensors["a"].device) as record, translated_errors(call_name):
        outputs = run(operator, tensors, options)
        result = {n: x if x.dim() > 1 else None for n, x in zip(OUTPUTS, outputs, strict=True)}  # (0,): absent
        record(itertools.chain(_flat(tensors), given), _flat(result))
    return result


def named(result, names=OUTPUTS):
    """The wrapper's return value: these outputs in this order."""
    return TupleDict({f"{name}_tensor": result[name] for name in names})


def operator_bias(tensors, n, name_of):
    """(L, N) contiguous, as the operators take bias: the documents have (N, L) with strides (1, N). ValueError for another.

    n: N of discrete weights.
    """
    bias, weights, padded_offsets = tensors["bias"], as_list(tensors["b"]), tensors["padded_offsets"]
    if bias is None:
        return None
    if weights:
        n = weights[0].shape[0] if weights[0].dim() else None
    experts = padded_offsets.shape[0] if padded_offsets.dim() else None
    if n is None or experts is None:
        return bias  # the operator has more to say about b or padded_offsets
    name = name_of("bias")
    if tuple(bias.shape) != (n, experts):
        raise ValueError(f"{name}: expected shape (N, L) = ({n}, {experts}), got shape {tuple(bias.shape)}")
    wrong = [s for size, s, legal in zip(bias.shape, bias.stride(), (1, n), strict=True) if size != 1 and s != legal]
    if wrong:
        raise ValueError(f"{name}: expected strides (1, N) = (1, {n}), got {bias.stride()}")
    return bias.t()


class ForwardOperation(GroupedGemmOperation):
    """The life cycle of a forward operator. required and outputs may depend on the samples: see subclasses."""

    outputs = ("c", "d")
    fixed_sizes = (("a", "K", 1), ("d", "columns", 1), ("padded_offsets", "experts", 0))

    def _resolve(self, options):
        return options

    def _operands(self, tensors, name_of):
        n = None if self._b_shape is None else self._b_shape[0]
        return {**tensors, "bias": operator_bias(tensors, n, name_of)}


def is_bf16(a):
    return isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16
