"""Forward and backward of nn.GroupedMLP on a GPU, in BF16 and MXFP8, against a BF16 composition of torch's operations:
grouped_mm for the six GEMMs, by its autograd, and a compiled activation that saves the pre-activation. The six GEMMs
alone are timed too: what is left when all else costs nothing.

    python benchmarks/layer.py [SHAPE ...] [--recipes bf16,mxfp8] [--seconds S] [--out FOLDER]
    python benchmarks/layer.py --dry      tiny, on the CPU: does it run

Outputs and gradients are compared with the composition's first. Times as in timing.py; peak memory is what a step allocates
above inputs, parameters and what was there before. Writes layer.json after each shape.
"""

import argparse
import datetime
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import timing
import torch
import torch.nn.functional as F

from cudnn_grouped import nn


class Shape(NamedTuple):
    """Experts L, rows M of all of them, hidden size H, expert width F."""

    experts: int
    rows: int
    hidden: int
    ffn: int
    activation: str = "swiglu"
    bias: bool = False

    @property
    def flop(self):
        return 18 * self.rows * self.hidden * self.ffn


SHAPES = {
    "qwen30": Shape(16, 65536, 2048, 768),
    "qwen235": Shape(8, 65536, 4096, 1536),
    "gptoss": Shape(16, 32768, 2880, 2880, "geglu", bias=True),
}
LIMITS = {"bf16": 2e-2, "mxfp8": 1.2e-1}  # of the difference's norm: a few roundings of BF16, of e4m3
GRADIENTS = ("x", "prob", "w1", "w2", "b1", "b2")


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


class Composition:
    """The layer as torch operations. Gate and up are the halves of w1's rows; rows of an expert come in blocks of 256."""

    def __init__(self, shape, layer, device, compiled):
        self.experts_of_blocks = torch.arange(shape.rows // 256, device=device) // (shape.rows // 256 // shape.experts)
        self.parameters = [halves(layer.fc1_weight.detach()), layer.fc2_weight.detach().clone()]
        if shape.bias:
            self.parameters += [halves(layer.fc1_bias.detach()), layer.fc2_bias.detach().clone()]
        for parameter in self.parameters:
            parameter.requires_grad_()
        activate = functools.partial(self._activate, {"swiglu": swiglu, "geglu": geglu}[shape.activation])
        wrap = (
            functools.partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda function: function
        )
        self.activate, self.add_bias = wrap(activate), wrap(self._add_bias)

    def __call__(self, x, ends, prob):
        w1, w2, *biases = self.parameters
        b1, b2 = (bias[self.experts_of_blocks] for bias in biases) if biases else (None, None)
        c = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
        y = F.grouped_mm(self.activate(c, b1, prob), w2.transpose(1, 2), offs=ends)
        return y if b2 is None else self.add_bias(y, b2, prob)

    def gemms(self, x, ends, dy):
        """A call of the layer's six GEMMs alone."""
        w1, w2 = (weight.detach() for weight in self.parameters[:2])
        x, dc = x.detach(), x.new_empty(len(x), w1.shape[1]).normal_()
        h = dc[:, : w2.shape[2]].contiguous()
        forward = [(x, w1.transpose(1, 2)), (h, w2.transpose(1, 2))]
        operands = [*forward, (dy, w2), (dc, w1), (dy.t(), h), (dc.t(), x)]
        return lambda: [F.grouped_mm(a, b, offs=ends) for a, b in operands]

    @staticmethod
    def _activate(function, c, bias, prob):
        c = c.float() if bias is None else (c.view(-1, 256, c.shape[1]) + bias[:, None].float()).view(c.shape)
        return (function(*c.chunk(2, dim=1)) * prob[:, None]).bfloat16()

    @staticmethod
    def _add_bias(y, bias, prob):
        return (y.view(-1, 256, y.shape[1]) + prob.view(-1, 256, 1) * bias[:, None].float()).view(y.shape).bfloat16()


def halves(x):
    """Rows of gate and up from alternating blocks of 32 to first all gates, then all ups."""
    return x.unflatten(1, (-1, 2, 32)).transpose(1, 2).flatten(1, 3).contiguous()


def step(module, parameters, ends, inputs):
    """Output and the gradients of x, prob and the parameters."""
    x, prob, dy = inputs
    y = module(x, ends, prob)
    return (y, *torch.autograd.grad(y, (x, prob, *parameters), dy))


def make_inputs(shape, device, generator):
    options = {"device": device, "generator": generator}
    x, dy = (torch.randn(shape.rows, shape.hidden, dtype=torch.bfloat16, **options) for _ in range(2))
    prob = torch.rand(shape.rows, **options) * 0.9 + 0.1
    return x.requires_grad_(), prob.requires_grad_(), dy


def differences(results, expected):
    """{output or gradient: norm of the difference over the norm}; gradients of gate and up rows brought to one order."""
    found = {}
    for name, value, other in zip(("y", *(f"d{name}" for name in GRADIENTS)), results, expected):
        value = halves(value) if name in ("dw1", "db1") else value
        difference = torch.linalg.vector_norm(value.float() - other.float())
        found[name] = (difference / torch.linalg.vector_norm(other.float())).item()
    return found


def peak_mib(call, device):
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(name, shape, options):
    device = options.device
    torch._dynamo.reset()
    generator = torch.Generator(device).manual_seed(0)
    ends = torch.arange(1, shape.experts + 1, device=device, dtype=torch.int32) * (shape.rows // shape.experts)
    sets = [make_inputs(shape, device, generator) for _ in range(timing.SETS)]
    torch.manual_seed(0)
    sizes = (shape.experts, shape.hidden, shape.ffn, shape.activation)
    layers = {
        recipe: nn.GroupedMLP(*sizes, recipe=recipe, bias=shape.bias, device=device, dtype=torch.bfloat16)
        for recipe in options.recipes
    }
    first = next(iter(layers.values()))
    composition = Composition(shape, first, device, compiled=device == "cuda")
    calls = {"torch bf16": lambda i: step(composition, composition.parameters, ends, sets[i])}
    expected = calls["torch bf16"](0)
    results = {"torch bf16": {}}
    for recipe, layer in layers.items():
        layer.load_state_dict(first.state_dict())
        call = functools.partial(lambda layer, i: step(layer, list(layer.parameters()), ends, sets[i]), layer)
        try:
            errors = differences(call(0), expected)
        except Exception as error:
            timing.synchronise(device)  # a lost device raises here
            print(f"    ours {recipe}: not run: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        if not all(error <= LIMITS[recipe] for error in errors.values()):
            print(f"    ours {recipe}: wrong, not timed: {errors}")
            continue
        calls[f"ours {recipe}"], results[f"ours {recipe}"] = call, {"differences": errors}
    del expected
    for key, call in calls.items():
        results[key]["peak_mib"] = peak_mib(call, device)
    gemms = [composition.gemms(x, ends, dy) for x, _, dy in sets]
    calls["six GEMMs"], results["six GEMMs"] = lambda i: gemms[i](), {"peak_mib": None}
    for key, times in timing.measure(calls, device, options.seconds).items():
        results[key] |= times
    return {"name": name, "shape": shape._asdict(), "flop": shape.flop, "results": results}


def print_row(row):
    yardstick = row["results"]["torch bf16"]["steady_ms"]
    for name, result in row["results"].items():
        ms, (low, high) = result["steady_ms"], result["quartiles_ms"]
        memory = "" if result["peak_mib"] is None else f"peak {result['peak_mib']:7.0f} MiB"
        clock = f"{result['clock_mhz']:.0f} MHz {result['watt']:.0f} W" if "clock_mhz" in result else ""
        print(
            f"    {name:11} steady {ms:8.3f} ms {row['flop'] / ms / 1e9:5.0f} TF {ms / yardstick:6.3f}x {clock:14}"
            f" interleaved {result['interleaved_ms']:8.3f} ms [{low:.3f} {high:.3f}]  {memory}"
        )
        if "differences" in result:
            print("        " + " ".join(f"{key} {value:.1e}" for key, value in result["differences"].items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; default: all")
    add("--recipes", type=lambda text: text.split(","), default=list(LIMITS), help="default bf16,mxfp8")
    add("--seconds", type=float, help="of each steady state, default 1.0")
    add("--out", type=Path, help="folder of layer.json, default benchmarks/results")
    add("--dry", action="store_true", help="tiny sizes on the CPU; the times mean nothing")
    options = parser.parse_args()
    if unknown := [one for one in (*options.shapes, *options.recipes) if one not in (*SHAPES, *LIMITS)]:
        parser.error(f"unknown {', '.join(unknown)}")
    options.device = timing.device(options.dry)
    options.seconds = options.seconds or (0.01 if options.dry else 1.0)
    results = Path(__file__).parent / "results"
    options.out = options.out or (Path(tempfile.mkdtemp(prefix="layer-dry-")) if options.dry else results)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": "CPU, dry" if options.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [],
    }
    print(f"{report['device']}, torch {report['torch']}")
    for name in options.shapes or SHAPES:
        shape, started = SHAPES[name], time.perf_counter()
        shape = shape._replace(experts=4, rows=1024, hidden=96, ffn=64) if options.dry else shape
        print(f"\n{name} {shape._asdict()}", flush=True)
        report["rows"].append(measure(name, shape, options))
        print_row(report["rows"][-1])
        (options.out / "layer.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"    took {time.perf_counter() - started:.0f} s", flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
