"""The fused operators on a GPU against what else could be used there: torch, Triton, quack (see gpu_rivals.py).

    python benchmarks/gpu.py [SUITE ...] [--formats bf16,mxfp8] [--contenders E0,ours] [--sections suites] [--out FOLDER]
    python benchmarks/gpu.py --plot gpu.json [more.json ...] [--bars]    plots alone; later files replace rows of earlier
    python benchmarks/gpu.py --dry                                       tiny, on the CPU: does it run

Each contender is compared with a float32 reference, then timed twice: alone in a steady state, and interleaved with the
others (timing.py says why both). Sections: suites; jagged (rows unevenly spread, many small experts); dbias and
deterministic (on and off); host (microseconds per call); energy (what a byte costs). gpu.json is written after each
row.
"""

import argparse
import datetime
import functools
import gc
import json
import tempfile
import time
from pathlib import Path

import gpu_report
import timing
import torch
from gpu_problem import FORMATS, SUITES, Problem, Reference, Suite, balanced, skewed, tiny
from gpu_rivals import CONTENDERS, NotRun, build, label, operator

import cudnn_grouped

SECTIONS = ("suites", "jagged", "dbias", "deterministic", "host", "energy")
DEFAULT_FORMATS = "bf16,mxfp8,nvfp4,mxfp8-bf16"
JAGGED = {
    "16 x 4096": Suite("dswiglu", balanced(16, 65536), 1536, 4096),
    "skew of 65536": Suite("dswiglu", skewed(16, 65536), 1536, 4096),
    "16 x 2048": Suite("dswiglu", balanced(16, 32768), 768, 2048),
    "skew of 32768": Suite("dswiglu", skewed(16, 32768), 768, 2048),
    "128 x 256": Suite("dswiglu", balanced(128, 32768), 768, 2048),
}
SWITCHED = ("h1", "qwen30", "super")
HOST = Suite("dswiglu", balanced(4, 1024), 256, 256)


def environment(options):
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn_grouped": cudnn_grouped.__version__}
    try:
        versions["triton"] = __import__("triton").__version__
    except ImportError:
        versions["triton"] = None
    device = "CPU, dry" if options.dry else torch.cuda.get_device_name()
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "device": device, **versions, "seconds": options.seconds}


def measure(section, name, suite, format, dbias, contenders, options):
    """One row: the contenders on one suite, checked and timed."""
    started = time.perf_counter()
    suite = tiny(suite) if options.dry else suite
    shape = {"activation": suite.activation, "L": len(suite.counts), "M": suite.m, "N": suite.n, "K": suite.k}
    print(f"\n{section}: {name} {format}{' dbias' if dbias else ''} {shape}", flush=True)
    problem = Problem(suite, FORMATS[format], dbias, options.device)
    reference = Reference(problem)
    calls, results, not_run = {}, {}, {}
    for contender in contenders:
        key = label(contender, problem)
        since = time.perf_counter()
        try:
            made = build(contender, problem, reference, options)
            errors, good = reference.errors(made.outputs(made.run(0)))
        except NotRun as reason:
            not_run[key] = str(reason)
        except Exception as error:
            timing.synchronise(options.device)  # a lost device raises here and ends the run: what is written stays
            not_run[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            results[key] = {"errors": errors, "note": made.note, "setup_s": time.perf_counter() - since}
            if good:
                calls[key] = made.run
            else:
                not_run[key] = f"wrong: {errors}"
        ready = (
            f"not run: {not_run[key]}" if key in not_run else f"ready {time.perf_counter() - since:.1f} s {made.note}"
        )
        print(f"    {key:6} {ready}", flush=True)
    del reference
    for key, times in timing.measure(calls, options.device, options.seconds).items():
        results[key] |= times
    row = {
        "section": section,
        "name": name,
        "format": format,
        "dbias": dbias,
        "shape": shape,
        "flop": suite.flop,
        "contenders": {key: results[key] for key in calls},
        "not_run": not_run,
        "wall_s": time.perf_counter() - started,
    }
    gpu_report.print_row(row)
    return row


def measurements(options):
    """(section, name, suite, format, dbias, contenders) of every row, cheap and important ones first."""
    for section in options.sections:
        if section == "suites":
            for format in options.formats:
                for name in options.suites or SUITES:
                    for dbias in with_dbias(options.dbias, SUITES[name]):
                        # MXFP8 in, BF16 out is there for NVFP4 to be compared with.
                        few = [c for c in options.contenders if c in ("E0", "ours")]
                        those = [c for c in options.contenders if format != "bf16" or c != "ours-kept"]
                        yield section, name, SUITES[name], format, dbias, few if "-" in format else those
        elif section == "jagged":
            for format in [f for f in options.formats if f in ("bf16", "mxfp8")]:
                for name, suite in JAGGED.items():
                    yield section, name, suite, format, False, [c for c in options.contenders if c in ("E0", "ours")]
        elif section in gpu_report.ON_AND_OFF:
            for format in [f for f in options.formats if f in ("bf16", "mxfp8")]:
                for name in options.suites or SWITCHED:
                    yield section, name, SUITES[name], format, True, gpu_report.ON_AND_OFF[section]


def with_dbias(choice, suite):
    return {"off": [False], "on": [True], "both": [False, True], "suite": [suite.dbias]}[choice]


def host(options):
    """Microseconds of host time per call, of a problem whose device time is short: {format: {call: us}}."""
    found = {}
    for format in [f for f in options.formats if f in ("bf16", "mxfp8")]:
        problem = Problem(tiny(HOST) if options.dry else HOST, FORMATS[format], False, options.device, sets=1)
        calls = {"operator": operator(problem, 0), "documented wrapper": wrapper(problem)}
        for name in ("E0", "E1"):
            calls[label(name, problem)] = functools.partial(build(name, problem, None, options).run, 0)
        repeats = {"calls": 2, "repeats": 3} if options.dry else {}
        found[format] = {
            name: timing.host_microseconds(lambda _, call=call: call(), options.device, **repeats)
            for name, call in calls.items()
        }
        print(f"host us per call, {format}: " + ", ".join(f"{k} {v:.1f}" for k, v in found[format].items()), flush=True)
    return found


def wrapper(problem):
    """The documented call."""
    inputs, ones = problem.sets[0], torch.ones(len(problem.suite.counts), device=problem.device)
    arguments = {
        "a_tensor": inputs.a[..., None],
        "b_tensor": inputs.b.permute(1, 2, 0),
        "c_tensor": inputs.c[..., None],
        "sfa_tensor": None,
        "padded_offsets": problem.ends,
        "alpha_tensor": ones,
        "beta_tensor": ones,
        "prob_tensor": inputs.prob.view(-1, 1, 1),
        "dprob_tensor": None,
        "d_dtype": torch.float8_e4m3fn if problem.format.quantised else torch.bfloat16,
        "sf_vec_size": problem.format.sf_vec_size,
        "act_func": problem.suite.activation,
    }
    if problem.format.block is not None:
        sfa, sfb = problem.scales(inputs.sfa[None]), problem.scales(inputs.sfb)
        arguments |= {"sfa_tensor": sfa, "sfb_tensor": sfb, "norm_const_tensor": ones[:1]}
    return lambda: cudnn_grouped.grouped_gemm_dglu_wrapper_sm100(**arguments)


def energy(options):
    """What it costs to move a byte between memory and the multiprocessors: a copy of 1 GiB against doing nothing."""
    words = 1 << (10 if options.dry else 28)
    sources = [torch.randn(words, device=options.device) for _ in range(timing.SETS)]
    target = torch.empty_like(sources[0])
    timing.synchronise(options.device)
    time.sleep(0 if options.dry else 2)
    idle = timing.sample(options.device)
    copy = timing.steady(lambda i: target.copy_(sources[i]), options.device, options.seconds)
    found = {"bytes_a_second": 8 * words / copy["steady_ms"] * 1e3}
    if idle:
        found |= {"idle_watt": idle[1], "copy_watt": copy["watt"]}
        found["joule_a_byte"] = (copy["watt"] - idle[1]) / found["bytes_a_second"]
    print("energy: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
    return found


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = lambda text: text.split(",")  # noqa: E731
    add("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; default: all")
    add("--formats", type=names, default=DEFAULT_FORMATS, help=f"default {DEFAULT_FORMATS}")
    add("--contenders", type=names, default=list(CONTENDERS), help=f"default {','.join(CONTENDERS)}")
    add("--sections", type=names, default=list(SECTIONS), help=f"default {','.join(SECTIONS)}")
    add("--dbias", choices=("off", "on", "both", "suite"), default="off", help="suite: as the model has it")
    add("--seconds", type=float, help="of each steady state, default 1.0")
    add("--budget", type=float, default=1e9, help="begin no row after this many seconds")
    add("--tune", type=int, default=8, help="configurations of E3 to try")
    add("--quack", type=Path, help="folder with the installed quack-kernels and its dependencies, for E6")
    add("--out", type=Path, help="folder of gpu.json and the plots, default benchmarks/results")
    add("--plot", type=Path, nargs="+", metavar="FILE", help="only plot these results")
    add("--bars", action="store_true", help="print the ratios against their limits")
    add("--dry", action="store_true", help="tiny sizes on the CPU; the times mean nothing")
    options = parser.parse_args()
    options.device = timing.device(options.dry or bool(options.plot))
    options.seconds = options.seconds or (0.01 if options.dry else 1.0)
    results = Path(__file__).parent / "results"
    options.out = options.out or (Path(tempfile.mkdtemp(prefix="gpu-dry-")) if options.dry else results)
    known = {"suites": SUITES, "formats": FORMATS, "contenders": CONTENDERS, "sections": SECTIONS}
    for name, choices in known.items():
        if unknown := [one for one in getattr(options, name) if one not in choices]:
            parser.error(f"{name}: unknown {', '.join(unknown)}; known: {', '.join(choices)}")
    return options


def run(options):
    report = {**environment(options), "rows": [], "host_us": {}, "energy": {}}
    print(", ".join(f"{key} {value}" for key, value in report.items() if not isinstance(value, list | dict)))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    started = time.perf_counter()
    if "host" in options.sections:
        report["host_us"] = host(options)
    if "energy" in options.sections:
        report["energy"] = energy(options)
    for arguments in measurements(options):
        if time.perf_counter() - started > options.budget:
            print(f"budget spent before {' '.join(map(str, arguments[:2]))} {arguments[3]}", flush=True)
            break
        torch._dynamo.reset()  # every suite compiles anew: a recompilation limit counts all shapes
        report["rows"].append(measure(*arguments, options))
        path.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{time.perf_counter() - started:.0f} s, {path}")
    return report


def main():
    options = parse()
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.plot:
        report = gpu_report.merge([json.loads(path.read_text()) for path in options.plot])
        if len(options.plot) > 1:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    else:
        report = run(options)
    if options.bars:
        gpu_report.print_bars(report["rows"])
    gpu_report.print_sections(report["rows"])
    gpu_report.print_energy(report)
    gpu_report.plot(report, options.out)


if __name__ == "__main__":
    main()
