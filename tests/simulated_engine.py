"""A shipped GPU engine in the simulator, behind the operators: what they are given are tensors of the CPU.

    with simulated_engine(schedule="adversarial", seed=3) as simulator:
        torch.ops.cudnn_grouped.dsrelu(...)

ENGINE says which; a test module changes it for its own tests.

A check that fires is raised as SimulationError. A decorator too: the test then shows the SimulationError.
"""

import contextlib
import ctypes
import functools
from pathlib import Path

from sm100_simulator import Simulator, compile_kernels

from cudnn_grouped import library

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
GLUE = ROOT / "tests" / "sm100_simulator" / "kernels" / "shipped_engine.cu"


ARCHS = {"sm90": "90a", "sm100": "100a"}
ENGINE = "sm100"


@functools.cache
def engine_library(engine: str) -> Path:
    """The engine and what it uses of csrc/cuda, on the core that this process has loaded."""
    # device.cu would answer for the GPUs of this process.
    cuda = [path for path in sorted((CSRC / "cuda").glob("*.cu")) if path.name != "device.cu"]
    sources = [GLUE, *sorted((CSRC / engine).glob("*.cu")), *cuda]
    hidden = ["-Xcompiler", "-fvisibility=hidden"]  # else two versions of the engine would share their statics
    core = library.FOLDER / "libcudnn_grouped.so"
    name = [f'SHIPPED_ENGINE="{engine}"']
    return compile_kernels(sources, defines=name, archs=ARCHS[engine], include=[CSRC], flags=hidden, link=[core])


@contextlib.contextmanager
def simulated_engine(schedule="immediate", seed=1, sms=4, *, shorten="", offsets=None, b_ptrs=None, sfb_ptrs=None):
    """The operators for tensors of the CPU run on a simulated device, which is yielded.

    shorten: the name of an operand, an output or "workspace", whose last byte the kernels may not touch.
    offsets, b_ptrs, sfb_ptrs: tensors that the kernels read in place of those that the operator has checked.
    """
    simulator = Simulator(schedule, seed, sms)
    kernels = engine_library(ENGINE)
    if problem := simulator.call(kernels, "simulated_engine_enter", shorten.encode()):
        raise RuntimeError(
            f"simulated_engine: {['', 'another one is active', f'csrc/{ENGINE} registers no engine'][problem]}"
        )
    unchecked = [0 if tensor is None else tensor.data_ptr() for tensor in (offsets, b_ptrs, sfb_ptrs)]
    simulator.call(kernels, "simulated_engine_unchecked", *map(ctypes.c_void_p, unchecked))
    try:
        yield simulator
    except Exception:
        simulator.check()  # the check that fired is the reason
        raise
    finally:
        simulator.call(kernels, "simulated_engine_leave")
    simulator.check()
