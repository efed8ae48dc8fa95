"""The documents' layer: wrappers, classes and their return type."""

from .dglu import GroupedGemmDgluSm100, grouped_gemm_dglu_wrapper_sm100
from .dsrelu import GroupedGemmDsreluSm100, grouped_gemm_dsrelu_wrapper_sm100
from .tuple_dict import TupleDict

__all__ = [
    "GroupedGemmDgluSm100",
    "GroupedGemmDsreluSm100",
    "TupleDict",
    "grouped_gemm_dglu_wrapper_sm100",
    "grouped_gemm_dsrelu_wrapper_sm100",
]
