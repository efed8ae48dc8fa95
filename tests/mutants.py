"""Does the suite notice a broken product? Patches a copy of the sources, builds the CPU library, runs a few tests.

python tests/mutants.py            all mutants
python tests/mutants.py NAME ...   some of them
python tests/mutants.py --list

Each mutant is one textual change of a copy of csrc. libcudnn_grouped.so is rebuilt from the copy beside a copy of the
Python package, and the named tests must fail against it; against the unpatched copy they must pass.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX") or shutil.which("g++") or "c++"
FLAGS = "-std=c++17 -O2 -fPIC -pthread -fvisibility=hidden -fno-math-errno -fno-trapping-math -Icsrc".split()
# Where mutations bite: sources that hold the arithmetic. All others are compiled once.
ARITHMETIC = ("csrc/cpu/kernels.cc", "csrc/cpu/engine.cc")
OPERATORS = ("test_dsrelu.py", "test_dglu.py")
GLU = ("test_dglu.py",)


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `file`. `tests`: files under tests/, with `select` as pytest's -k."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple = OPERATORS
    select: str = "pairwise"


MUTANTS = [
    # The four that must never pass.
    Mutant(
        "K: last block of 32 dropped",
        "csrc/cpu/multiply.h",
        "int const count = int(p.k - k < kDepth ? p.k - k : kDepth);",
        "int const count = int(p.k - k < kDepth ? p.k - k : kDepth) - (p.k - k > 32 ? 32 : 0);",
    ),
    Mutant(
        "K: second slice of 256 dropped",
        "csrc/cpu/multiply.h",
        "for (int64_t k = 0; k < p.k; k += kDepth) {",
        "for (int64_t k = 0; k < (p.k < kDepth ? p.k : kDepth); k += kDepth) {",
    ),
    Mutant(
        "gate and up of C swapped",
        "csrc/cpu/epilogue.h",
        "+ w * kBlock, c[w], count",
        "+ (kWidth - 1 - w) * kBlock, c[w], count",
        GLU,
    ),
    Mutant(
        "gate and up of D swapped",
        "csrc/cpu/epilogue.h",
        "store_block(p, tile, row, d_column + w * kBlock, count",
        "store_block(p, tile, row, d_column + (Step::kBlocksOut - 1 - w) * kBlock, count",
        GLU,
    ),
    Mutant("alpha instead of alpha squared", "csrc/cpu/epilogue.h", "if (p.alpha_squared) alpha *= alpha;", "", GLU),
    Mutant(
        "scale rounded down",
        "csrc/core/number_formats.h",
        "(u + 0x7fffffu) >> 23",
        "u >> 23",
        (*OPERATORS, "test_quantize.py"),
        "pairwise or corner",
    ),
    # Formulas.
    Mutant("alpha squared in dsReLU", "csrc/cpu/epilogue.h", "if (p.alpha_squared) alpha *= alpha;", "alpha *= alpha;"),
    Mutant(
        "prob in dprob", "csrc/core/activation.h", "rp * swish}, r * up * swish}", "rp * swish}, rp * up * swish}", GLU
    ),
    Mutant(
        "beta ignored",
        "csrc/cpu/epilogue.h",
        "beta = p.beta ? p.beta[expert] : 1.f;",
        "beta = 1.f;",
        GLU,
    ),
    Mutant(
        "bound of the gate excluded", "csrc/core/elementary.h", "return x > high ? 0.f", "return x >= high ? 0.f", GLU
    ),
    Mutant("bound of up excluded", "csrc/core/elementary.h", "(clamped > x)", "(clamped >= x)", GLU),
    Mutant(
        "offset before the clamp",
        "csrc/core/activation.h",
        "at_least(at_most(x[1], clamp_max), clamp_min);",
        "at_least(at_most(x[1] + linear_offset, clamp_max), clamp_min) - linear_offset;",
        GLU,
    ),
    Mutant(
        "roles of C exchanged",
        "csrc/core/activation.h",
        "gradient(c_is_preactivation ? c[0] : r,",
        "gradient(c_is_preactivation ? r : c[0],",
    ),
    Mutant(
        "soft clamp's slope left out",
        "csrc/core/activation.h",
        "slope = kClamped ? product * b.derivative_factor : product",
        "slope = product",
    ),
    Mutant(
        "epilogue_op srelu not squared",
        "csrc/core/activation.h",
        "? positive : positive * positive",
        "? positive : positive",
        GLU,
    ),
    Mutant(
        "situ betas exchanged",
        "csrc/core/activation.h",
        "g = bounded_tanh(x[0], beta1), u = bounded_tanh(x[1], beta2)",
        "g = bounded_tanh(x[0], beta2), u = bounded_tanh(x[1], beta1)",
        GLU,
    ),
    # Quantiser and layout.
    Mutant("e5m2 limit 128", "csrc/core/block_quantize.h", "kReciprocal = 1.f / 57344.f", "kReciprocal = 1.f / 128.f"),
    Mutant("e4m3 limit 240", "csrc/core/block_quantize.h", "kReciprocal = 1.f / 448.f", "kReciprocal = 1.f / 240.f"),
    Mutant(
        "norm_const not in the scale",
        "csrc/core/block_quantize.h",
        "return (amax * reciprocal_largest) * norm;",
        "return amax * reciprocal_largest;",
    ),
    Mutant(
        "norm_const multiplied first",
        "csrc/core/block_quantize.h",
        "return (amax * reciprocal_largest) * norm;",
        "return amax * (reciprocal_largest * norm);",
        ("test_quantize.py",),
        "corner or random",
    ),
    Mutant(
        "column form ignored",
        "csrc/cpu/epilogue.h",
        "(p.discrete_col_sfd ? discrete_column_base(first_row, width, kQuantBlock) : 0)",
        "0",
    ),
    Mutant(
        "columns quantised with row factors",
        "csrc/cpu/epilogue.h",
        "Format::encode(d[r][i] * column_factor[i])",
        "Format::encode(d[r][i] * row_factor[r])",
    ),
    Mutant(
        "scale atom: rows in order", "csrc/core/scale_layout.h", "(r % 32) * 16 + ((r / 32) % 4) * 4", "(r % 128) * 4"
    ),
    Mutant(
        "ties away from even",
        "csrc/core/number_formats.h",
        "((bits + ((1u << (kShift - 1)) - 1) + ((bits >> kShift) & 1)) >> kShift)",
        "((bits + (1u << (kShift - 1))) >> kShift)",
        (*OPERATORS, "test_number_formats.py"),
        "pairwise or encodes",
    ),
    Mutant("BF16 truncated", "csrc/core/number_formats.h", "(u + 0x7fffu + ((u >> 16) & 1)) >> 16", "u >> 16"),
    Mutant(
        "FP4 nibbles exchanged",
        "csrc/cpu/quantise.h",
        "decode_e2m1(data[at / 2] >> (at % 2 * 4) & 15)",
        "decode_e2m1(data[at / 2] >> (4 - at % 2 * 4) & 15)",
        ("test_quantize.py",),
        "dequantize",
    ),
    # Reductions, tails, determinism.
    Mutant(
        "dbias of the first 128 rows only",
        "csrc/cpu/engine.cc",
        "slot < end_of(p, g) / kDbiasSlotRows; ++slot) {",
        "slot < start_of(p, g) / kDbiasSlotRows + 1; ++slot) {",
    ),
    Mutant(
        "dbias overwritten",
        "csrc/cpu/engine.cc",
        "encode_bf16((p.sums_are_new ? 0.f : decode_bf16(out[i])) + sum[i])",
        "encode_bf16(sum[i])",
    ),
    Mutant("dprob overwritten", "csrc/cpu/engine.cc", "sum : p.dprob[row] + sum;", "sum : sum;"),
    Mutant(
        "dprob of the first N tile only",
        "csrc/cpu/engine.cc",
        "slot < partials.column_tiles; ++slot",
        "slot < 1; ++slot",
    ),
    Mutant("tail of D not written", "csrc/cpu/engine.cc", "  zero_tails(p, rows);\n", "  (void)zero_tails;\n"),
    Mutant("scales of the tail not written", "csrc/cpu/engine.cc", "  zero_scales(p);\n", "  (void)zero_scales;\n"),
    Mutant(
        "NaN dropped from amax",
        "csrc/cpu/engine.cc",
        "return a != a || a > b ? a : b;",
        "return b > a ? b : a;",
        ("test_isolation.py",),
        "nan",
    ),
    Mutant(
        "dprob: order of N tiles varies",
        "csrc/cpu/engine.cc",
        "sum += partials.dprob[row * partials.dprob_slots + slot];",
        "static int calls = 0; calls += row + slot == 0;\n"
        "sum += partials.dprob[row * partials.dprob_slots + (calls % 2 ? slot : partials.column_tiles - 1 - slot)];",
        ("test_determinism.py",),
        "twenty",
    ),
    Mutant(
        "dbias: order of rows varies",
        "csrc/cpu/engine.cc",
        "for (int64_t i = 0; i < count; ++i) sum[i] += partials.dbias[slot * columns + first + i];",
        "static int calls = 0; calls += slot + first == 0;\n"
        "int64_t const at = calls % 2 ? slot : (start_of(p, g) + end_of(p, g)) / kDbiasSlotRows - 1 - slot;\n"
        "for (int64_t i = 0; i < count; ++i) sum[i] += partials.dbias[at * columns + first + i];",
        ("test_determinism.py",),
        "twenty",
    ),
    Mutant(
        "reduce_dbias reads its neighbour",
        "csrc/cpu/engine.cc",
        "for (int64_t slot = begin; slot < end; ++slot) sum += decode",
        "for (int64_t slot = begin; slot <= end; ++slot) sum += decode",
        ("test_dsrelu.py",),
        "workspaces or reduce",
    ),
    # Operands.
    Mutant(
        "scale of the next block",
        "csrc/cpu/multiply.h",
        "scales[layout.at(row, (k + begin) / block)]",
        "scales[layout.at(row, (k + begin + block) / block)]",
    ),
    Mutant(
        "every expert's B is the first",
        "csrc/cpu/multiply.h",
        "static_cast<char const*>(p.b) + expert * p.b_expert_bytes",
        "static_cast<char const*>(p.b)",
    ),
    Mutant(
        "offsets are not checked",
        "csrc/core/check.cc",
        "if (end % kRowAlignment) {",
        "if (false) {",
        ("test_operator_errors.py",),
        "malformed",
    ),
    Mutant(
        "alignment is not checked",
        "csrc/core/check.cc",
        "  if (past) {",
        "  if (past < 0) {",
        ("test_operator_errors.py",),
        "malformed",
    ),
]

# Builds that must pass: the kernels of the older instruction sets, which this machine would not choose.
VARIANTS = {"plain x86-64": [], "x86-64-v2": ["-march=x86-64-v2"], "x86-64-v3": ["-march=x86-64-v3"]}


class Workshop:
    """A temporary copy of the sources and of the package, whose CPU library is rebuilt for each mutant."""

    def __init__(self, folder: Path, march: list):
        self.folder, self.march = folder, march
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        package = ROOT / "cudnn_grouped"
        # The bindings are taken as they are: built from other headers than these they would misread the structs.
        built = (package / "libcudnn_grouped_torch.so").stat().st_mtime
        newer = [p.name for p in (ROOT / "csrc/core").glob("*.h") if p.stat().st_mtime > built]
        if newer:
            raise RuntimeError(f"build the package first: {', '.join(newer)} changed after libcudnn_grouped_torch.so")
        # Without the CUDA library: a process here must load the rebuilt libraries and nothing else.
        ignore = shutil.ignore_patterns("__pycache__", "libcudnn_grouped.so", "libcudnn_grouped_cuda.so")
        shutil.copytree(package, folder / "cudnn_grouped", ignore=ignore)
        # One instruction set is enough here: the engine's choice among three is cut out.
        engine = folder / "csrc/cpu/engine.cc"
        choice = "#if defined(__x86_64__)\nnamespace v2 {"
        engine.write_text(replaced(engine.read_text(), choice, "#if 0\nnamespace v2 {"))
        sources = sorted((folder / "csrc/core").glob("*.cc")) + sorted((folder / "csrc/cpu").glob("*.cc"))
        self.sources = [str(source.relative_to(folder)) for source in sources]
        self.build(self.sources)

    def build(self, sources) -> None:
        def compile_one(source):
            flags = [*FLAGS, '-DCUDNN_GROUPED_VERSION="mutant"']
            if source == "csrc/cpu/kernels.cc":
                flags += ["-DCUDNN_GROUPED_ISA=base", *self.march]
            out = source.replace("/", "_") + ".o"
            return subprocess.run([CXX, *flags, "-c", source, "-o", out], cwd=self.folder, check=True)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_one, sources))
        objects = [source.replace("/", "_") + ".o" for source in self.sources]
        library = "cudnn_grouped/libcudnn_grouped.so"
        link = [
            CXX,
            "-shared",
            "-pthread",
            "-Wl,--exclude-libs,ALL",
            "-Wl,-soname,libcudnn_grouped.so",
            *objects,
            "-o",
            library,
        ]
        subprocess.run(link, cwd=self.folder, check=True)

    def run(self, tests, select) -> subprocess.CompletedProcess:
        """pytest on some files of tests/ against the copy: the copy's folder comes first on the path."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-k", select]
        command += [str(ROOT / "tests" / test) for test in tests]
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "CUDNN_GROUPED_EXPECTED_AT": str(self.folder)}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)

    def passes(self, tests, select) -> bool:
        """0: all passed. 1: some failed, or the process died in the product. Anything else is a fault of this tool."""
        result = self.run(tests, select)
        if result.returncode == 0:
            return True
        print(result.stdout[-2000:], result.stderr[-1000:], sep="\n")  # pytest shows it where a pass was expected
        if result.returncode in (-signal.SIGTERM, -signal.SIGKILL) or result.returncode > 1:
            raise RuntimeError(
                f"pytest ended with {result.returncode}:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
            )
        return False

    def is_caught(self, mutant: Mutant) -> bool:
        path = self.folder / mutant.file
        original = path.read_text()
        touched = sorted({*ARITHMETIC, *([mutant.file] if mutant.file.endswith(".cc") else [])})
        try:
            path.write_text(replaced(original, mutant.old, mutant.new))
            self.build(touched)
            return not self.passes(mutant.tests, mutant.select)
        finally:
            path.write_text(original)
            self.build(touched)


def replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"expected once in the source, found {text.count(old)} times: {old!r}")
    return text.replace(old, new)


def everything(chosen) -> tuple:
    """All test files of some mutants, and a selection that holds each of theirs."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    return tests, " or ".join(sorted({mutant.select for mutant in chosen}))


@contextmanager
def workshop(march=("-march=native",)):
    with tempfile.TemporaryDirectory(prefix="cudnn_grouped_mutants_") as folder:
        yield Workshop(Path(folder), list(march))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to try (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0
    chosen = [m for m in MUTANTS if not arguments.names or m.name in arguments.names]
    survivors = []
    with workshop() as shop:
        if not shop.passes(*everything(chosen)):
            print("the unpatched copy fails")
            return 2
        for mutant in chosen:
            caught = shop.is_caught(mutant)
            print(f"{'caught' if caught else 'SURVIVED':8}  {mutant.name}", flush=True)
            survivors += [] if caught else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
