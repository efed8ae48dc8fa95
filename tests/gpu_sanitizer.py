"""A small matrix of calls of all operators, to be run under compute-sanitizer: python tests/gpu_sanitizer.py"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_calls as calls
from cases import Case
from cases_forward import DactCase, WgradCase
from gpu_device import synchronize

# An expert without rows, one with two blocks of rows, rows without an expert; tails in N and K.
PATTERN = {"offsets": (256, 256, 768), "m": 1024}


def small(case):
    """Two experts with rows, tails in every tile."""
    if isinstance(case, WgradCase):
        return replace(case, offsets=(256, 256, 512), tokens=768, m=48, n=80)
    case = replace(case, **PATTERN)
    if isinstance(case, DactCase):
        return replace(case, n=96)
    assert isinstance(case, Case)
    # Gated columns come in blocks of 32, and so do dequantised weights beside an FP8 D.
    narrow = case.op in ("dsrelu", "srelu", "mm") and not case.dequantized
    return replace(case, n=208 if narrow and not case.weights.endswith("_n") else 192, k=96)


def main() -> None:
    builts = {name: calls.make_case(small(case)) for name, case in calls.CASES.items()}
    builts |= {f"{name}, out": calls.make_case(small(calls.CASES[name]), out=True) for name in calls.OUT}
    builts |= {name: calls.make(name) for name in calls.OTHERS}
    for name, call in builts.items():
        outputs = call()
        synchronize()
        call.guarded.check()
        assert any(calls.integers(tensor).cpu().any() for tensor in outputs), name
    print(f"{len(builts)} calls ran")


if __name__ == "__main__":
    main()
