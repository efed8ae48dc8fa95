"""The operators on JAX arrays, on the CPU and on GPUs: see docs/jax.md.

``grouped_gemm_dsrelu_jax_sm100`` and ``grouped_gemm_dglu_jax_sm100`` are the documents' entry points for ``jax.jit``;
the documents' wrappers take JAX arrays as they are. ``grouped_mlp`` is a differentiable MoE feed-forward, ``operator``
any operator by name.
"""

try:
    import jax
except ImportError as error:
    raise ImportError(
        f"cudnn_grouped.jax needs JAX: pip install 'cudnn_grouped[jax]' (docs/jax.md; {error})"
    ) from error
if jax.__version_info__ < (0, 10):
    raise ImportError(f"cudnn_grouped.jax needs JAX 0.10 or later, got {jax.__version__}: pip install -U jax jaxlib")

from . import targets

_handlers = targets.register()

from ..api import (  # noqa: E402
    TupleDict,
    grouped_gemm_dglu_wrapper_sm100,
    grouped_gemm_dsrelu_wrapper_sm100,
)
from .entry_points import grouped_gemm_dglu_jax_sm100, grouped_gemm_dsrelu_jax_sm100  # noqa: E402
from .mlp import grouped_mlp  # noqa: E402
from .operators import dequantize, operator, pointer_table, quantize  # noqa: E402

__all__ = [
    "TupleDict",
    "dequantize",
    "grouped_gemm_dglu_jax_sm100",
    "grouped_gemm_dglu_wrapper_sm100",
    "grouped_gemm_dsrelu_jax_sm100",
    "grouped_gemm_dsrelu_wrapper_sm100",
    "grouped_mlp",
    "operator",
    "pointer_table",
    "quantize",
]
