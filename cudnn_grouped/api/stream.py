"""``current_stream``: which CUDA stream a call launches on, and the ordering of the memory it touches."""

import contextlib

import torch

_LEGACY_DEFAULT = (0, 1)  # cudaStreamDefault and cudaStreamLegacy: torch's default stream
_PER_THREAD = 2  # cudaStreamPerThread


def stream_handle(current_stream):
    """The integer handle, or None for torch's current stream.

    current_stream: None, a torch.cuda.Stream, an int, or an object with ``cuda_stream`` or ``__int__``. ValueError otherwise.
    """
    if current_stream is None:
        return None
    value = getattr(current_stream, "cuda_stream", current_stream)
    if isinstance(value, (bool, float, str)) or not hasattr(value, "__int__"):
        raise ValueError(
            "current_stream: expected None, a torch.cuda.Stream, an int handle or an object with __int__ or cuda_stream, "
            f"got {type(current_stream).__name__}"
        )
    handle = int(value)
    if handle == _PER_THREAD:
        raise ValueError("current_stream: expected a stream handle, got 2 (the per-thread default stream)")
    return handle


@contextlib.contextmanager
def launch_stream(current_stream, device):
    """Make ``current_stream`` torch's current stream, so that work and allocations within are ordered with it.

    Yields a function that records tensors: with one list, the memory of inputs (used on the launch stream) or outputs
    (allocated there, used on the caller's stream) is not reused before both streams are done with it.
    On the CPU the stream is checked and otherwise ignored.
    """
    handle = stream_handle(current_stream)
    if handle is None or device.type != "cuda":
        yield lambda inputs, outputs: None
        return
    caller = torch.cuda.current_stream(device)
    if handle in _LEGACY_DEFAULT:
        stream = torch.cuda.default_stream(device)
    else:
        stream = torch.cuda.ExternalStream(handle, device=device)
    if stream.cuda_stream == caller.cuda_stream:
        yield lambda inputs, outputs: None
        return

    def record(inputs, outputs):
        for tensor in inputs:
            tensor.record_stream(stream)
        for tensor in outputs:
            tensor.record_stream(caller)

    with torch.cuda.stream(stream):
        yield record
