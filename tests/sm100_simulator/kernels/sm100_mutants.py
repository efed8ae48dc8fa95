"""Planted bugs: one textual change each of small_gemm.cu, and the checks that may be the one to notice it.

All are compiled as one file, a namespace each, so that the headers are read once.
"""

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "small_gemm.cu"
# Reading or overwriting what is not there yet or still needed; which check sees it first depends on the schedule.
UNORDERED = {"race", "in_flight", "uninitialised"}


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once. caught: categories of the simulator's errors; "mismatch": only a wrong result."""

    name: str
    old: str
    new: str
    caught: frozenset


def mutant(name: str, old: str, new: str, *caught: str) -> Mutant:
    return Mutant(name, old, new, frozenset(caught))


WAIT_EMPTY = "Bar::wait(&s.empty[i], stage.phase);"
WAIT_FULL = "Bar::wait(&s.full[i], stage.phase);"
WAIT_ACCUMULATOR = "Bar::wait(&s.accumulator_full[accumulator.index], accumulator.phase);"
RELEASE = "if (cute::elect_one_sync()) Bar::arrive(&s.accumulator_empty[accumulator.index], 0, 1);"
WAIT_LOADS = "cutlass::arch::fence_view_async_tmem_load();"
EXPECT = "if (cta == 0) TxBar::arrive_and_expect_tx(&s.full[i], kBytes);"
INIT_RELEASE = "Bar::init(&s.accumulator_empty[i], 8);"

MUTANTS = [
    # Waits.
    mutant("no wait for a full stage", WAIT_FULL, "", *UNORDERED),
    mutant("no wait for an empty stage", WAIT_EMPTY, "", "race", "in_flight", "mbarrier"),
    mutant("no wait for a full accumulator", WAIT_ACCUMULATOR, "", *UNORDERED),
    mutant(
        "no wait for an empty accumulator",
        "Bar::wait(&s.accumulator_empty[accumulator.index], accumulator.phase);",
        "",
        "race",
        "in_flight",
    ),
    mutant("no wait for tensor-memory loads", WAIT_LOADS, "", "in_flight"),
    mutant("no wait for the staging's stores", "if (thread == 0) cute::tma_store_wait<1>();", "", "in_flight", "race"),
    mutant("no wait for the last stores", "if (thread == 0) cute::tma_store_wait<0>();", "", "in_flight", "exited"),
    mutant("producer's parity", "Ring stage{0, 1};", "Ring stage{0, 0};", "deadlock"),
    mutant("consumer's parity", "Ring stage{0, 0}, acc", "Ring stage{0, 1}, acc", *UNORDERED),
    # Arrivals and transactions.
    mutant(
        "too few bytes expected",
        "TxBar::arrive_and_expect_tx(&s.full[i], kBytes)",
        "TxBar::arrive_and_expect_tx(&s.full[i], kBytes - 16)",
        "mbarrier",
        "deadlock",
        *UNORDERED,
    ),
    mutant(
        "too many bytes expected",
        "TxBar::arrive_and_expect_tx(&s.full[i], kBytes)",
        "TxBar::arrive_and_expect_tx(&s.full[i], kBytes + 16)",
        "deadlock",
    ),
    mutant("double arrival", EXPECT, EXPECT + " if (cta == 0) Bar::arrive(&s.full[i]);", "mbarrier"),
    mutant(
        "too few arrivals counted",
        INIT_RELEASE,
        INIT_RELEASE.replace("8", "4"),
        "mbarrier",
        "deadlock",
        "race",
        "in_flight",
    ),
    mutant("too many arrivals counted", INIT_RELEASE, INIT_RELEASE.replace("8", "9"), "deadlock"),
    mutant("accumulator released half-way", "if (half == 1) {", "if (half == 0) {", "race", "in_flight"),
    mutant(
        "accumulator released before its loads finish",
        WAIT_LOADS
        + "\n      if (half == 1) {\n        tensor_memory_fence_before();\n        "
        + RELEASE
        + "\n      }",
        "if (half == 1) {\n        " + RELEASE + "\n      }\n" + WAIT_LOADS,
        "in_flight",
        "race",
    ),
    mutant("arrival at the own CTA", RELEASE, RELEASE.replace("0, 1)", "cta, 1)"), "deadlock"),
    mutant("arrival at a CTA that is not there", RELEASE, RELEASE.replace("0, 1)", "2, 1)"), "out_of_bounds"),
    mutant("stage released in one CTA", "(&s.empty[i], kBoth);", "(&s.empty[i], 1);", "deadlock"),
    mutant("scales sent to one CTA", "&s.full[i], kBoth, kEvict", "&s.full[i], 1, kEvict", "deadlock"),
    mutant(
        "scales sent to CTAs that are not there", "&s.full[i], kBoth, kEvict", "&s.full[i], 7, kEvict", "out_of_bounds"
    ),
    mutant(
        "barrier initialised again",
        "  Ring stage{0, 1};",
        "  Ring stage{0, 1};\n  if (cute::elect_one_sync()) Bar::init(&s.full[0], 1);",
        "mbarrier",
        "race",
    ),
    # Order.
    mutant("no proxy fence before the store", "      cute::tma_store_fence();\n", "", "proxy"),
    mutant("no barrier before the store", "named_barrier(2, 128);", "", "race", "uninitialised"),
    mutant("no barrier before the staging is reused", "named_barrier(1, 128);", "", "race", "in_flight"),
    mutant(
        "barriers used before the other CTA's are initialised",
        "cute::cluster_sync();\n  tensor_memory_fence_after();\n\n",
        "__syncthreads();\n  tensor_memory_fence_after();\n\n",
        "mbarrier",
        "race",
        "uninitialised",
    ),
    mutant(
        "CTA leaves before the other's last arrival",
        "cute::cluster_sync();  // nothing",
        "__syncthreads();\n  if (cta == 1 && warp < 4 && cute::elect_one_sync()) "
        "Bar::arrive(&s.accumulator_empty[0], 0, 1);  // nothing",
        "exited",
    ),
    # Descriptors.
    mutant(
        "instruction descriptor: reserved bit",
        "d.scale_format_ = 1;",
        "d.scale_format_ = 1, d.desc_ |= 1u << 6;",
        "descriptor",
    ),
    mutant(
        "instruction descriptor: no such format",
        "d.scale_format_ = 1;",
        "d.scale_format_ = 1, d.a_format_ = 2;",
        "descriptor",
    ),
    mutant(
        "instruction descriptor: other format",
        "d.scale_format_ = 1;",
        "d.scale_format_ = 1, d.a_format_ = 1;",
        "mismatch",
    ),
    mutant("instruction descriptor: N not allowed", "d.n_dim_ = 128 / 8;", "d.n_dim_ = 120 / 8;", "descriptor"),
    mutant(
        "instruction descriptor: N too large",
        "d.n_dim_ = 128 / 8;",
        "d.n_dim_ = 256 / 8;",
        *UNORDERED,
        "tensor_memory",
        "out_of_bounds",
    ),
    mutant(
        "matrix descriptor: version",
        "SWIZZLE_128B);\n        uint64_t",
        "SWIZZLE_128B) ^ 1ull << 46;\n        uint64_t",
        "descriptor",
    ),
    mutant(
        "matrix descriptor: no such layout",
        "1024, Layout::SWIZZLE_128B);\n        uint64_t",
        "1024, Layout(3));\n        uint64_t",
        "descriptor",
    ),
    mutant(
        "matrix descriptor: other swizzle",
        "matrix_descriptor(s.a[i] + block * 32, 1024, Layout::SWIZZLE_128B)",
        "matrix_descriptor(s.a[i] + block * 32, 1024, Layout::SWIZZLE_64B)",
        "descriptor",
    ),
    mutant(
        "matrix descriptor: stride",
        "matrix_descriptor(s.a[i] + block * 32, 1024,",
        "matrix_descriptor(s.a[i] + block * 32, 2048,",
        *UNORDERED,
    ),
    # Memory.
    mutant("store behind an array", "&p.dot[row + thread]", "&p.dot[row + thread + 256]", "out_of_bounds"),
    mutant("shared memory that nobody wrote", "i < 4; ++i) atomicMax", "i < 5; ++i) atomicMax", "uninitialised"),
    mutant("staging partly written", "chunk < 8; ++chunk", "chunk < 7; ++chunk", "uninitialised"),
    mutant(
        "stage not aligned",
        "alignas(1024) uint8_t a[kStages]",
        "alignas(16) uint8_t pad[16], a[kStages]",
        "misaligned",
        "tensor_map",
    ),
    mutant("box wider than its swizzle", "{64, 128}, swizzle}", "{128, 128}, swizzle}", "tensor_map"),
    mutant("box too low", "{depth}, {kK, 64}", "{depth}, {kK, 32}", "deadlock"),
    mutant("tensor's stride", "{depth, rows_a}, {depth}", "{depth, rows_a}, {depth + 8}", "tensor_map"),
    mutant("tensor memory not allocated", "allocator.allocate(512,", "allocator.allocate(256,", "tensor_memory"),
    mutant("tensor memory not freed", "allocator.free(s.tensor_memory, 512);", "", "tensor_memory"),
    mutant(
        "stage outside shared memory", "kEvictNormal, s.a[i], k", "kEvictNormal, s.a[i] + 262144, k", "out_of_bounds"
    ),
    # Launch.
    mutant("too little shared memory", "192, sizeof(Smem)>>>", "192, sizeof(Smem) - 2048>>>", "out_of_bounds"),
    mutant("more shared memory than asked for", "192, sizeof(Smem)>>>", "192, sizeof(Smem) + 2048>>>", "launch"),
    mutant("grid is no multiple of the cluster", "<<<2 * clusters,", "<<<2 * clusters - 1,", "launch"),
    mutant("more threads than the kernel allows", "192, sizeof(Smem)>>>", "224, sizeof(Smem)>>>", "launch"),
]


def patched(source: str, mutant: Mutant) -> str:
    assert source.count(mutant.old) == 1, mutant.name
    return source.replace(mutant.old, mutant.new)


def function(number: int) -> str:
    """Name of a mutant's host function."""
    return f"run_mutant_{number}"


def combined() -> str:
    """Source of all mutants; the kernel as it is has the number len(MUTANTS)."""
    source = SOURCE.read_text()
    start = source.index("using E4M3")
    bodies = [patched(source, mutant)[start:] for mutant in MUTANTS] + [source[start:]]
    bodies = [body.replace("run_small_gemm", function(number)) for number, body in enumerate(bodies)]
    return source[:start] + "".join(f"namespace mutant_{i} {{\n{body}}}\n" for i, body in enumerate(bodies))
