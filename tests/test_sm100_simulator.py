"""The SM100 simulator as a whole: a small GEMM is right under every schedule, and planted bugs in it are caught by the
check that should catch them. What SM90 has too is compared with what a GPU computed."""

import re
from pathlib import Path

import numpy as np
import pytest
import sm100_cases
import sm100_simulator
from sm100_simulator import SimulationError, Simulator, compile_kernels, toolchain
from sm100_simulator.kernels import record_sm90, sm100_mutants
from sm100_simulator.report import issue_slots

pytestmark = sm100_cases.needs_nvcc

SMALL_GEMM = sm100_cases.SmallGemm()
SEEDS = 8  # adversarial schedules tried until one shows a mutant


@pytest.fixture(scope="module")
def small_gemm():
    return compile_kernels(sm100_mutants.SOURCE)


@pytest.fixture(scope="module")
def mutants():
    return compile_kernels(sm100_mutants.SOURCE, text=sm100_mutants.combined())


def test_small_gemm_immediate(small_gemm):
    assert SMALL_GEMM.mismatches(Simulator(schedule="immediate", sms=4), small_gemm) == 0


@pytest.mark.parametrize("seed", range(10))
def test_small_gemm_adversarial(small_gemm, seed):
    assert SMALL_GEMM.mismatches(Simulator(schedule="adversarial", seed=seed, sms=4), small_gemm) == 0


@pytest.mark.parametrize("shape", [(256, 128, 128, 1), (256, 384, 128, 2), (1024, 128, 384, 2)])
def test_small_gemm_shapes(small_gemm, shape):
    problem = sm100_cases.SmallGemm(*shape, seed=1)
    assert problem.mismatches(Simulator(schedule="adversarial", seed=11, sms=4), small_gemm) == 0


def test_report(small_gemm):
    """Counts that follow from the problem: 256 x 128 tiles of CTA pairs, K in steps of 32."""
    simulator = Simulator(sms=4)
    assert SMALL_GEMM.mismatches(simulator, small_gemm) == 0
    (kernel,) = simulator.report().values()
    pairs = SMALL_GEMM.m // 256 * (SMALL_GEMM.n // 128)
    tiles, k = 2 * pairs, SMALL_GEMM.k
    assert kernel["multiplications"] == pairs * k // 32
    assert kernel["multiply_cycles"] == tiles * 128 * 128 * k / 8192
    assert kernel["load_bytes"] == tiles * (128 * k + 64 * k + 2 * 128 * k // 32)
    assert kernel["instructions"] == sum(sum(w["classes"].values()) for w in kernel["warps"])
    assert all(sum(w["classes"].values()) == sum(w["opcodes"].values()) for w in kernel["warps"])
    commits = sum(n for w in kernel["warps"] for name, n in w["opcodes"].items() if name.startswith("tcgen05.commit"))
    assert commits == pairs * (k // 128 + 1)  # a stage each, and the accumulators
    slots = issue_slots(kernel, tiles)
    assert sum(slots) * tiles == pytest.approx(kernel["instructions"])
    text = simulator.table(roles={"epilogue": range(4), "multiply": [4], "load": [5]}, tiles=tiles)
    assert f"{128 * 128 * k // 8192} tensor-core cycles" in text and "epilogue" in text


def test_documented_categories():
    """The page's table has every category that a check can raise, and no other."""
    sources = "".join(path.read_text() for path in Path(sm100_simulator.__file__).parent.glob("*.cc"))
    raised = set(re.findall(r'(?:fail|Failure)\("(\w+)"', sources)) - {"internal"}
    page = (Path(__file__).resolve().parent.parent / "docs" / "sm100_simulator.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == raised


def verdict(library, function: str, seed: int) -> str | None:
    """Category of the error that the run ends with; "mismatch"; None where all is well."""
    simulator = Simulator(schedule="adversarial", seed=seed, sms=4)
    try:
        return "mismatch" if SMALL_GEMM.mismatches(simulator, library, function) else None
    except SimulationError as error:
        return error.category


@pytest.mark.parametrize("number", range(len(sm100_mutants.MUTANTS)), ids=[m.name for m in sm100_mutants.MUTANTS])
def test_mutant_is_caught(mutants, number):
    function = sm100_mutants.function(number)
    first = next((found for seed in range(SEEDS) if (found := verdict(mutants, function, seed))), None)
    assert first in sm100_mutants.MUTANTS[number].caught


def test_control_is_not_caught(mutants):
    """The kernel as it is, compiled the way of the mutants."""
    function = sm100_mutants.function(len(sm100_mutants.MUTANTS))
    assert [verdict(mutants, function, seed) for seed in range(SEEDS)] == [None] * SEEDS


def test_few_mutants_give_only_a_wrong_result():
    assert sum("mismatch" in mutant.caught for mutant in sm100_mutants.MUTANTS) <= 2


# What SM90 has too ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    if not record_sm90.FIXTURE.exists():
        pytest.skip(f"not recorded: {record_sm90.FIXTURE.name}")
    with np.load(record_sm90.FIXTURE) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def sm90():
    """One library a source, compiled when first asked for."""
    return sm100_cases.libraries("90a")


@pytest.mark.parametrize("schedule", ["immediate", "adversarial"])
@pytest.mark.parametrize("name", record_sm90.SUBJECTS)
def test_sm90(recorded, sm90, name, schedule):
    subject = record_sm90.SUBJECTS[name]
    buffers = len([key for key in recorded if key.startswith(f"{name}.") and key.endswith(".before")])
    simulator = Simulator(schedule=schedule, seed=1, sms=4)
    arrays = [simulator.array(recorded[f"{name}.{i}.before"]) for i in range(buffers)]
    sm100_cases.run(simulator, sm90(subject.source), subject.function, *arrays, *subject.integers)
    for i, array in enumerate(arrays):
        assert record_sm90.differences(name, recorded, i, sm100_cases.read(array)) == []


def test_what_has_changed_is_compiled_again(tmp_path, monkeypatch):
    """A source, when it or a header behind its includes has; nothing else."""
    compiled, run = [], toolchain._run

    def counted(command):
        compiled.extend(Path(part).stem for part in command if str(part).endswith(".cu"))
        run(command)

    monkeypatch.setattr(toolchain, "BUILD", tmp_path / "build")
    monkeypatch.setattr(toolchain, "_run", counted)
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "outer.h").write_text('#include "inner.h"\n')
    (folder / "inner.h").write_text("constexpr int kValue = 1;\n")
    (tmp_path / "one.cu").write_text('#include <outer.h>\nextern "C" int value() { return kValue; }\n')
    (tmp_path / "two.cu").write_text('extern "C" int other() { return 0; }\n')

    def value():
        library = compile_kernels([tmp_path / "one.cu", tmp_path / "two.cu"], include=[folder])
        return Simulator().call(library, "value")

    assert (value(), value(), sorted(compiled)) == (1, 1, ["one", "two"])
    (folder / "inner.h").write_text("constexpr int kValue = 2;\n")
    assert (value(), compiled[2:]) == (2, ["one"])
