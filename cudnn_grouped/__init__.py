"""Grouped GEMM with fused MoE epilogues: the documented API, ``torch.ops.cudnn_grouped`` and block quantisation."""

import importlib
import importlib.util

from . import library

library.load()

from . import autograd, nn, ops, ops_forward  # noqa: E402, F401  fakes and autograd of the operators; the layer
from .api import (  # noqa: E402
    GroupedGemmDgluSm100,
    GroupedGemmDsreluSm100,
    GroupedGemmGluSm100,
    GroupedGemmSreluSm100,
    TupleDict,
    grouped_gemm_dglu_wrapper_sm100,
    grouped_gemm_dsrelu_wrapper_sm100,
    grouped_gemm_glu_wrapper_sm100,
    grouped_gemm_quant_wrapper_sm100,
    grouped_gemm_srelu_wrapper_sm100,
    grouped_gemm_wgrad_wrapper_sm100,
    grouped_gemm_wrapper_sm100,
)
from .quantize import dequantize, dequantize_weights, quantize  # noqa: E402
from .scales import pack_scales, padded_offsets_from_counts, scale_shape, unpack_scales  # noqa: E402

__version__ = library.C.version()

__all__ = [
    "GroupedGemmDgluSm100",
    "GroupedGemmDsreluSm100",
    "GroupedGemmGluSm100",
    "GroupedGemmSreluSm100",
    "TupleDict",
    "dequantize",
    "dequantize_weights",
    "grouped_gemm_dglu_wrapper_sm100",
    "grouped_gemm_dsrelu_wrapper_sm100",
    "grouped_gemm_glu_wrapper_sm100",
    "grouped_gemm_quant_wrapper_sm100",
    "grouped_gemm_srelu_wrapper_sm100",
    "grouped_gemm_wgrad_wrapper_sm100",
    "grouped_gemm_wrapper_sm100",
    "nn",
    "pack_scales",
    "padded_offsets_from_counts",
    "quantize",
    "scale_shape",
    "unpack_scales",
]

_JAX_NAMES = ("grouped_gemm_dglu_jax_sm100", "grouped_gemm_dsrelu_jax_sm100")


def __getattr__(name):
    if name not in _JAX_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.jax"), name)


def __dir__():
    jax = _JAX_NAMES if importlib.util.find_spec("jax") and library.JAX_LIBRARY.exists() else ()
    return sorted([*globals(), *jax])
