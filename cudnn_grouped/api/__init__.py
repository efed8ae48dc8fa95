"""The documents' layer: wrappers, classes and their return type."""

from .dglu import GroupedGemmDgluSm100, grouped_gemm_dglu_wrapper_sm100
from .dsrelu import GroupedGemmDsreluSm100, grouped_gemm_dsrelu_wrapper_sm100
from .glu import GroupedGemmGluSm100, grouped_gemm_glu_wrapper_sm100
from .mm import grouped_gemm_quant_wrapper_sm100, grouped_gemm_wrapper_sm100
from .srelu import GroupedGemmSreluSm100, grouped_gemm_srelu_wrapper_sm100
from .tuple_dict import TupleDict
from .wgrad import grouped_gemm_wgrad_wrapper_sm100

__all__ = [
    "GroupedGemmDgluSm100",
    "GroupedGemmDsreluSm100",
    "GroupedGemmGluSm100",
    "GroupedGemmSreluSm100",
    "TupleDict",
    "grouped_gemm_dglu_wrapper_sm100",
    "grouped_gemm_dsrelu_wrapper_sm100",
    "grouped_gemm_glu_wrapper_sm100",
    "grouped_gemm_quant_wrapper_sm100",
    "grouped_gemm_srelu_wrapper_sm100",
    "grouped_gemm_wgrad_wrapper_sm100",
    "grouped_gemm_wrapper_sm100",
]
