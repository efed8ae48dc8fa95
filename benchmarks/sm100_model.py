"""What the Blackwell engine's epilogue costs, counted in its machine code: nothing here was run on Blackwell hardware.

python benchmarks/sm100_model.py [--json OUT] [--only NAME] [--details|--markdown]    needs nvcc and nvdisasm, no GPU

Compiles the shipped kernels, counts the instructions that one SM sub-partition issues in the epilogue of a tile of 128 x 256
accumulators, and sets the tensor core's cycles and the memory traffic of the tile beside them. docs/blackwell.md says how
to read it.
"""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sm100_sass import CLASSES, PIPES, ROOT, Graph, class_of, disassemble, nvcc_release, parse

ROWS, COLUMNS, WARPS = 128, 256, 2  # of a tile's accumulators in an SM; epilogue warps of a sub-partition
SMS, HERTZ, BYTES_A_SECOND = 148, 1.96e9, 8e12
BYTES_A_CYCLE = BYTES_A_SECOND / SMS / HERTZ  # of HBM, for each SM
MULTIPLY_ADDS = {"mxfp8": 8192, "nvfp4": 16384, "bf16": 4096}  # a cycle and SM, at the dense peak
BITS = {"mxfp8": 8, "nvfp4": 4, "bf16": 16}
SCALE_BLOCK = {"mxfp8": 32, "nvfp4": 16}
DEPTHS = (512, 1024, 2048, 4096, 7168)  # K
# What HBM brings of A and B: L2 keeps a group's rows of A (engine.cu, kGroupRows) for all N, and a panel of B for the group.
GROUP_ROWS, MODEL_N = 2048, 2048


@dataclass(frozen=True)
class Config:
    name: str
    activation: str  # its struct
    peer: int | None = None  # issue slots of a tile, as counted in cuDNN frontend 1.32.0's kernel
    bar: int | None = None
    operands: str = "mxfp8"
    extras: frozenset = frozenset()  # what runs that does not in others: names in RULES
    forward: bool = False

    @property
    def quantised(self):
        return self.operands == "mxfp8"

    @property
    def runs(self):
        """The names in RULES of what runs."""
        return self.extras | ({"quantised"} if self.quantised else set())

    @property
    def gated(self):
        return "GLU" in self.activation

    @property
    def kernel(self):
        direction = "Forward" if self.forward else "Backward"
        return f"Epilogue<cuda::{direction}<{self.activation}>, {str(self.quantised).lower()}, 2>"

    def bytes(self):
        """Of a tile, by what they are. A and B are for each K."""
        elements, width = ROWS * COLUMNS, 2 if self.gated else 1
        c, d = (elements, elements // width) if self.forward else (elements * width, elements * width)
        found = {"C": 2 * c, "D": 2 * d, "scale factors": 2 * d // 32 if self.quantised else 0}
        if not self.forward:
            slots = 2 * ROWS + (d // 32 if "dbias" in self.extras else 0)
            found["slots of dprob and dbias"] = 4 * slots
        bits = BITS[self.operands] + (8 / SCALE_BLOCK[self.operands] if self.operands in SCALE_BLOCK else 0)
        # Through L2: a pair of SMs shares the columns of B. Its scale factors, which both load, are left out.
        found["A and B to an SM, a K"] = bits / 8 * (ROWS + COLUMNS / 2)
        found["A and B from HBM, a K"] = bits / 8 * ROWS * COLUMNS * (1 / MODEL_N + 1 / GROUP_ROWS)
        return found


DBIAS, AMAX = frozenset({"dbias"}), frozenset({"amax"})
CONFIGS = [
    Config("dswiglu mxfp8 -> fp8", "SwiGLU", 11685, 10500),
    Config("dswiglu mxfp8 -> fp8, dbias", "SwiGLU", 13488, extras=DBIAS),
    Config("dgeglu mxfp8 -> fp8", "GeGLU<false>", 13427, 11800),
    Config("dgeglu mxfp8 -> fp8, dbias", "GeGLU<false>", extras=DBIAS),
    Config("dsituglu mxfp8 -> fp8", "SiTUGLU", 13373, 11800),
    Config("dsituglu mxfp8 -> fp8, dbias", "SiTUGLU", extras=DBIAS),
    Config("dsrelu mxfp8 -> fp8", "SquaredReLU<false>", 5834, 5400),
    Config("dsrelu mxfp8 -> fp8, dbias", "SquaredReLU<false>", 6883, extras=DBIAS),
    Config("dswiglu nvfp4 -> bf16, amax", "SwiGLU", 4774, 4700, operands="nvfp4", extras=AMAX),
    Config("dswiglu bf16 -> bf16", "SwiGLU", operands="bf16"),
    Config("swiglu mxfp8 -> fp8, C", "SwiGLU", forward=True),
]
DBIAS_BAR = 1300  # that dbias may add

# Source text of what runs only in configurations that have one of the names behind it.
RULES = {
    "chunk<false>(": "",  # what is_usual() of engine.cu leaves out
    "read_row(p.": "",  # C of other dtypes than BF16 and FP16
    "write_row(p.": "",
    "unpack_fp16(": "",
    "pack_fp16(": "",
    "store_forms<false": "",  # E5M2
    "apply_epilogue_op(p": "",
    "Pair(b.x, b.y)": "",  # the bias
    "float2 const b = n + e": "",
    "clear_past(": "",  # N that ends in a chunk
    "Role::preactivation>": "",
    "next_answer()": "",  # dynamic scheduling
    "discrete_column_base(": "",
    "ptx::store_2d(&p.d_col": "quantised",
    "max_magnitude_of(d": "quantised amax",
    "sum_columns(": "dbias",
    "ptx::warp_max_magnitude(state.amax": "amax",
    "atomicMax(": "amax",
}
# Of the ways to it, one is in the loop over chunks and is taken for one of a warp's, the other by a warp without any.
ONCE_A_TILE = "release();"


# Counting --------------------------------------------------------------------------------------------------------

OURS = ("epilogue.h", "quantise.h", "activation.h", "params.h")  # files whose lines stand for what they call


@dataclass
class Count:
    classes: Counter = field(default_factory=Counter)
    pipes: Counter = field(default_factory=Counter)
    opcodes: Counter = field(default_factory=Counter)
    lines: Counter = field(default_factory=Counter)
    issue: float = 0
    stall: float = 0

    def add(self, x, times):
        self.classes[class_of(x.opcode)] += times
        for pipe, cycles in PIPES.items():
            self.pipes[pipe] += times * cycles.get(x.opcode, 0)
        self.opcodes[x.opcode] += times
        ours = [line for line in x.lines if line[0] in OURS]
        self.lines[(ours or x.lines)[0]] += times
        self.issue += times
        self.stall += times * x.stall


def check_rules():
    """The rules are text of the sources: what they name is there."""
    sources = [path.read_text() for folder in ("sm100", "cuda") for path in (ROOT / "csrc" / folder).glob("*.h")]
    if gone := [rule for rule in [*RULES, ONCE_A_TILE] if not any(rule in text for text in sources)]:
        sys.exit(f"RULES: no line of the sources has {gone}")


def mostly(block, holds):
    """Whether it holds for most of what the block does; where ways meet is written down as part of either."""
    does = [x for x in block if class_of(x.opcode) != "branch"]
    return 2 * sum(map(holds, does)) > len(does)


def count(config, arch):
    """(of a chunk, of a tile's other work, chunks of a tile, blocks counted) for one warp."""
    graph = Graph(*parse(disassemble(config.kernel, arch)))
    chunk, tile = graph.around("LDTM")[:2]
    always = set.intersection(*(graph.over[n] for n in graph.before[chunk] if n in graph.loops[chunk]))
    always |= set.intersection(*(graph.over[n] for n in graph.before[tile] if n in graph.loops[tile]))
    waits = {  # loops around a barrier's test: it succeeds at once
        n
        for header, body in graph.loops.items()
        if header not in (chunk, tile) and any("PHASECHK" in x.text for b in body for x in graph.blocks[b])
        for n in body
    }

    out = [rule for rule, names in RULES.items() if not config.runs & set(names.split())]

    def missing(x):
        # An instruction of the line itself may be the condition that stands there.
        lines = x.lines[x.lines[0][2].startswith("if (") :]
        return any(rule in text for *_, text in lines for rule in out)

    @cache
    def runs(n):
        return n not in waits and (n in always or not mostly(graph.blocks[n], missing))

    def once(x):
        return any(text.endswith(ONCE_A_TILE) for *_, text in x.lines)

    inside = graph.loops[chunk]
    of_chunk, of_tile = Count(), Count()
    ways = graph.turn(chunk, runs, lambda n: 1), graph.turn(tile, runs, lambda n: n not in inside)
    chunk_way, tile_way = ways[0], [n for n in ways[1] if n not in inside]
    loads = [x.text for n in chunk_way for x in graph.blocks[n] if x.opcode == "LDTM"]
    chunks = COLUMNS // sum(int(re.search(r"\.x(\d+)", text)[1]) for text in loads)
    for n in (*chunk_way, *tile_way):
        times = 1
        if all(map(once, graph.blocks[n])):
            times = WARPS / chunks if n in inside else 0
        for x in graph.blocks[n]:
            (of_chunk if n in inside else of_tile).add(x, times)
    return of_chunk, of_tile, chunks, [graph.blocks[n] for n in (*chunk_way, *tile_way) if n not in always]


def model(config, arch):
    of_chunk, of_tile, chunks, _ = count(config, arch)

    def total(of):
        return of(of_chunk) * chunks + of(of_tile) * WARPS

    issue, moved = total(lambda c: c.issue), config.bytes()
    pipes = {pipe: total(lambda c, pipe=pipe: c.pipes[pipe]) for pipe in PIPES}
    # What ptxas put between a warp's instructions; its warps fill each other's gaps.
    schedule = total(lambda c: c.stall) / WARPS
    epilogue = {"issue": issue, **pipes, "schedule": schedule}
    mma = ROWS * COLUMNS / MULTIPLY_ADDS[config.operands]
    once = sum(size for what, size in moved.items() if "a K" not in what) / BYTES_A_CYCLE
    hbm = moved["A and B from HBM, a K"] / BYTES_A_CYCLE
    bounds = {}
    for k in DEPTHS:
        cycles = epilogue | {"MMA": mma * k, "HBM": once + hbm * k}
        which = max(cycles, key=cycles.get)
        bounds[k] = {"bound": which, "cycles": round(cycles[which])}
    hidden = max(epilogue.values()) / mma
    return {
        "bar": config.bar,
        "cudnn_frontend_1_32_0": config.peer,
        "issue": issue,
        "chunk": of_chunk.issue,
        "chunks": chunks,
        "tile": of_tile.issue,
        "classes": {name: total(lambda c, name=name: c.classes[name]) for name in CLASSES},
        "opcodes": {
            name: total(lambda c, name=name: c.opcodes[name]) for name in sorted({*of_chunk.opcodes, *of_tile.opcodes})
        },
        "pipes": pipes,
        "schedule": schedule,
        "bytes": moved,
        "mma_cycles_a_k": mma,
        "hbm_cycles": [once, hbm],
        "hidden_from_k": hidden,
        "mma_bound_from_k": max(hidden, once / (mma - hbm)),
        "bounds": bounds,
    }


# The simulator ---------------------------------------------------------------------------------------------------

# What ptxas keeps one for one (a packed product and sum become one FFMA2): executed PTX, and SASS with its weight.
SAME = {
    "special functions": (r"(ex2|rcp|rsqrt|sqrt|tanh|div|rem)\.", {"MUFU": 1}),
    "packed": (r"(add|mul)\.f32x2|fma.*f32x2", {"FADD2": 1, "FMUL2": 1, "FFMA2": 2}),
    "maxima over a warp": (r"redux\.", {"CREDUX": 1, "REDUX": 1}),
    "packed conversions": (r"cvt\..*x2", {"F2FP": 1}),
    "shared memory": (r"(ld|st)\.shared", {"LDS": 1, "STS": 1}),
    "tensor stores": (r"cp\.async\.bulk\.tensor\..*global\.shared", {"UTMASTG": 1}),
}


def simulate(config):
    """PTX instructions that the simulator executed, by opcode: of a tile and sub-partition."""
    import cases
    import cases_forward
    from simulated_engine import simulated_engine

    kind = {
        "mxfp8": {"ab": "e4m3", "d": "e4m3"},
        "nvfp4": {"ab": "fp4", "sf": "e4m3", "vec": 16},
        "bf16": {"ab": "bf16", "vec": 16},
    }[config.operands]
    op = "glu" if config.forward else "dglu" if config.gated else "dsrelu"
    options = {"mma_tiler_mn": [256, 256], "cluster_shape_mn": [2, 1]}
    if config.gated:
        options["act_func"] = config.name.split()[0]
    module = cases_forward if config.forward else cases
    found = []
    for tiles in (1, 3):  # of the pair; the difference is free of what a block does once
        extras = {} if config.forward else {"dbias": "dbias" in config.extras}
        case = module.Case(op, offsets=(256,), n=tiles * COLUMNS, k=256, options=options, **kind, **extras)
        built = module.build(case)
        with simulated_engine(sms=2) as simulator:
            module.call(built)
        (report,) = (kernel for name, kernel in simulator.report().items() if "grouped_gemm" in name)
        opcodes = Counter()
        for warp in report["warps"]:
            if warp["warp"] < 4 * WARPS:
                opcodes.update(warp["opcodes"])
        found.append(opcodes)
    few, many = found
    many.subtract(few)
    return {opcode: times / (2 * 2 * 4) for opcode, times in many.items() if times}  # tiles, blocks, sub-partitions


def compare(config, result):
    """Sets what was executed beside what was counted; {what: (executed, counted)}."""
    executed = simulate(config)
    pairs = {}
    for what, (pattern, weights) in SAME.items():
        ran = sum(times for opcode, times in executed.items() if re.match(pattern, opcode))
        pairs[what] = (ran, sum(weight * result["opcodes"].get(opcode, 0) for opcode, weight in weights.items()))
    moves = sum(times for opcode, times in executed.items() if opcode.startswith("mov."))
    return sum(executed.values()) - moves, pairs


# Output ----------------------------------------------------------------------------------------------------------


def table(head, rows, markdown):
    cells = [head, *[[f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    if markdown:
        cells.insert(1, ["---"] * len(head))
    for row in cells:
        if markdown:
            print(f"| {' | '.join(row)} |")
        else:
            print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))))
    print()


def print_report(results, markdown):
    print("Counts of machine code, and a model. Nothing was run on Blackwell hardware.\n")
    print(f"Of a tile of {ROWS} x {COLUMNS} accumulators and an SM sub-partition, all its epilogue warps together")
    rows = []
    for name, r in results.items():
        simulated = r.get("simulator", {}).get("ptx_without_moves", "-")
        peer, bar = r["cudnn_frontend_1_32_0"] or "-", r["bar"] or "-"
        rows.append([name, r["issue"], bar, peer, *r["pipes"].values(), r["schedule"], simulated])
    table(["", "issue", "bar", "cuDNN frontend 1.32.0", "FMA", "ALU", "MUFU", "schedule", "PTX"], rows, markdown)
    for name, r in results.items():
        if name.endswith(", dbias") and (without := results.get(name.removesuffix(", dbias"))):
            print(f"dbias adds {r['issue'] - without['issue']:.0f} to {name.split()[0]} (bar: {DBIAS_BAR})")
    print("\nIssue slots by class")
    kinds = list(next(iter(results.values()))["classes"])
    table(["", *kinds], [[name, *map(float, r["classes"].values())] for name, r in results.items()], markdown)
    print("KiB of a tile; bytes for each K; K from which the epilogue, and HBM too, hide behind the tensor core")
    rows = []
    for name, r in results.items():
        moved = r["bytes"]
        rest = sum(v for what, v in moved.items() if what not in ("C", "D") and "a K" not in what)
        sizes = [f"{size / 1024:.1f}" for size in (moved["C"], moved["D"], rest)]
        of_k = [f"{moved[f'A and B {where}, a K']:.0f}" for where in ("to an SM", "from HBM")]
        rows.append([name, *sizes, *of_k, r["hidden_from_k"], r["mma_bound_from_k"]])
    table(["", "C", "D", "scales, slots", "A and B to an SM", "from HBM", "hidden from K", "and HBM"], rows, markdown)
    print("Cycles of a tile, and what bounds it, by K")
    rows = [[name, *(f"{b['cycles']} {b['bound']}" for b in r["bounds"].values())] for name, r in results.items()]
    table(["K", *map(str, DEPTHS)], rows, markdown)
    for name, r in results.items():
        for what, (ran, counted) in r.get("simulator", {}).get("same", {}).items():
            if ran != counted:
                print(f"{name}: {what}: the simulator executed {ran:.0f}, counted were {counted:.0f}")


def print_details(config, arch):
    of_chunk, of_tile, chunks, conditional = count(config, arch)
    print(f"{config.name}: {chunks} chunks of {of_chunk.issue:.1f}, {WARPS} warps' {of_tile.issue:.0f} beside them")
    for what, of in (("chunk", of_chunk), ("tile", of_tile)):
        print(f"source lines of a {what}:")
        for (file, number, text), times in of.lines.most_common(40):
            print(f"{times:6.1f}  {file}:{number}  {text[:100]}")
    print("blocks that were counted though a branch may pass them by:")
    for block in conditional:
        ((file, number, text), _), *_ = Counter(line for x in block for line in x.lines[::-1][1:]).most_common(1)
        print(f"{len(block):6}  {file}:{number}  {text[:100]}")
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="100f")
    parser.add_argument("--only", default="", help="configurations with this in their name")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--no-simulator", action="store_true", help="it compiles the engine once more, for minutes")
    parser.add_argument("--markdown", action="store_true", help="tables as in docs/blackwell.md")
    parser.add_argument("--details", action="store_true", help="instead: which source lines cost most")
    options = parser.parse_args()
    configs = [config for config in CONFIGS if options.only in config.name]
    check_rules()
    if options.details:
        for config in configs:
            print_details(config, options.arch)
        return
    results = {}
    for config in configs:
        result = results[config.name] = model(config, options.arch)
        if not options.no_simulator:
            ptx, same = compare(config, result)
            result["simulator"] = {"ptx_without_moves": ptx, "same": same}
    print_report(results, options.markdown)
    if options.json:
        report = {
            "what": "counts of SASS and a model; nothing was run on Blackwell hardware",
            "nvcc": nvcc_release(),
            "arch": options.arch,
            "model": {"sms": SMS, "hertz": HERTZ, "bytes_a_second": BYTES_A_SECOND, "n": MODEL_N, "rows": GROUP_ROWS},
            "configurations": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
