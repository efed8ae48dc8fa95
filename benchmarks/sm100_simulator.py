"""How fast the SM100 simulator is: warp instructions a second on one core, its checks and the tensor core included.

python benchmarks/sm100_simulator.py     needs g++, nvcc and the test requirements, no GPU

Two kernels: the product's quantiser, which is instructions alone, and a small GEMM, whose few instructions start much work
of the copy unit and the tensor core.
"""

import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sm100_cases  # noqa: E402
from sm100_simulator import Simulator, compile_kernels  # noqa: E402
from sm100_simulator.kernels import sm100_mutants  # noqa: E402

RUNS = 9


def small_gemm():
    library = compile_kernels(sm100_mutants.SOURCE)
    problem = sm100_cases.SmallGemm(1024, 256, 256, 2)
    return lambda simulator: problem.mismatches(simulator, library)


def quantiser():
    library = sm100_cases.shipped_quantiser()
    x = np.random.default_rng(0).standard_normal((1024, 512), np.float32)

    def run(simulator):
        device = [simulator.array(x), simulator.zeros(x.shape, np.uint8), simulator.zeros(x.size // 32, np.uint8)]
        float32, e4m3, e8m0 = 1, 4, 6  # as csrc/core/tensor.h counts
        return simulator.call(library, "run_quantize", *x.shape, 0, float32, e4m3, e8m0, 32, *device, None, None, 0)

    return run


def main():
    for name, make in (("quantiser", quantiser), ("small GEMM", small_gemm)):
        run = make()
        for schedule in ("immediate", "adversarial"):
            rates = []
            for seed in range(RUNS):
                simulator = Simulator(schedule, seed)
                if run(simulator):
                    sys.exit(f"{name}: wrong")
                (kernel,) = simulator.report().values()
                rates.append(kernel["instructions"] / kernel["seconds"] / 1e6)
            count = kernel["instructions"] / 1e6
            print(f"{name:10} {schedule:12} {count:.2f} M instructions, {statistics.median(rates):.1f} M a second")


if __name__ == "__main__":
    main()
