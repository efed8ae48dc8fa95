"""Loads the library of XLA handlers and registers them with JAX.

One handler for each platform serves every operator; each operator has a target name of its own, so that HLO dumps and
profiles tell them apart.
"""

import ctypes
import importlib.util

import jax

from .. import library

LIBRARY = library.JAX_LIBRARY
OPERATIONS = ("dsrelu", "dglu", "dact", "srelu", "glu", "mm", "wgrad", "quantize", "dequantize")
_HANDLERS = {"cpu": "cudnn_grouped_xla_cpu", "CUDA": "cudnn_grouped_xla_cuda"}


def target_name(operation):
    return f"cudnn_grouped_{operation}"


def register():
    """Register the targets for CPU and CUDA. ImportError, saying how to build, where the library is missing or broken.

    Starts no JAX backend and touches no GPU.
    """
    if not LIBRARY.exists():
        raise ImportError(
            f"cudnn_grouped.jax: {LIBRARY.name} is not built in {library.FOLDER}. It is built where jaxlib is installed: "
            "`make venv` in a checkout, or `pip install --no-build-isolation .` where JAX is: see docs/jax.md"
        )
    try:
        handlers = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"cudnn_grouped.jax: {LIBRARY.name} does not load ({error})") from error
    # JAX may see a GPU that a CPU build of torch does not.
    if any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        library.load_cuda(without_device=True)
    for platform, symbol in _HANDLERS.items():
        capsule = jax.ffi.pycapsule(getattr(handlers, symbol))
        for operation in OPERATIONS:
            jax.ffi.register_ffi_target(target_name(operation), capsule, platform=platform)
    return handlers
