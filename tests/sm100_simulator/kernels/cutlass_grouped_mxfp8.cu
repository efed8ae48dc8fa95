// Grouped MXFP8 GEMM from CUTLASS's collective builder; the cluster's extents are run-time values.
#include "cutlass_grouped.h"

using Gemm = GroupedGemm<cutlass::mx_float8_t<cutlass::float_e4m3_t>, 16, 128,
                         cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmMxf8f6f4Sm100,
                         cute::Shape<int32_t, int32_t, cute::_1>>;

extern "C" int run_grouped_mxfp8(int groups, int const* m, int n, int k, void* const* a, void* const* b,
                                 void* const* scale_a, void* const* scale_b, void* const* c, void* const* d, int sms) {
  return Gemm::run(groups, m, n, k, a, b, scale_a, scale_b, c, d, sms);
}
