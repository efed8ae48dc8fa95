"""The same bits in every run and with every number of threads."""

import os
import subprocess
import sys
import threading

import cases
import pytest
import torch
from cases import Case, operator

# Three N tiles (the sum of two is the same in any order) and ragged experts, or an order that varies would not show.
RAGGED = (256, 256, 1280, 1536, 2048)
SEVERAL = [
    Case("dsrelu", RAGGED, n=528, k=96, d="e4m3", dbias=True),
    Case("dsrelu", RAGGED, n=528, k=96, ab="fp4", sf="e4m3", vec=16, dbias=True),
    Case("dglu", RAGGED, n=544, k=96, d="e4m3", dbias=True, discrete_col_sfd=True),
    Case("dglu", RAGGED, n=544, k=96, ab="bf16", vec=16, dbias=True, options={"act_func": "dgeglu"}),
    Case("dglu", RAGGED, n=544, k=96, ab="fp4", dbias=True, options={"act_func": "dsituglu"}),
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def bits(outputs: dict) -> dict:
    return {name: cases.raw(tensor).clone() for name, tensor in outputs.items()}


@pytest.mark.parametrize("case", SEVERAL, ids=str)
@pytest.mark.parametrize("deterministic", [True, None])
def test_twenty_runs(case, deterministic, threads):
    """20 runs with 1 and with 2 threads, and 3 with 4 threads: one set of bits. None means True for an operator."""
    built = cases.build(case)
    built.keywords["deterministic"] = deterministic
    reference = bits(cases.call(built)[0])
    assert all(reference[name].any() for name in ("d_row", "dprob", "dbias"))
    for count, runs in ((1, 10), (2, 10), (4, 3)):
        threads(count)
        for _ in range(runs):
            for name, tensor in bits(cases.call(built)[0]).items():
                assert torch.equal(tensor, reference[name]), (name, count)


def test_twenty_runs_of_sums_that_cancel(threads):
    """Eight blocks of the same 128 rows with weights that add up to zero: dbias is all rounding error, so BF16 shows
    each change of the order in which the blocks are added."""
    case = Case("dsrelu", (1024,), n=96, k=64, d="f32", dbias=True, sf_form="flat")
    built = cases.build(case)
    for i in (0, 2):
        rows = cases.raw(built.positional[i])[:128]
        built.positional[i] = rows.repeat(8, 1, 1).view(built.positional[i].dtype)
    atoms = cases.raw(built.keywords["sfa"]).view(8, -1)
    atoms.copy_(atoms[:1].clone().expand_as(atoms))
    weights = torch.tensor([1.0, -0.3, 0.7, -1.9, 0.61, -0.37, 1.23, 0.0])
    weights[-1] = -weights.sum()
    built.positional[5].copy_((weights[:, None] * torch.linspace(0.5, 1.5, 128)).reshape(-1, 1, 1))
    reference = bits(cases.call(built)[0])
    assert reference["dbias"].any()
    for count, runs in ((1, 10), (2, 10), (4, 3)):
        threads(count)
        for _ in range(runs):
            for name, tensor in bits(cases.call(built)[0]).items():
                assert torch.equal(tensor, reference[name]), (name, count)


def test_large_n(threads):
    """N = 2880, 12 tiles of 256: the size at which an unordered dprob shows."""
    built = cases.build(Case("dsrelu", (256, 512), n=5440, k=32, dbias=True))
    reference = bits(cases.call(built)[0])
    for count in (1, 2, 3) * 3:
        threads(count)
        for name, tensor in bits(cases.call(built)[0]).items():
            assert torch.equal(tensor, reference[name]), (name, count)


def test_reduce_dbias(threads):
    generator = torch.Generator().manual_seed(0)
    slots = torch.randn(64, 320, 1, generator=generator).to(torch.bfloat16)
    offsets = torch.tensor([256, 256, 4096, 8192], dtype=torch.int32)
    results = []
    for count in (1, 2, 3):
        threads(count)
        dbias = torch.zeros(4, 320, 1, dtype=torch.bfloat16)
        operator("reduce_dbias")(slots, offsets, dbias)
        results.append(dbias)
    assert all(torch.equal(r, results[0]) for r in results)


def test_quantize(threads):
    x = torch.randn(512, 288, generator=torch.Generator().manual_seed(0))
    results = []
    for count in (1, 2, 3):
        threads(count)
        for axis in ("row", "col"):
            results.append(operator("quantize")(x, cases.DTYPES["e4m3"], cases.DTYPES["e8m0"], 32, axis=axis))
    for i, (data, scales) in enumerate(results):
        want = results[i % 2]
        assert torch.equal(cases.raw(data), cases.raw(want[0]))
        assert torch.equal(cases.raw(scales), cases.raw(want[1]))


def test_reordered_experts_keep_their_bits():
    """The same experts in another order: each expert's rows, dbias and amax are the same bits."""
    case = Case("dglu", (256, 768, 1024), n=96, k=64, dbias=True, weights="list_k", sf_form="flat")
    built = cases.build(case)
    first = cases.call(built)[0]
    order = [2, 0, 1]
    spans = [(0, 256), (256, 768), (768, 1024)]
    rows = torch.cat([torch.arange(*spans[e]) for e in order])
    moved = cases.build(case)
    for i in (0, 2, 6):
        tensor = built.positional[i]
        moved.positional[i] = cases.raw(tensor)[rows].contiguous().view(tensor.dtype)
    moved.positional[1] = [built.positional[1][e] for e in order]
    moved.positional[3] = torch.tensor([256, 512, 1024], dtype=torch.int32)
    for i in (4, 5):
        moved.positional[i] = built.positional[i][order].contiguous()
    moved.keywords["sfb"] = [built.keywords["sfb"][e] for e in order]
    # SFA: whole atoms of 128 rows, which move with their expert.
    atoms = built.keywords["sfa"].view(torch.uint8).view(8, -1)[rows[::128] // 128].reshape(-1)
    moved.keywords["sfa"] = atoms.view(cases.DTYPES["e8m0"])
    second = cases.call(moved)[0]
    for name in ("d_row", "dprob"):
        assert torch.equal(cases.raw(second[name]), cases.raw(first[name])[rows])
    for name in ("dbias", "amax"):
        assert torch.equal(cases.raw(second[name]), cases.raw(first[name])[order])


def test_another_process_gives_the_same_bits():
    """No dependence on addresses, hashing or the state of the process."""
    code = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1]); import torch, cudnn_grouped, cases, test_determinism as t\n"
        "torch.set_num_threads(int(sys.argv[2]))\n"
        "h = hashlib.sha256()\n"
        "for case in t.SEVERAL[:3]:\n"
        "    for tensor in cases.call(cases.build(case))[0].values(): h.update(cases.raw(tensor).numpy().tobytes())\n"
        "print(h.hexdigest())"
    )
    folder = os.path.dirname(__file__)
    command = [sys.executable, "-c", code, folder]
    digests = {
        subprocess.run([*command, str(n)], capture_output=True, text=True, check=True).stdout.strip() for n in (1, 2)
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_two_hundred_runs_beside_other_work(threads):
    """200 runs while another thread keeps the cores busy."""
    stop = threading.Event()

    def busy():
        x = torch.randn(256, 256)
        while not stop.is_set():
            x = torch.tanh(x @ x)

    worker = threading.Thread(target=busy)
    worker.start()
    try:
        built = cases.build(SEVERAL[0])
        reference = bits(cases.call(built)[0])
        for i in range(200):
            threads(1 + i % 4)
            for name, tensor in bits(cases.call(built)[0]).items():
                assert torch.equal(tensor, reference[name]), (name, i)
    finally:
        stop.set()
        worker.join()


def test_concurrent_calls():
    """Two Python threads in the same operator at once: no shared state."""
    builts = [cases.build(case) for case in SEVERAL[:2]]
    references = [bits(cases.call(b)[0]) for b in builts]
    failures = []

    def work(i):
        for _ in range(10):
            got = bits(cases.call(builts[i])[0])
            if any(not torch.equal(got[name], references[i][name]) for name in got):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 0, 1)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not failures
