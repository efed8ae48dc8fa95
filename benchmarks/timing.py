"""Two ways to time calls on a GPU. Neither alone is the truth: a card at its power limit lends the kernel that draws most
the clock that weaker neighbours left, so interleaving flatters it; a call alone meets another clock than its rivals.

Every call takes the number of an input set. Neighbouring launches use different sets, which together exceed L2.
"""

import math
import statistics
import time

import torch

SETS = 3


class HostEvent:
    """A CUDA event's interface on the host's clock, for dry runs."""

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3

    def query(self):
        return True


def device(dry):
    """The device to measure on; ends the process with a line where there is none."""
    if not dry and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device, got none (--dry runs the benchmark's logic on the CPU)")
    return "cpu" if dry else "cuda"


def event(device):
    return torch.cuda.Event(enable_timing=True) if device == "cuda" else HostEvent()


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


def sample(device):
    """(SM clock in MHz, power in W), None where NVML is missing."""
    try:
        return (torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3) if device == "cuda" else None
    except (ModuleNotFoundError, RuntimeError):
        return None


def measure(calls, device, seconds):
    """Both timings of {name: call}. The interleaved one comes first: it heats the card for the others."""
    results = interleaved(calls, device, seconds) if calls else {}
    for name, call in calls.items():
        results[name] |= steady(call, device, seconds)
    return results


def quick(call, device, launches=8):
    """Median ms of a few launches, for choosing among configurations."""
    for i in range(SETS):
        call(i)
    events = [_timed(call, i % SETS, device) for i in range(launches)]
    synchronise(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def steady(call, device, seconds):
    """The call alone, back to back for `seconds`, after as long without a clock on it: ms a launch, and the median SM
    clock and power meanwhile."""
    launches = max(SETS, math.ceil(seconds * 1e3 / max(quick(call, device), 1e-3)))
    start, end, samples = event(device), event(device), []
    for i in range(launches):
        call(i % SETS)
    start.record()
    for i in range(launches):
        call(i % SETS)
    end.record()
    while not end.query():
        if start.query():
            samples.append(sample(device))
        time.sleep(0.02)
    result = {"steady_ms": start.elapsed_time(end) / launches, "launches": launches}
    samples = [one for one in samples if one]
    if samples:
        result |= {
            "clock_mhz": statistics.median(clock for clock, _ in samples),
            "watt": statistics.median(watt for _, watt in samples),
        }
    return result


def interleaved(calls, device, seconds):
    """Medians and quartiles, in ms, of calls that alternate: {name: {interleaved_ms, quartiles_ms}}."""
    names = list(calls)
    per_round = max(sum(quick(call, device, 3) for call in calls.values()) / 1e3, 1e-6)
    rounds = min(100, max(9, round(seconds / per_round)))
    warm = math.ceil(rounds / 3)
    events = {name: [] for name in names}
    for r in range(warm + rounds):  # not synchronised in between: the host stays ahead
        for position in range(len(names)):
            name = names[(position + r) % len(names)]
            timed = _timed(calls[name], (2 * r + position) % SETS, device)
            if r >= warm:
                events[name].append(timed)
    synchronise(device)
    return {name: _median([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def host_microseconds(call, device, calls=100, repeats=9):
    """Host time of a call: median over repeats of `calls` calls that wait for nothing."""
    times = []
    for _ in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            call(0)
        times.append((time.perf_counter() - start) / calls * 1e6)
    synchronise(device)
    return statistics.median(times[2:])


def _timed(call, inputs, device):
    start, end = event(device), event(device)
    start.record()
    call(inputs)
    end.record()
    return start, end


def _median(times):
    low, median, high = statistics.quantiles(times, n=4)
    return {"interleaved_ms": median, "quartiles_ms": [low, high]}
