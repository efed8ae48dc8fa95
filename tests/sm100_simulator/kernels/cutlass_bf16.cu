// BF16 GEMM from CUTLASS's collective builder: clusters of four CTAs that share tiles by multicast, and tiles handed
// out by cluster-launch control. D = A B^T + C.
#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

using Element = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::_256, cute::_128, cute::_64>;
using Cluster = cute::Shape<cute::_2, cute::_2, cute::_1>;
using Arch = cutlass::arch::Sm100;
using Operator = cutlass::arch::OpClassTensorOp;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    Arch, Operator, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Row, 8,
    Element, Row, 8, cutlass::epilogue::TmaWarpSpecialized2Sm>::CollectiveOp;
using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(Epilogue::SharedStorage))>;
using Mainloop =
    cutlass::gemm::collective::CollectiveBuilder<Arch, Operator, Element, Row, 8, Element, Column, 8, float, Tile,
                                                 Cluster, Stages,
                                                 cutlass::gemm::KernelTmaWarpSpecialized2SmSm100>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

extern "C" int run_bf16(int m, int n, int k, Element* a, Element* b, Element* c, Element* d, int sms) {
  Kernel::StrideA stride_a{};
  Kernel::StrideC stride_c{};
  cute::get<0>(stride_a) = k;
  cute::get<0>(stride_c) = n;
  cutlass::KernelHardwareInfo hardware;
  hardware.device_id = 0;
  hardware.sm_count = sms;
  Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                            {m, n, k, 1},
                            {a, stride_a, b, stride_a},
                            {{1.f, 1.f}, c, stride_c, d, stride_c},
                            hardware};
  Gemm gemm;
  if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
  void* workspace = nullptr;
  cudaMalloc(&workspace, Gemm::get_workspace_size(arguments));
  if (gemm.initialize(arguments, workspace) != cutlass::Status::kSuccess) return cudaErrorInvalidConfiguration;
  if (gemm.run() != cutlass::Status::kSuccess) return cudaErrorLaunchFailure;
  int const error = cudaDeviceSynchronize();
  cudaFree(workspace);
  return error;
}
