// Grouped block-scaled GEMM as CUTLASS's collective builder makes it: two CTAs a tile, ragged M, D = A B^T + C in BF16.
// The kernels are known to be right on hardware, so the simulator must give their results.
#pragma once
#include <vector>

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

// A host vector's copy in device memory.
template <class T>
struct DeviceCopy {
  T* data = nullptr;
  explicit DeviceCopy(std::vector<T> const& host) {
    cudaMalloc(&data, host.size() * sizeof(T));
    cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~DeviceCopy() { cudaFree(data); }
};

// Element: the operands' type with its scales. Depth: of the tile. Cluster: static, or of run-time extents.
template <class Element, int Alignment, int Depth, class Schedule, class Cluster>
struct GroupedGemm {
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Output = cutlass::bfloat16_t;
  using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
  using Tile = cute::Shape<cute::_256, cute::_128, cute::Int<Depth>>;
  using Arch = cutlass::arch::Sm100;
  using Operator = cutlass::arch::OpClassBlockScaledTensorOp;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, Operator, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, Output, Row*, 8,
      Output, Row*, 8, cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm>::CollectiveOp;
  using Stages =
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<Arch, Operator, Element, Row*, Alignment,
                                                                         Element, Column*, Alignment, float, Tile,
                                                                         Cluster, Stages, Schedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  // The pointer arrays are the host's, one device address a group; scales lie in atoms of 128 rows x 4 blocks.
  static int run(int groups, int const* m, int n, int k, void* const* a, void* const* b, void* const* scale_a,
                 void* const* scale_b, void* const* c, void* const* d, int sms) {
    using Scale = typename Kernel::ElementSF;
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;
    using Operand = typename Gemm::ElementA;
    std::vector<typename Problem::UnderlyingProblemShape> shapes;
    std::vector<typename Kernel::InternalStrideA> strides_a(groups);
    std::vector<typename Kernel::InternalStrideB> strides_b(groups);
    std::vector<typename Kernel::InternalStrideC> strides_c(groups);
    std::vector<typename Kernel::InternalStrideD> strides_d(groups);
    std::vector<typename Mainloop::InternalLayoutSFA> layouts_a;
    std::vector<typename Mainloop::InternalLayoutSFB> layouts_b;
    std::vector<Operand const*> pointers_a, pointers_b;
    std::vector<Scale const*> pointers_scale_a, pointers_scale_b;
    std::vector<Output const*> pointers_c;
    std::vector<Output*> pointers_d;
    for (int group = 0; group < groups; ++group) {
      shapes.push_back({m[group], n, k});
      cute::get<0>(strides_a[group]) = cute::get<0>(strides_b[group]) = k;
      cute::get<0>(strides_c[group]) = cute::get<0>(strides_d[group]) = n;
      layouts_a.push_back(Config::tile_atom_to_shape_SFA(cute::make_shape(m[group], n, k, 1)));
      layouts_b.push_back(Config::tile_atom_to_shape_SFB(cute::make_shape(m[group], n, k, 1)));
      pointers_a.push_back(static_cast<Operand const*>(a[group]));
      pointers_b.push_back(static_cast<Operand const*>(b[group]));
      pointers_scale_a.push_back(static_cast<Scale const*>(scale_a[group]));
      pointers_scale_b.push_back(static_cast<Scale const*>(scale_b[group]));
      pointers_c.push_back(static_cast<Output const*>(c[group]));
      pointers_d.push_back(static_cast<Output*>(d[group]));
    }
    DeviceCopy device_shapes(shapes);
    DeviceCopy device_strides_a(strides_a), device_strides_b(strides_b);
    DeviceCopy device_strides_c(strides_c), device_strides_d(strides_d);
    DeviceCopy device_layouts_a(layouts_a), device_layouts_b(layouts_b);
    DeviceCopy device_a(pointers_a), device_b(pointers_b);
    DeviceCopy device_scale_a(pointers_scale_a), device_scale_b(pointers_scale_b);
    DeviceCopy device_c(pointers_c);
    DeviceCopy device_d(pointers_d);

    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = 0;
    hardware.sm_count = sms;
    hardware.cluster_shape = hardware.cluster_shape_fallback = dim3(2, 1, 1);
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {groups, device_shapes.data, shapes.data()},
        {device_a.data, device_strides_a.data, device_b.data, device_strides_b.data, device_scale_a.data,
         device_layouts_a.data, device_scale_b.data, device_layouts_b.data},
        {{}, device_c.data, device_strides_c.data, device_d.data, device_strides_d.data},
        hardware};
    arguments.epilogue.thread.alpha = arguments.epilogue.thread.beta = 1;

    Gemm gemm;
    if (gemm.can_implement(arguments) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
    DeviceCopy workspace(std::vector<uint8_t>(Gemm::get_workspace_size(arguments)));
    if (gemm.initialize(arguments, workspace.data) != cutlass::Status::kSuccess) return cudaErrorInvalidConfiguration;
    if (gemm.run() != cutlass::Status::kSuccess) return cudaErrorLaunchFailure;
    return cudaDeviceSynchronize();
  }
};
