"""A functional simulator of SM100 kernels: it runs the PTX that nvcc emits, launched by the kernels' own host code.

    library = compile_kernels("kernel.cu")
    simulator = Simulator(schedule="adversarial", seed=3)
    a = simulator.array(numpy_array)
    simulator.call(library, "run", a, 128)
    print(a.numpy(), simulator.table())

docs/sm100_simulator.md says what it models and what it cannot prove.
"""

import ctypes
import json
import operator
import os
from functools import cache

import numpy as np

from .toolchain import compile_kernels, nvcc, simulator_library

__all__ = ["Array", "SimulationError", "Simulator", "compile_kernels", "nvcc"]


RULES = ("unwaited_loads", "relaxed_release")


class SimulationError(RuntimeError):
    """A check fired. category: its name, one of those in docs/sm100_simulator.md."""

    def __init__(self, category, text):
        super().__init__(f"[{category}] {text}")
        self.category = category


@cache
def _library():
    library = ctypes.CDLL(str(simulator_library()), mode=ctypes.RTLD_GLOBAL)
    pointer, number = ctypes.c_void_p, ctypes.c_ulonglong
    for name, result, arguments in (
        ("create", pointer, (ctypes.c_int, number, ctypes.c_uint, number, ctypes.c_int, ctypes.c_int)),
        ("destroy", None, (pointer,)),
        ("activate", None, (pointer,)),
        ("allocate", pointer, (pointer, number)),
        ("release", ctypes.c_int, (pointer, pointer)),
        ("add_range", None, (pointer, pointer, number, ctypes.c_int)),
        ("remove_range", None, (pointer, pointer)),
        ("category", ctypes.c_char_p, (pointer,)),
        ("text", ctypes.c_char_p, (pointer,)),
        ("map_problem", ctypes.c_char_p, (pointer,)),
        ("clear_failure", None, (pointer,)),
        ("report", ctypes.c_char_p, (pointer,)),
    ):
        function = getattr(library, f"simulator_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _load(path):
    _library()
    # A process with a CUDA build of torch has another CUDA runtime: the library's own comes first.
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)


class Array:
    """Device memory with its own bounds. `.pointer` is its address, `.numpy()` a view of it."""

    def __init__(self, simulator, values):
        values = np.ascontiguousarray(values)
        self.pointer = _library().simulator_allocate(simulator._session, max(values.nbytes, 1))
        if not self.pointer:
            raise MemoryError(f"{values.nbytes} bytes of simulated device memory")
        raw = (ctypes.c_ubyte * max(values.nbytes, 1)).from_address(self.pointer)
        raw.simulator = simulator  # the simulator owns the memory: views of it keep the simulator
        self._view = np.frombuffer(raw, dtype=np.uint8, count=values.nbytes).view(values.dtype).reshape(values.shape)
        self._view[...] = values

    def numpy(self):
        return self._view


class Simulator:
    """One simulated device.

    schedule: "immediate" does asynchronous work at once; "adversarial" does it late, out of order where that is allowed,
    with warps in random order. seed: of the adversarial schedule; the same seed gives the same run. sms: how many there are.
    allow: rules of the PTX ISA that the hardware forgives and that some production code breaks, not to be checked:
        "unwaited_loads": the result of a tcgen05.ld used without a tcgen05.wait::ld;
        "relaxed_release": a relaxed arrival at the cluster's barrier taken for a release.
    max_instructions: of a launch; more is called a deadlock.
    """

    def __init__(self, schedule="immediate", seed=1, sms=4, allow=(), max_instructions=4_000_000_000):
        if schedule not in ("immediate", "adversarial"):
            raise ValueError(f'schedule: expected "immediate" or "adversarial", got {schedule!r}')
        if unknown := set(allow) - set(RULES):
            raise ValueError(f"allow: expected some of {RULES}, got {sorted(unknown)}")
        if sms < 1:
            raise ValueError(f"sms: expected 1 or more, got {sms}")
        rules = [rule in allow for rule in RULES]
        adversarial = schedule == "adversarial"
        self._session = _library().simulator_create(adversarial, seed, sms, max_instructions, *rules)

    def __del__(self):
        if getattr(self, "_session", None):
            _library().simulator_destroy(self._session)

    def array(self, values):
        """A copy of `values` in device memory, which lasts as long as the simulator."""
        return Array(self, values)

    def zeros(self, shape, dtype):
        return self.array(np.zeros(shape, dtype))

    def register(self, pointer, size, writable=True):
        """Lets kernels touch `size` bytes of the caller's memory at `pointer`."""
        _library().simulator_add_range(self._session, pointer, size, writable)

    def unregister(self, pointer):
        _library().simulator_remove_range(self._session, pointer)

    def activate(self):
        """Makes this the device that host code linked against the stand-in runtime sees."""
        _library().simulator_activate(self._session)

    def check(self):
        """Raises SimulationError if a check has fired since the last call."""
        library = _library()
        category = library.simulator_category(self._session).decode()
        text = library.simulator_text(self._session).decode(errors="replace")
        problem = library.simulator_map_problem(self._session).decode()
        library.simulator_clear_failure(self._session)
        if category:
            raise SimulationError(category, text)
        if problem:
            raise SimulationError("tensor_map", f"cuTensorMapEncodeTiled: {problem}")

    def call(self, library, function, *arguments):
        """Calls the extern "C" host function of a compiled library; returns its int. Arrays pass their pointers.

        Raises SimulationError if a check fired on the way.
        """
        self.activate()
        entry = getattr(_load(library), function)
        entry.restype = ctypes.c_int
        status = entry(*[_argument(a) for a in arguments])
        self.check()
        return status

    def report(self):
        """What ran, by kernel: counts by warp and opcode, bytes copied, multiplications. A dictionary that JSON can hold."""
        return json.loads(_library().simulator_report(self._session).decode())

    def table(self, roles=None, tiles=None):
        """The report as text. See report.table."""
        from .report import table

        return table(self.report(), roles=roles, tiles=tiles)


def _argument(value):
    if isinstance(value, Array):
        return ctypes.c_void_p(value.pointer)
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, (float, np.floating)):
        return ctypes.c_float(value)
    # As wide as any parameter: what is on the stack is not extended.
    return ctypes.c_ulonglong(operator.index(value)) if hasattr(value, "__index__") else value
