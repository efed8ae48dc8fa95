"""Turns the validator's verdicts into Python exceptions with the calling layer's argument names."""

import contextlib

import torch

from . import library

KINDS = {"value": ValueError, "not_implemented": NotImplementedError, "runtime": RuntimeError}


def raise_verdict(verdict, name_of=None):
    """Raise the exception for ``(kind, argument, text)``; nothing to do for None.

    name_of: maps the operator's argument name to the caller's; an index as in ``b[3]`` is kept.
    """
    if verdict is not None:
        raise exception_of(verdict, name_of)


def exception_of(verdict, name_of=None):
    """The exception for ``(kind, argument, text)``."""
    kind, argument, text = verdict
    name, bracket, index = argument.partition("[")
    name = name_of(name) if name_of else name
    return KINDS[kind](f"{name}{bracket}{index}: {text}")


def meta_mixture(tensors):
    """(argument, text) of the first tensor that is a meta tensor among real ones or the reverse; None without one.

    tensors: {argument: tensor, list of tensors or anything else}. A call with such a mixture never reaches the validator.
    """
    first = None
    for argument, value in tensors.items():
        if value is None:
            continue
        listed = isinstance(value, (list, tuple))
        for index, tensor in enumerate(value if listed else (value,)):
            if not isinstance(tensor, torch.Tensor):
                continue
            if first is None:
                first = tensor
            if tensor.is_meta != first.is_meta:
                name = f"{argument}[{index}]" if listed else argument
                return name, f"expected a tensor on {first.device}, got {tensor.device}"
    return None


@contextlib.contextmanager
def translated_errors(name_of=None):
    """Within it, a validation error of an operator becomes ValueError, NotImplementedError or RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        verdict = library.C.take_error()
        if verdict is None or verdict[2] not in str(error):  # not the validator's, or an earlier call's
            raise
        raise exception_of(verdict, name_of) from None
