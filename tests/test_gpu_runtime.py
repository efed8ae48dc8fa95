"""How the operators run on the GPU: graphs, streams, devices, memory, sizes beyond 2^31, offsets that nobody checked."""

import contextlib
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import api_problem
import cases
import gpu_calls as calls
import numpy as np
import pytest
import torch
from cases import DTYPES, Case
from gpu_calls import OTHER_OFFSETS, bits, make, same
from gpu_device import DEVICE, DRY_RUN, Moved, synchronize, to_cpu

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).resolve().parent
needs_cuda = pytest.mark.skipif(DRY_RUN, reason="dry run: the CPU has no such thing")


def in_a_process(code: str, timeout: int = 300, **environment) -> None:
    """The first calls of a process, or calls that may hang: functions of this file."""
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import cudnn_grouped, test_gpu_runtime as t; {code}"
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Graphs ----------------------------------------------------------------------------------------------------------


class Graph:
    """A captured call. In a dry run a replay calls again."""

    def __init__(self, call):
        self.call, self.graph = call, None
        if DRY_RUN:
            self.outputs = call()
            return
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = call()

    def replay(self) -> list:
        if self.graph is None:
            self.outputs = self.call()
        else:
            self.graph.replay()
            synchronize()
        return self.outputs


def check_graph(name: str) -> None:
    """A replay computes with what the tensors then hold: data, offsets, pointer tables."""
    call, again, other = make(name), make(name), make(name, OTHER_OFFSETS, seed=7)
    graph = Graph(call)
    first, second = bits(again()), bits(other())
    for tensor in calls.tree_leaves(graph.outputs):
        integers = calls.integers(tensor)
        integers.fill_(0x55)
    assert same(graph.replay(), first)
    call.fill(other)
    churn = [torch.full((4096,), -1, dtype=torch.int64) for _ in range(64)]  # over host memory that was let go
    assert same(graph.replay(), second), len(churn)
    assert not same(first, second)
    call.fill(again)
    assert same(graph.replay(), first)


@pytest.mark.parametrize("name", calls.NAMES)
def test_graph(name):
    check_graph(name)


def test_first_calls_in_graphs():
    """Nothing has run before the captures."""
    in_a_process("[t.check_graph(name) for name in t.calls.NAMES]")


def test_one_graph_of_all():
    """All operators in one capture; a call's workspace is free for the next one."""
    builts = [make(name) for name in calls.NAMES]
    want = [bits(call()) for call in builts]
    graph = Graph(lambda: [x for call in builts for x in call()])
    for _ in range(3):
        assert same(graph.replay(), [x for outputs in want for x in outputs])


# Waiting ---------------------------------------------------------------------------------------------------------


def check_that_nothing_waits() -> None:
    """No call synchronises, the first included; and while the device is busy, calls return. Busy from the second on:
    CUDA may wait for the device when it loads a kernel's code, at its first launch."""
    builts = [make(name) for name in calls.NAMES] + [make(name, out=True) for name in calls.OUT]
    first = [make(name) for name in calls.NAMES] + [make(name, out=True) for name in calls.OUT]
    if DRY_RUN:
        results = [call() for call in builts]
    else:
        for size, count in ((2**30, 1), (2**19, 512)):  # later allocations are of this memory, large and small ones
            del [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(count)][:]
        synchronize()
        torch.cuda.set_sync_debug_mode("error")
        [call() for call in first]
        torch.cuda._sleep(int(2e10))  # about ten seconds
        busy = torch.cuda.Event()
        busy.record()
        results = [call() for call in builts]
        assert not busy.query(), "a call waited for the device"
        torch.cuda.set_sync_debug_mode("default")
        synchronize()
    functional = len(calls.NAMES)
    for name, call, outputs in zip(calls.NAMES, builts, results[:functional], strict=False):
        assert same(outputs, call()), name
    for name, call, outputs in zip(calls.OUT, builts[functional:], results[functional:], strict=True):
        call.guarded.check()
        assert all(tensor.numel() for tensor in outputs), name


def test_nothing_waits_for_the_device():
    in_a_process("t.check_that_nothing_waits()")


# Streams ---------------------------------------------------------------------------------------------------------


def on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def new_stream():
    return None if DRY_RUN else torch.cuda.Stream(DEVICE)


def busy_for(seconds: float) -> None:
    if not DRY_RUN:
        torch.cuda._sleep(int(2e9 * seconds))


@pytest.mark.parametrize("pair", [("dsrelu", "dglu"), ("dglu", "dglu"), ("srelu", "wgrad"), ("dact", "quantize_rows")])
def test_two_streams_at_once(pair):
    """The bits of each alone: no shared workspace, counter or table."""
    builts = [make(name, seed=i) for i, name in enumerate(pair)]
    alone = [bits(call()) for call in builts]
    synchronize()
    streams = [new_stream() for _ in builts]
    results = [[], []]
    for _ in range(20):
        for call, stream, into in zip(builts, streams, results, strict=True):
            with on(stream):
                into.append(call())
    synchronize()
    for want, outputs in zip(alone, results, strict=True):
        assert all(same(one, want) for one in outputs)


def test_two_threads_at_once():
    builts = [make(name, seed=i) for i, name in enumerate(("dsrelu", "glu", "wgrad", "dglu_geglu"))]
    alone = [bits(call()) for call in builts]
    synchronize()
    failures = []

    def work(i):
        with on(new_stream()):
            for _ in range(20):
                if not same(builts[i](), alone[i]):
                    failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(builts))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def late_inputs(call, stream, given) -> None:
    """On the stream: the inputs are wrong for a while, then what they should be."""
    with on(stream):
        busy_for(0.05)
        for tensor, value in zip(call.inputs(), given, strict=True):
            calls.integers(tensor).copy_(value)


@pytest.mark.parametrize("name", calls.NAMES)
def test_the_current_stream_is_the_launch_stream(name):
    """Work queued before the call has ended when its kernels read: on another stream they would read zeros."""
    call = make(name)
    want, given = bits(call()), bits(call.inputs())
    for tensor in call.inputs():
        if tensor.dtype != torch.int64:  # null pointers of experts with rows may not be followed
            calls.integers(tensor).zero_()
    if DRY_RUN:  # the CPU engine checks norm_const
        late_inputs(call, None, given)
    synchronize()
    stream = new_stream()
    late_inputs(call, stream, given)
    with on(stream):
        outputs = call()
        copies = bits(outputs)
    synchronize()
    assert all(torch.equal(a, b) for a, b in zip(copies, want, strict=True))


@pytest.mark.parametrize("form", ["stream", "handle", "object"])
@pytest.mark.parametrize("name", ["dsrelu_mxfp8", "dglu_bf16"])
def test_current_stream_of_a_wrapper(name, form):
    """Another stream than torch's current one: the wrapper launches there, and its results may be used there."""
    arguments = api_problem.wrapper_arguments(api_problem.CASES[name])
    arguments = api_problem.Arguments(Moved().tree(dict(arguments)), arguments.built)
    want = [x for x in api_problem.call_wrapper(arguments) if x is not None]
    a = calls.integers(arguments["a_tensor"])
    given = a.clone()
    a.zero_()
    synchronize()
    stream = new_stream()
    with on(stream):
        busy_for(0.05)
        a.copy_(given)
    handle = 0 if stream is None else stream.cuda_stream
    value = {"stream": stream, "handle": handle, "object": Handle(handle)}[form]
    got = [x for x in api_problem.call_wrapper(arguments | {"current_stream": value}) if x is not None]
    with on(stream):
        copies = bits(got)
    synchronize()
    assert all(torch.equal(x, y) for x, y in zip(copies, bits(want), strict=True))
    assert any(x.any() for x in copies)


class Handle:
    def __init__(self, value):
        self.value = value

    def __int__(self):
        return self.value


@pytest.mark.parametrize("name", ["dsrelu", "dglu", "dact", "wgrad"])
def test_two_hundred_runs_beside_another_stream(name):
    """D, dprob and dbias: one set of bits."""
    case = calls.CASES[name]
    if isinstance(case, Case):  # several tiles in N, so that an order of sums that varies shows
        case = Case(case.op, (256, 256, 1280, 1536, 2048), n=544, k=96, d="e4m3", dbias=True, weights="list_k")
    call = calls.make_case(case)
    want = bits(call())
    synchronize()
    stream, x = new_stream(), torch.randn(64 if DRY_RUN else 2048, 64 if DRY_RUN else 2048, device=DEVICE)
    for i in range(200):
        if i % 4 == 0:
            with on(stream):
                x = torch.tanh(x @ x)
        assert same(call(), want), i
    assert all(tensor.any() for tensor in want if tensor.numel())


# Devices ---------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", calls.NAMES)
def test_another_device_than_the_current_one(name):
    want = bits(make(name)())
    with torch.cuda.device(0):
        outputs = make(name, device=torch.device("cuda", 1))()
        assert all(tensor.device.index == 1 for tensor in outputs)
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
    assert same([tensor.to(DEVICE) for tensor in bits(outputs)], want)


@needs_cuda
@pytest.mark.parametrize("name", calls.NAMES)
def test_cpu_tensors_among_cuda_tensors(name):
    """The validator's message names the argument."""
    call = make(name)
    for argument, value in call.arguments.items():
        listed = isinstance(value, list) and value
        if not listed and not isinstance(value, torch.Tensor):
            continue
        wrong = [to_cpu(value[0]), *value[1:]] if listed else to_cpu(value)
        changed = calls.Call(call.operator, {**call.arguments, argument: wrong}, {}, call.guarded, call.alive)
        name = rf"{argument}(\[0\])?" if listed else argument
        # Where the first tensor is the wrong one, the next is reported.
        message = rf"^({name}: expected a tensor on {DEVICE}, got cpu|\S+: expected a tensor on cpu, got {DEVICE})"
        with pytest.raises(RuntimeError, match=message):
            changed()
    assert call()


@needs_cuda
@pytest.mark.parametrize("argument", ["prob_tensor", "c_tensor", "sfa_tensor"])
def test_cpu_tensor_in_a_wrapper(argument):
    arguments = api_problem.wrapper_arguments(api_problem.CASES["dsrelu_mxfp8"])
    arguments = api_problem.Arguments(Moved().tree(dict(arguments)), arguments.built)
    with pytest.raises(ValueError, match=rf"^{argument}: expected a tensor on {DEVICE}, got cpu"):
        api_problem.call_wrapper(arguments | {argument: to_cpu(arguments[argument])})


# Memory ----------------------------------------------------------------------------------------------------------


def memory_in_use() -> tuple:
    """(bytes of torch's allocator, bytes of the device outside of it). The second is not this process's alone."""
    if DRY_RUN:
        return 0, 0
    gc.collect()  # what an earlier test left
    synchronize()
    free, total = torch.cuda.mem_get_info(DEVICE)
    outside = 0 if "PYTEST_XDIST_WORKER" in os.environ else total - free - torch.cuda.memory_reserved(DEVICE)
    return torch.cuda.memory_allocated(DEVICE), outside


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("op", ["dsrelu", "dglu"])
def test_memory_is_flat_over_random_sizes(op):
    """1,000 values of M: nothing is kept for each."""
    largest = 2048 if DRY_RUN else 16384
    case = Case(op, (0, largest), n=64, k=64, d="e4m3", dbias=True, sf_form="flat", rank=2, weights="list_k")
    call, rng = calls.make_case(case), np.random.default_rng(0)
    function, given = cases.operator(op), call.arguments
    for i in range(1000):
        blocks = int(rng.integers(0, largest // 256 + 1))
        rows, first = blocks * 256, int(rng.integers(0, blocks + 1)) * 256
        part = {name: given[name][:rows] for name in ("a", "c", "prob")}
        part["sfa"] = given["sfa"][: len(given["sfa"]) // largest * rows]
        part["padded_offsets"] = torch.tensor([first, rows], dtype=torch.int32, device=DEVICE)
        outputs = function(**{**given, **part})
        assert outputs[0].shape == (rows, case.columns)
        del part, outputs
        if i == 200:
            before, host = memory_in_use(), resident()
    allocated, outside = memory_in_use()
    assert allocated == before[0]
    # A few pages more or less; 800 calls that keep 64 KiB each would be 50 MiB.
    assert outside - before[1] < 2**25
    assert resident() - host < 2**25


# Sizes -----------------------------------------------------------------------------------------------------------


def codes(*shape, seed: int = 0) -> torch.Tensor:
    """Random e4m3 numbers of the device, 2^-3 to 2."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0x20, 0x40, shape, generator=generator, dtype=torch.uint8, device=DEVICE).view(DTYPES["e4m3"])


def ones_scales(rows: int, k: int, experts: int = 1) -> torch.Tensor:
    size = experts * -(-rows // 128) * -(-k // 128) * 512
    return torch.full((size,), 127, dtype=torch.uint8, device=DEVICE).view(DTYPES["e8m0"])


def ends(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("d", ["bf16", "e4m3"])
def test_d_beyond_2_31_elements(d):
    """M = 262,400 and 2N = 8,192: the last 512 rows, on both sides of element 2^31, are what they are alone."""
    m, n, k = (2048, 64, 64) if DRY_RUN else (262_400, 4096, 64)
    a, b = codes(m, k), [codes(n, k, seed=1), codes(n, k, seed=2)]
    c = cases.raw(torch.randn(1024, 2 * n, device=DEVICE).bfloat16()).repeat(m // 1024 + 1, 1)[:m].view(torch.bfloat16)
    prob, one = torch.rand(m, device=DEVICE), torch.ones(2, device=DEVICE)

    def run(rows, weights, offsets):
        experts = len(weights)
        keywords = {"sfa": ones_scales(rows.stop - rows.start, k), "sfb": [ones_scales(n, k)] * experts}
        keywords |= {"sf_vec_size": 32, "d_dtype": DTYPES[d], "norm_const": one[:1]}
        factors = one[:experts]
        return cases.operator("dglu")(a[rows], weights, c[rows], offsets, factors, factors, prob[rows], **keywords)

    whole = run(slice(0, m), b, ends(256, m))
    last = run(slice(m - 512, m), b[1:], ends(512))
    assert DRY_RUN or whole[0].numel() > 2**31
    for i in (0, 1, 2):  # D, D by columns, dprob
        if last[i].numel():
            assert torch.equal(cases.raw(whole[i][-512:]), cases.raw(last[i]))
            assert cases.raw(last[i]).any()


@pytest.mark.slow
@pytest.mark.parametrize("ab", ["e4m3", "bf16"])
def test_weights_beyond_2_31_elements(ab):
    """L N K > 2^31: the last expert's rows are what they are alone."""
    experts, n, k = (3, 64, 96) if DRY_RUN else (64, 4096, 8448)
    dtype = DTYPES[ab]
    b = torch.cat([codes(1, n, k, seed=e).view(torch.uint8) for e in range(experts)]).view(DTYPES["e4m3"])
    assert DRY_RUN or b.numel() > 2**31
    a = codes(512, k)
    if ab == "bf16":
        a = a.to(dtype)
        b = torch.cat([b[e : e + 1].to(dtype) for e in range(experts)])
    dense = b.permute(1, 2, 0)
    offsets = ends(256, *[256] * (experts - 2), 512)
    scaled = {} if ab == "bf16" else {"sfa": ones_scales(512, k), "sf_vec_size": 32}
    whole_scales = {} if ab == "bf16" else {"sfb": [ones_scales(n, k, experts)]}
    alone_scales = {} if ab == "bf16" else {"sfa": ones_scales(256, k), "sfb": [ones_scales(n, k)]}
    whole = cases.operator("mm")(a, [dense], offsets, **scaled, **whole_scales)[1]
    alone = cases.operator("mm")(a[256:], [b[-1]], ends(256), **{**scaled, **alone_scales})[1]
    assert torch.equal(whole[256:], alone)
    assert alone.any()


@pytest.mark.slow
def test_operand_beyond_2_31_elements():
    """M K > 2^31."""
    m, n, k = (1024, 64, 96) if DRY_RUN else (262_400, 64, 8448)
    a = torch.cat([codes(256, k, seed=s).view(torch.uint8) for s in range(4)]).repeat(m // 1024 + 1, 1)[:m].contiguous()
    a, b = a.view(DTYPES["e4m3"]), codes(n, k, seed=9)

    def run(rows):
        size = rows.stop - rows.start
        keywords = {"sfa": ones_scales(size, k), "sfb": [ones_scales(n, k)], "sf_vec_size": 32}
        return cases.operator("mm")(a[rows], [b], ends(size), **keywords)[1]

    assert torch.equal(run(slice(0, m))[-512:], run(slice(m - 512, m)))


@pytest.mark.slow
def test_wgrad_beyond_2_31_elements():
    experts, m, n = (3, 64, 96) if DRY_RUN else (64, 4096, 8448)
    dy, x = codes(m, 512).to(torch.bfloat16), codes(n, 512, seed=1).to(torch.bfloat16)
    whole = cases.operator("wgrad")(dy, x.T, ends(256, *[256] * (experts - 2), 512))
    alone = cases.operator("wgrad")(dy[:, 256:].contiguous(), x[:, 256:].contiguous().T, ends(256))
    assert DRY_RUN or whole.numel() > 2**31
    assert torch.equal(whole[-1], alone[0])
    assert not whole[1].any() and alone.any()


# Offsets that nobody checked -------------------------------------------------------------------------------------

BAD_OFFSETS = {
    "negative": (-256, 256, 512),
    "most negative": (-(2**31), -(2**31), 512),
    "decreasing": (768, 256, 512),
    "down to zero": (512, 768, 0),
    "no multiples of 256": (100, 301, 703),
    "beyond M": (256, 512, 4096),
    "far beyond M": (256, 2**30, 2**31 - 256),
    "all far beyond M": (2**31 - 1,) * 3,
}
HAVE_OFFSETS = [*calls.CASES, "quantize_columns", "reduce_dbias"]


def check_bad_offsets(name: str) -> None:
    """The call ends, writes nothing outside its outputs, and leaves the device working."""
    good = make(name)
    want = bits(good())
    for text, values in BAD_OFFSETS.items():
        for out in (False, True) if name in calls.OUT else (False,):
            call = make(name, out=out)
            call.arguments["padded_offsets"].copy_(torch.tensor(values, dtype=torch.int32))
            if DRY_RUN or os.environ.get("CUDNN_GROUPED_VALIDATE") == "1":
                with pytest.raises(RuntimeError, match=r"^padded_offsets\[\d\]: expected"):
                    call()
                continue
            inputs = bits(call.inputs())
            call()
            synchronize()
            call.guarded.check()
            assert all(torch.equal(x, y) for x, y in zip(bits(call.inputs()), inputs, strict=True)), text
            assert same(good(), want), text


@pytest.mark.parametrize("name", HAVE_OFFSETS)
def test_bad_offsets(name):
    in_a_process(f"t.check_bad_offsets({name!r})", timeout=120)


def test_bad_offsets_are_errors_where_they_are_validated():
    """CUDNN_GROUPED_VALIDATE=1 reads the offsets, on any device."""
    in_a_process("[t.check_bad_offsets(name) for name in t.HAVE_OFFSETS]", CUDNN_GROUPED_VALIDATE="1")


@needs_cuda
def test_validation_is_refused_in_a_capture():
    code = "import pytest, torch; pytest.raises(RuntimeError, t.Graph, t.make('mm'))"
    in_a_process(code, CUDNN_GROUPED_VALIDATE="1")


# Addresses -------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("name", ["srelu", "glu_bf16"])
def test_bias_at_an_odd_address(name):
    """An FP32 bias need only be aligned to its 4 bytes."""
    call = make(name)
    want = bits(call())
    bias = call.arguments["bias"]
    assert bias.dtype == torch.float32
    room = torch.empty(bias.numel() + 1, device=DEVICE)
    assert room.data_ptr() % 8 == 0
    call.arguments["bias"] = room[1:].view(bias.shape).copy_(bias)
    assert same(call(), want)
