"""Finds and loads the compiled libraries beside this file.

``libcudnn_grouped_torch.so`` (operators) and ``_C`` are required. ``libcudnn_grouped_cuda.so`` (CUDA engines) is
optional: it is loaded when it was built and a CUDA device is visible, and a failure to load it is only recorded.
``libcudnn_grouped_jax.so`` (XLA handlers) is optional too: ``cudnn_grouped.jax`` loads it.
"""

import ctypes
import importlib
import os
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
TORCH_LIBRARY = FOLDER / "libcudnn_grouped_torch.so"
CUDA_LIBRARY = FOLDER / "libcudnn_grouped_cuda.so"
JAX_LIBRARY = FOLDER / "libcudnn_grouped_jax.so"
_HOW_TO_BUILD = "build the package with `make venv` in a checkout, or `pip install .` from its root"

C = None
_cuda_library = None
_cuda_failure = None


def load():
    """Load the required libraries; ``C`` is then the ``_C`` module. ImportError, saying how to build, if one is missing."""
    global C
    if not TORCH_LIBRARY.exists():
        raise ImportError(f"cudnn_grouped: {TORCH_LIBRARY.name} is not built in {FOLDER}; {_HOW_TO_BUILD}")
    try:
        torch.ops.load_library(str(TORCH_LIBRARY))
        C = importlib.import_module("cudnn_grouped._C")
    except (ImportError, OSError) as error:
        raise ImportError(f"cudnn_grouped: a compiled library does not load ({error}); {_HOW_TO_BUILD}") from error
    load_cuda()


def load_cuda(without_device=False):
    """Load the CUDA engines if they were built and a device is visible. Never raises; returns whether they are loaded.

    without_device: load them also where no device is visible, to list them.
    """
    global _cuda_library, _cuda_failure
    if _cuda_library is None and CUDA_LIBRARY.exists() and (without_device or _device_count() > 0):
        try:
            _cuda_library = ctypes.CDLL(str(CUDA_LIBRARY), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as error:
            _cuda_failure = str(error)
    return _cuda_library is not None


def cuda_status():
    """One line on the CUDA engines' library: loaded, not built, no device, or why loading failed."""
    if load_cuda():
        return "loaded"
    if not CUDA_LIBRARY.exists():
        return "not built"
    return f"failed to load: {_cuda_failure}" if _cuda_failure else "built, no CUDA device visible"


def _device_count():
    try:
        return torch.cuda.device_count()  # counts through NVML: unlike is_available() it does not spoil a later fork
    except Exception:  # a broken driver must not break the import
        return 0
