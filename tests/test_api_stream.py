"""current_stream: handles, and what a launch on another stream does; torch.cuda is replaced, so that no GPU is needed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from cudnn_grouped.api.stream import launch_stream, stream_handle

CUDA = torch.device("cuda", 0)


class Tensor:
    def __init__(self):
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream.cuda_stream)


@pytest.fixture
def cuda(monkeypatch):
    """Torch's current stream is 7, its default stream 0; yields the streams that were entered."""
    entered = []

    @contextlib.contextmanager
    def enter(stream):
        entered.append(stream.cuda_stream)
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return entered


@pytest.mark.parametrize("stream, handle", [(42, 42), (SimpleNamespace(cuda_stream=9), 9), (0, 0), (1, 0)])
def test_launch_on_another_stream(cuda, stream, handle):
    """Entered, so that allocations are its own; inputs are recorded on it and outputs on the caller's stream."""
    inputs, outputs = [Tensor(), Tensor()], [Tensor()]
    with launch_stream(stream, CUDA) as record:
        assert cuda == [handle]
        record(inputs, outputs)
    assert [tensor.recorded for tensor in inputs] == [[handle], [handle]] and outputs[0].recorded == [7]


@pytest.mark.parametrize("stream", [None, 7, SimpleNamespace(cuda_stream=7)])
def test_launch_on_the_current_stream(cuda, stream):
    tensor = Tensor()
    with launch_stream(stream, CUDA) as record:
        record([tensor], [tensor])
    assert not cuda and not tensor.recorded


def test_cpu_ignores_the_stream(cuda):
    with launch_stream(42, torch.device("cpu")) as record:
        record([Tensor()], [Tensor()])
    assert not cuda


def test_handles():
    assert stream_handle(None) is None and stream_handle(5) == 5
    for wrong in (2, "5", 5.0, True, [5]):
        with pytest.raises(ValueError, match="^current_stream: "):
            stream_handle(wrong)
