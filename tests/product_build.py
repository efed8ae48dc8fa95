"""setup.py as a module: it knows the compiler, the flags and the CUTLASS headers."""

import importlib.util
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def load():
    spec = importlib.util.spec_from_file_location("cudnn_grouped_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
