"""The CPU engine against the same mathematics as separate torch operations (dequantise, one matmul per expert,
epilogue, quantise), on the shapes of published mixture-of-experts models scaled to M, N, K <= 2048.

    python benchmarks/cpu.py [--json FILE] [--rounds R] [ID ...]

Calls alternate and medians are compared, so that a busy machine slows both. Extra memory is the high-water mark of the
process during one call, less what it had before and what the call returned.
"""

import argparse
import ctypes
import json
import platform
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

import cudnn_grouped
from cudnn_grouped import eager

LIMIT = 2048
ROWS = 256  # rows of an expert, unless the suite says otherwise


class Suite(NamedTuple):
    """A model's fc2 backward: activation, experts, N (expert width), K (hidden size), row blocks of 256 per expert."""

    activation: str
    experts: int
    n: int
    k: int
    blocks: tuple = ()


SUITES = {
    "base": Suite("dswiglu", 8, 512, 512),
    "base-dsrelu": Suite("dsrelu", 8, 512, 512),
    "h1": Suite("dswiglu", 8, 4096, 8192),
    "h1-dgeglu": Suite("dgeglu", 8, 4096, 8192),
    "h1-dsrelu": Suite("dsrelu", 8, 4096, 8192),
    "dsv3": Suite("dswiglu", 8, 2048, 7168),
    "dsv4f": Suite("dgeglu", 8, 2048, 4096),
    "qwen30": Suite("dswiglu", 16, 768, 2048),
    "qwen235": Suite("dswiglu", 8, 1536, 4096),
    "gptoss": Suite("dgeglu", 16, 2880, 2880),
    "mixtral": Suite("dswiglu", 8, 14336, 4096),
    "nano": Suite("dsrelu", 16, 1856, 2688),
    "super": Suite("dsrelu", 8, 2688, 1024),
    "ultra": Suite("dsrelu", 8, 5120, 2048),
    "k3": Suite("dsituglu", 8, 3072, 3584),
    "glm5": Suite("dswiglu", 32, 2048, 6144),
    "small": Suite("dswiglu", 128, 768, 2048),
    "skew": Suite("dswiglu", 7, 1536, 4096, (5, 0, 1, 0, 1, 0, 1)),
}


def scaled(suite):
    """(experts, M, N, K) with N and K halved until both fit, rounded to what every format takes."""
    n, k = suite.n, suite.k
    while max(n, k) > LIMIT:
        n, k = n // 2, k // 2
    blocks = suite.blocks or (1,) * min(suite.experts, LIMIT // ROWS)
    return blocks, n // 32 * 32, k // 32 * 32


def make(suite, format, generator):
    """The documented wrapper's arguments, random values of order one."""
    activation = activations()[suite.activation]
    blocks, n, k = scaled(suite)
    experts, m = len(blocks), sum(blocks) * ROWS
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(experts, n, k, generator=generator) / k**0.5
    arguments = {
        "c_tensor": torch.randn(m, n * (2 if activation.gated else 1), 1, generator=generator).bfloat16(),
        "padded_offsets": cudnn_grouped.padded_offsets_from_counts(torch.tensor(blocks) * ROWS),
        "alpha_tensor": torch.randn(experts, generator=generator),
        "prob_tensor": torch.rand(m, 1, 1, generator=generator),
        "d_dtype": format.d_dtype,
        "sf_vec_size": format.sf_vec_size,
    }
    if format.block is None:
        arguments |= {
            "a_tensor": a.bfloat16()[..., None],
            "b_tensor": b.bfloat16().permute(1, 2, 0),
            "sfa_tensor": None,
        }
    else:
        arguments["a_tensor"], arguments["sfa_tensor"] = cudnn_grouped.quantize(a[..., None], format.block)
        weights, scales = cudnn_grouped.quantize(b.permute(1, 2, 0), format.block)
        arguments |= {"b_tensor": weights, "sfb_tensor": scales}
    if format.d_dtype == torch.float8_e4m3fn:
        arguments["norm_const_tensor"] = torch.ones(1)
    if activation.gated:
        extra = {"beta_tensor": torch.ones(experts), "dprob_tensor": None, "act_func": activation.name}
        arguments |= extra | {"clamp_grad": "mask"}
    else:
        arguments["c_role"] = "preactivation"
    return arguments


def activations():
    return {activation.name: activation for activation in eager.ACTIVATIONS}


def fused(arguments):
    if "act_func" in arguments:
        return cudnn_grouped.grouped_gemm_dglu_wrapper_sm100(**arguments)
    return cudnn_grouped.grouped_gemm_dsrelu_wrapper_sm100(**arguments)


def status_kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def extra_mib(call):
    """High-water mark of one call, less the memory before it and its results; None where the kernel does not tell."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else memory that the allocator keeps from earlier calls is used unseen
        Path("/proc/self/clear_refs").write_text("5")  # resets the mark
        before = status_kib("VmRSS")
        results = [t for t in call() if t is not None]
        peak = status_kib("VmHWM")
    except (OSError, StopIteration, AttributeError):
        return None
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
    return max(0.0, (peak - before - sum(storages.values()) / 1024) / 1024)


def measure(name, format, rounds):
    suite = SUITES[name]
    arguments = make(suite, format, torch.Generator().manual_seed(0))
    activation = activations()[suite.activation]
    calls = {"fused": lambda: fused(arguments), "eager": lambda: eager.backward(arguments, activation, format)}
    times = {key: [] for key in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    fused_ms, eager_ms = (statistics.median(times[key]) * 1e3 for key in ("fused", "eager"))
    blocks, n, k = scaled(suite)
    memory = [extra_mib(lambda: tuple(fused(arguments))), extra_mib(calls["eager"])]
    return {
        "id": name,
        "operator": suite.activation,
        "formats": f"{format.name} -> {str(format.d_dtype).removeprefix('torch.')}",
        "shape": {"L": len(blocks), "M": sum(blocks) * ROWS, "N": n, "K": k},
        "fused_ms": fused_ms,
        "eager_ms": eager_ms,
        "ratio": eager_ms / fused_ms,
        "fused_extra_mib": memory[0],
        "eager_extra_mib": memory[1],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if unknown := [name for name in options.ids if name not in SUITES]:
        parser.error(f"unknown id {', '.join(unknown)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    columns = f"{'L':>3}{'M':>6}{'N':>6}{'K':>6}{'fused':>10}{'eager':>10}{'ratio':>7}{'extra MiB':>16}"
    print(f"{'id':12}{'operator':10}{'formats':26}{columns}")
    rows = []
    for name in options.ids or SUITES:
        for format in eager.FORMATS:
            row = measure(name, format, options.rounds)
            rows.append(row)
            memory = [
                f"{value:.0f}" if value is not None else "?"
                for value in (row["fused_extra_mib"], row["eager_extra_mib"])
            ]
            print(
                f"{name:12}{row['operator']:10}{row['formats']:26}"
                + "".join(f"{value:>{width}}" for value, width in zip(row["shape"].values(), (3, 6, 6, 6), strict=True))
                + f"{row['fused_ms']:7.1f} ms{row['eager_ms']:7.1f} ms{row['ratio']:6.1f}x{memory[0] + ' / ' + memory[1]:>16}",
                flush=True,
            )
    if options.json:
        report = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
