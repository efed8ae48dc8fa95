"""The machine code of a kernel of csrc/sm100 as a graph: its blocks, its loops, and the longest way round a loop; what its
instructions are."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import product_build  # noqa: E402

CLASSES = {
    "mufu": "MUFU",
    "f32 arith": "FADD FMUL FFMA",
    "f32x2": "FADD2 FMUL2 FFMA2",
    "min/max/cmp/sel": "FMNMX FMNMX3 FSETP FSEL FCHK FSET",
    "half": "HADD2 HMUL2 HFMA2 HMNMX2 HSET2",
    "convert": "F2FP F2F F2I I2F I2FP F2IP FRND",
    "uniform": "R2UR S2UR",  # and all that begin with U
    "redux/shfl": "SHFL REDUX CREDUX VOTE VOTEU MATCH",
    "LDS/STS": "LDS STS ATOMS",
    "local": "LDL STL",
    "global/const": "LDG STG LD ST ATOM ATOMG RED REDG LDC LDCU",
    "LDTM": "LDTM STTM",
    "sync/TMA": "BAR SYNCS MEMBAR FENCE WARPSYNC DEPBAR ERRBAR CCTL ELECT UTMACMDFLUSH UTMASTG UTMALDG UTCBAR",
    "branch": "BRA BRX EXIT BSSY BSYNC CALL RET JMP NOP BREAK BMOV YIELD NANOSLEEP",
    "integer": "",  # the rest
}
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}


def class_of(opcode):
    return CLASS_OF.get(opcode) or ("uniform" if opcode.startswith("U") else "integer")


# Cycles of a warp's instruction on a sub-partition's pipes: the rates at which ptxas spaces them, not a measurement.
FMA = dict.fromkeys("FADD FMUL FFMA".split(), 1) | dict.fromkeys("FADD2 FMUL2 FFMA2 HFMA2 IMAD".split(), 2)
ALU = dict.fromkeys(
    "FMNMX FMNMX3 FSETP FSEL FSET F2FP IADD3 IADD VIADD LOP3 PLOP3 SHF SEL PRMT LEA ISETP MOV VIMNMX VIMNMX3 IABS BMSK FLO "
    "POPC SGXT VIADDMNMX P2R R2P I2FP IMNMX HMNMX2 HADD2 HMUL2 HSET2".split(),
    2,
)
PIPES = {"FMA": FMA, "ALU": ALU, "MUFU": {"MUFU": 8}}


def find_nvdisasm():
    """Beside nvcc, in the wheel nvidia-cuda-nvdisasm, or on the PATH."""
    build = product_build.load()
    folders = [bin for nvidia in build.package_folders("nvidia") for bin in sorted(nvidia.glob("cu*/bin"))]
    beside = [folder / "nvdisasm" for folder in [build.find_nvcc().parent, *folders]]
    return next((path for path in beside if path.exists()), shutil.which("nvdisasm"))


def run(*command):
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def nvcc_release():
    return re.search(r"release ([^,]+)", run(product_build.load().find_nvcc(), "--version"))[1]


@cache
def disassemble(kernel, arch):
    """The text of nvdisasm for csrc/sm100's kernel with that epilogue, compiled as setup.py does, with source lines."""
    build, folder = product_build.load(), ROOT / "build" / "sm100_model"
    folder.mkdir(parents=True, exist_ok=True)
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(
        '#include "sm100/grouped_gemm.h"\n'
        "namespace cudnn_grouped::sm100 {\n"
        f"using TheEpilogue = {kernel};\n"
        "template __global__ void grouped_gemm<TheEpilogue>(\n"
        "    __grid_constant__ KernelArguments<TheEpilogue::Activation> const);\n"
        "}\n"
    )
    include = ["-Icsrc", "-isystem", build.find_cutlass()]
    run(
        build.find_nvcc(),
        *build.NVCC_FLAGS,
        "-lineinfo",
        *include,
        *build.gencode([arch]),
        "-cubin",
        source,
        "-o",
        cubin,
    )
    return run(find_nvdisasm(), "-c", "-gi", "-hex", cubin)


@cache
def source_line(path, number):
    lines = path.read_text().splitlines()
    return (path.name, number, lines[number - 1].strip() if number <= len(lines) else "")  # ptxas errs at times


@dataclass
class Instruction:
    text: str
    lines: tuple  # (file, number, text) of each call that it was inlined through, the innermost first
    stall: int = 0
    opcode: str = ""
    target: str | None = None
    conditional: bool = False

    def __post_init__(self):
        guard, body = re.match(r"(@!?U?P\w+ +)?(.*)", self.text).groups()
        self.opcode = body.split()[0].split(".")[0]
        if self.opcode == "BRA":
            self.target = re.search(r"`\((\.L_\w+)\)", body)[1]
        self.conditional = bool(guard or re.match(r"BRA\S*\s+!?U?P\w+,", body) or body.startswith("BRA.DIV"))

    @property
    def diverged(self):
        """A branch to code for a warp whose lanes are not together. They are."""
        return "BRA.DIV" in self.text


def parse(text):
    """(instructions, {label: index of an instruction})"""
    instructions, labels, lines, done = [], {}, [], True
    for line in text.splitlines():
        if found := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
            lines = [] if done else lines
            lines.append(source_line((ROOT / found[1]).resolve(), int(found[2])))
            done = False
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x", line):
            instructions.append(Instruction(found[1], tuple(lines)))
            done = True
        elif instructions and (found := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)):
            instructions[-1].stall = int(found[1], 16) >> 41 & 15  # the second half of the last one
        elif found := re.match(r"(\.L_\w+):", line):
            labels[found[1]] = len(instructions)
    return instructions, labels


class Graph:
    """Blocks of instructions, which of them follow which, and the natural loops."""

    def __init__(self, instructions, labels):
        ends = [i + 1 for i, x in enumerate(instructions) if x.opcode in ("BRA", "EXIT", "RET")]
        starts = sorted({0, *ends, *(labels[x.target] for x in instructions if x.target)} - {len(instructions)})
        at = {start: number for number, start in enumerate(starts)}
        self.blocks = [instructions[a:b] for a, b in zip(starts, [*starts[1:], len(instructions)])]
        self.next = []
        for number, block in enumerate(self.blocks):
            last, follows = block[-1], []
            if last.opcode not in ("BRA", "EXIT", "RET") or last.conditional:
                follows.append(number + 1)
            if last.target and not last.diverged:
                follows.append(at[labels[last.target]])
            self.next.append([n for n in follows if n < len(self.blocks)])
        self.before = [[] for _ in self.blocks]
        for number in self.reachable():
            for n in self.next[number]:
                self.before[n].append(number)
        self.find_loops()

    def reachable(self):
        found, stack = {0}, [0]
        while stack:
            new = set(self.next[stack.pop()]) - found
            found |= new
            stack += new
        return sorted(found)

    def find_loops(self):
        reachable = self.reachable()
        over = {n: set(reachable) for n in reachable} | {0: {0}}  # the blocks that every way to one passes
        changed = True
        while changed:
            changed = False
            for n in reachable[1:]:
                new = set.intersection(*(over[b] for b in self.before[n])) | {n}
                changed |= new != over[n]
                over[n] = new
        self.over, self.loops = over, {}  # loops: header: its blocks
        for n in reachable:
            for header in set(self.next[n]) & over[n]:
                body, stack = self.loops.setdefault(header, {header}), [n]
                while stack:
                    if (b := stack.pop()) not in body:
                        body.add(b)
                        stack += self.before[b]

    def around(self, opcode):
        """The loops around the first such instruction, the innermost first."""
        place = next(n for n in self.reachable() if any(x.opcode == opcode for x in self.blocks[n]))
        return sorted((h for h, body in self.loops.items() if place in body), key=lambda h: len(self.loops[h]))

    def turn(self, header, runs, weight):
        """The blocks of a loop's turn: the way from header to header, of blocks that run, with the most instructions."""

        @cache
        def most(n):
            if not runs(n):
                return None
            ways = [(0, ())] if header in self.next[n] else []
            # An inner loop is gone through once.
            ways += [most(t) for t in self.next[n] if t in self.loops[header] and t not in self.over[n]]
            count, way = max((way for way in ways if way), default=(0, None))
            return way is not None and (count + weight(n) * len(self.blocks[n]), (n, *way))

        return most(header)[1]
