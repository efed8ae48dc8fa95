"""Each check of the simulator on a small kernel: those that break its rule are caught, and correct ones that come close are
not."""

import gc

import numpy as np
import pytest
import sm100_cases
from sm100_simulator import SimulationError, Simulator, compile_kernels

pytestmark = sm100_cases.needs_nvcc
THREAD = np.arange(128)

# kernels/checks.cu: the category of the error. A set: which check is first depends on the schedule.
CAUGHT = {
    "race_write_read": "race",
    "race_read_write": "race",
    "race_read_write_half": "race",
    "flag_without_fence": "race",
    "uninitialised_shared": "uninitialised",
    "uninitialised_register": "uninitialised",
    "named_barrier_of_others": {"race", "uninitialised"},
    "named_barrier_counts": "barrier",
    "named_barrier_odd_count": "barrier",
    "named_barrier_alone": "deadlock",
    "init_again": "mbarrier",
    "init_unordered": "mbarrier",
    "over_arrival": "mbarrier",
    "mbarrier_as_data": "mbarrier",
    "deadlock": "deadlock",
    "deadlock_spin": "deadlock",
    "load_in_flight": {"race", "in_flight"},
    "load_misaligned": "misaligned",
    "load_beyond_shared": "out_of_bounds",
    "load_beyond_global": "out_of_bounds",
    "copy_overtaken": {"race", "in_flight"},
    "store_without_proxy_fence": "proxy",
    "store_without_wait": "in_flight",
    "stores_miscounted": "in_flight",
    "store_uncommitted": "in_flight",
    "tensor_unallocated": "tensor_memory",
    "tensor_columns": "tensor_memory",
    "tensor_odd_allocation": "tensor_memory",
    "tensor_leak": "tensor_memory",
    "tensor_uninitialised": "uninitialised",
    "tensor_other_lanes": "tensor_memory",
    "tensor_no_wait": "in_flight",
    "beyond_global": "out_of_bounds",
    "beyond_shared": "out_of_bounds",
    "misaligned_vector": "misaligned",
    "remote_after_exit": "exited",
    "trap": "trap",
    "unknown_opcode": "unsupported",
    "calls": "unsupported",
    "memset_beyond": "out_of_bounds",
    "too_many_threads": "launch",
    "threads_that_wrap": "launch",
    "too_large_a_grid": "launch",
    "too_much_shared": "launch",
    "too_many_registers": "launch",
}
# What the first words of the output are; None: no matter.
CORRECT = {
    "reuse_after_barrier": 127 - THREAD + 3,
    "bytes_of_a_word": THREAD % 32 * 4 + THREAD // 32 + 1,
    "bytes_in_turn": np.where((THREAD >= 32) & (THREAD < 64), 1, 0),
    "flag_atomic": np.where((THREAD >= 32) & (THREAD < 64), THREAD - 32, 0),
    "flag_release_acquire": np.where((THREAD >= 32) & (THREAD < 64), THREAD - 32, 0),
    "shared_atomics": np.full(128, 256),
    "lock_between_lanes": [32],
    "lock_naive": [32],
    "divergent_loop": None,
    "long_loop": None,
    "halves_of_a_warp": (THREAD ^ 5) + 16,
    "early_exit": THREAD[:20] + 32,
    "partial_warp": 99 - THREAD[:100],
    "votes": np.full(100, 101070),
    "named_barriers": 63 - THREAD[:64] + 3,
    "leave_before_a_barrier": THREAD[:96] % 32 + 96,
    "all_threads_in_other_words": 127 - THREAD,
    "init_by_lanes": [1] * 64,
    "init_after_inval": None,
    "alternating_consumers": np.arange(12),
    "abandoned_poll": None,
    "load_complete": None,
    "copy_within_shared": THREAD % 64,
    "store_complete": THREAD,
    "store_fence_by_reader": THREAD,
    "stores_by_lanes": np.concatenate([THREAD, THREAD + 1, THREAD + 2]),
    "stores_counted": np.arange(768),
    "tensor_memory": THREAD,
    "arrive_and_leave": [7] * 64,
    "late_arrival": [7] * 32,
    "three_dimensions": [1] * 32 * 60,
    "many_clusters": [300 * 32],
    "module_memory": (5 + 3 + 3 + np.array([1, 2, 3, 0xFFFFFFF0])) % 2**32,
    "local_array": THREAD,
    "prints": [3] * 128,
    "prints_never": [3] * 128,
    "calls_never": [3] * 128,
}
SCHEDULES = {"immediate": [1], "adversarial": [0, 1, 2]}


@pytest.fixture(scope="module")
def library():
    return compile_kernels(sm100_cases.KERNELS / "checks.cu")


def run(library, function, simulator):
    out = simulator.zeros(4096, np.uint32)
    sm100_cases.run(simulator, library, function, out)
    return out.numpy()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("function", CAUGHT)
def test_caught(library, function, schedule):
    expected = CAUGHT[function]
    with pytest.raises(SimulationError) as error:
        run(library, function, Simulator(schedule))
    assert error.value.category in (expected if isinstance(expected, set) else {expected})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("function", CORRECT)
def test_correct(library, function, schedule):
    for seed in SCHEDULES[schedule]:
        out = run(library, function, Simulator(schedule, seed))
        if CORRECT[function] is not None:
            assert np.array_equal(out[: len(CORRECT[function])], CORRECT[function])


def test_a_copy_that_outlives_its_cta(library):
    """Only late copies show it."""
    with pytest.raises(SimulationError) as error:
        run(library, "load_at_exit", Simulator("adversarial"))
    assert error.value.category == "in_flight"


def test_a_deadlock_says_who_waits_for_what(library):
    with pytest.raises(SimulationError) as error:
        run(library, "deadlock", Simulator())
    assert "waits for parity 0 of the mbarrier at 0x400" in str(error.value)
    assert "phase 0, 1 of 2 arrivals missing" in str(error.value)


def test_an_unknown_opcode_is_named(library):
    with pytest.raises(SimulationError, match=r"cp\.async\.ca\.shared\.global"):
        run(library, "unknown_opcode", Simulator())


def test_line_numbers_in_the_ptx_change_nothing():
    library = compile_kernels(sm100_cases.KERNELS / "checks.cu", flags=["-lineinfo"])
    assert np.array_equal(run(library, "named_barriers", Simulator())[:64], CORRECT["named_barriers"])


def test_a_library_that_is_not_understood_leaves_the_others_alone(library):
    text = f"__device__ int elsewhere; __device__ int* place = &elsewhere;\n{(sm100_cases.KERNELS / 'checks.cu').read_text()}"
    text += "\nCHECK(named) { out[0] = *place; }\n"
    other = compile_kernels(sm100_cases.KERNELS / "checks.cu", text=text)
    with pytest.raises(SimulationError) as error:
        run(other, "named", Simulator())
    assert error.value.category == "ptx"
    assert np.array_equal(run(library, "store_complete", Simulator())[:128], THREAD)


# The Python side --------------------------------------------------------------------------------------------------


def test_the_seed_decides(library):
    def instructions(seed):
        simulator = Simulator("adversarial", seed)
        run(library, "flag_atomic", simulator)
        (kernel,) = simulator.report().values()
        return kernel["instructions"]

    counts = [instructions(seed) for seed in range(8)]
    assert counts == [instructions(seed) for seed in range(8)]
    assert len(set(counts)) > 1


def test_a_view_keeps_its_memory():
    view = Simulator().array(np.arange(1000)).numpy()
    gc.collect()
    assert np.array_equal(view, np.arange(1000))


def test_devices_have_limits_of_their_own(library):
    simulator = Simulator()
    run(library, "allow_shared", simulator)
    run(library, "too_much_shared", simulator)
    with pytest.raises(SimulationError):
        run(library, "too_much_shared", Simulator())


def test_arrays_of_any_shape():
    simulator = Simulator()
    for shape in [(), (0,), (2, 0, 3), (1, 2, 3)]:
        assert simulator.zeros(shape, np.float32).numpy().size == np.zeros(shape).size


def test_a_range_within_another(library):
    simulator = Simulator()
    out = simulator.zeros(4096, np.uint32)
    simulator.register(out.pointer + 64, 64)
    sm100_cases.run(simulator, library, "store_complete", out)
    simulator.unregister(out.pointer + 64)
    sm100_cases.run(simulator, library, "prints", out)
    assert np.array_equal(out.numpy()[:128], CORRECT["prints"])


@pytest.mark.parametrize("function", ["trap", "memset_beyond"])  # the latter does not ask for the last error
def test_a_failure_is_told_once(library, function):
    simulator = Simulator()
    with pytest.raises(SimulationError):
        run(library, function, simulator)
    assert np.array_equal(run(library, "store_complete", simulator)[:128], THREAD)
    assert np.array_equal(run(library, "store_complete", simulator)[:128], THREAD)


def test_a_failure_is_no_later_device_s(library):
    failed = Simulator()
    out = failed.zeros(4096, np.uint32)
    failed.check = lambda: None
    assert failed.call(library, "memset_beyond", out)
    assert np.array_equal(run(library, "store_complete", Simulator())[:128], THREAD)


def test_report(library):
    simulator = Simulator()
    for _ in range(2):
        run(library, "stores_counted", simulator)
    run(library, "late_arrival", simulator)
    report = simulator.report()
    (stores,) = [kernel for name, kernel in report.items() if "stores_counted" in name]
    (pair,) = [kernel for name, kernel in report.items() if "late_arrival" in name]
    assert (stores["launches"], stores["stores"], stores["store_bytes"]) == (2, 12, 12 * 512)
    assert [(w["rank"], w["warp"]) for w in pair["warps"]] == [(r, w) for r in range(2) for w in range(4)]
    assert [w["opcodes"]["cp.async.bulk.commit_group"] for w in stores["warps"][:1]] == [12]
    table = simulator.table(roles={"storing": [0], "others": [1, 2, 3]}, tiles=12)
    assert "per tile (12 tiles)" in table
    assert "asynchronous stores: 1.0, 512 bytes" in table


@pytest.mark.parametrize("settings", [{"schedule": "late"}, {"sms": 0}, {"allow": ["races"]}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match="expected"):
        Simulator(**settings)
