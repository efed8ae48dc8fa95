// Grouped NVFP4 GEMM from CUTLASS's collective builder; the cluster's extents are compile-time values.
#include "cutlass_grouped.h"

using Gemm =
    GroupedGemm<cutlass::nv_float4_t<cutlass::float_e2m1_t>, 32, 256,
                cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100, cute::Shape<cute::_2, cute::_1, cute::_1>>;

extern "C" int run_grouped_nvfp4(int groups, int const* m, int n, int k, void* const* a, void* const* b,
                                 void* const* scale_a, void* const* scale_b, void* const* c, void* const* d, int sms) {
  return Gemm::run(groups, m, n, k, a, b, scale_a, scale_b, c, d, sms);
}
