// The Blackwell engine: what it launches for a problem, and its entry in the dispatcher's table.
#include "../core/engine.h"

#include "../core/arena.h"
#include "../core/block_quantize.h"
#include "../core/scale_layout.h"
#include "../cuda/activations.h"
#include "../cuda/dact.h"
#include "../cuda/outputs.h"
#include "../cuda/quantize.h"
#include "../cuda/tensor_map.h"
#include "epilogue.h"
#include "grouped_gemm.h"
#include "kernels.h"

namespace cudnn_grouped::sm100 {
namespace {

using cuda::make_map;

inline constexpr int kGroupRows = 2048;  // of A that share a panel of B in L2
inline constexpr auto kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
inline constexpr auto kHalf = CU_TENSOR_MAP_DATA_TYPE_UINT16;
inline constexpr auto k128 = CU_TENSOR_MAP_SWIZZLE_128B;

int sms_of(GroupedGemm const& p) { return p.tile_m == 256 ? 2 : 1; }
bool is_sixteen_bit(DType d) { return d == DType::bfloat16 || d == DType::float16; }

// Bits of an element of A and B.
int operand_bits(GroupedGemm const& p) {
  return p.operands == OperandFormat::bf16 ? 16 : p.operands == OperandFormat::e2m1 ? 4 : 8;
}

// PTX ISA, "Instruction descriptor".
uint32_t instruction_descriptor(GroupedGemm const& p, Multiply multiply) {
  uint32_t const n = uint32_t(p.tile_n / 8) << 17, m = uint32_t(p.tile_m / 16) << 24;
  uint32_t const b_major = uint32_t(p.b_is_n_major) << 16;
  if (multiply == Multiply::f16) {
    uint32_t const fp32 = 1u << 4, bf16 = 1u << 7 | 1u << 10;
    return fp32 | bf16 | b_major | n | m;
  }
  uint32_t const format = p.operands == OperandFormat::e4m3 ? 0 : 1;  // of mxf8f6f4: e4m3, e5m2; of mxf4: e2m1
  uint32_t const scales_are_e8m0 = p.scale_dtype == DType::float8_e8m0fnu ? 1u << 23 : 0;
  return format << 7 | format << 10 | b_major | n | scales_are_e8m0 | m;
}

Operands operands_of(GroupedGemm const& p) {
  Operands o{};
  int const bits = operand_bits(p), element_bytes = bits / 8;
  o.multiply = bits == 16            ? Multiply::f16
               : bits == 8           ? Multiply::mxf8f6f4
               : p.sf_vec_size == 16 ? Multiply::mxf4_block16
                                     : Multiply::mxf4_block32;
  o.instruction = instruction_descriptor(p, o.multiply);
  o.stage_k = kRowBytes * 8 / bits, o.stage_columns = bits == 16 ? o.stage_k : kRowBytes;
  o.tile_n = int(p.tile_n), o.b_rows = o.tile_n / sms_of(p);
  o.scale_atoms = p.block_scaled() ? o.stage_k / int(p.sf_vec_size) / int(kAtomBlocks) : 0;
  o.b_is_n_major = p.b_is_n_major;
  if (p.b_is_n_major) {
    int const span = std::min(kRowBytes, o.b_rows * element_bytes);  // of the swizzle
    o.b_panel_columns = span / element_bytes, o.b_panels = o.b_rows / o.b_panel_columns;
    o.b_panel_bytes = span * o.stage_k;
    o.b_descriptor = columns_descriptor(span, o.b_panel_bytes);
    o.b_step = o.stage_k / 4 * span / 16;
  } else {
    o.b_descriptor = kRowsDescriptor, o.b_step = kRowBytes / 4 / 16;
  }
  o.stages = std::min((kSharedBytes - kStagesAt) / stage_bytes(o), int(Control::kMostStages));
  return o;
}

struct Workspace {
  int64_t bytes;
  int64_t *b_addresses, *sfb_addresses;  // of a list of tensors, on the device
  CUtensorMap *b_maps, *sfb_maps;
  float *dprob, *dbias, *bias;  // bias: in FP32

  Workspace(GroupedGemm const& p, void* base) {
    Arena arena(base);
    b_addresses = p.b_list.empty() ? nullptr : arena.take<int64_t>(p.experts);
    sfb_addresses = p.sfb_list.empty() ? nullptr : arena.take<int64_t>(p.experts);
    bool const discrete = b_addresses || p.b_pointers;
    b_maps = discrete ? arena.take<CUtensorMap>(p.experts) : nullptr;
    sfb_maps = discrete && p.block_scaled() ? arena.take<CUtensorMap>(p.experts) : nullptr;
    dprob = p.forward() ? nullptr : arena.take<float>(dprob_slots(p) * p.m);
    dbias = p.dbias || p.dbias_slots ? arena.take<float>(p.m / cuda::kSlotRows * p.d_columns()) : nullptr;
    bias = cuda::copies_bias(p) ? arena.take<float>(p.experts * p.n) : nullptr;
    bytes = arena.used();
  }
  // A GEMM's tile has a slot for each half of its columns.
  static int64_t dprob_slots(GroupedGemm const& p) {
    if (p.operation == Operation::dact) return ceil_div<int64_t>(p.n, cuda::kDactColumns);
    return 2 * ceil_div(p.n, p.tile_n);
  }
};

int64_t workspace_bytes(GroupedGemm const& p, int) { return p.m ? Workspace(p, nullptr).bytes : 0; }

// Packed FP4 is counted in bytes.
int64_t row_bytes(GroupedGemm const& p) { return p.k * operand_bits(p) / 8; }

CUtensorMap map_of_a(GroupedGemm const& p, Operands const& o) {
  int64_t const row = row_bytes(p);
  int const rows = kBlockM / int(p.cluster_n);  // a part: blocks with the same rows load one each
  if (o.multiply == Multiply::f16) return make_map(p.a, kHalf, k128, {{p.k, 0, o.stage_columns}, {p.m, row, rows}});
  return make_map(p.a, kByte, k128, {{row, 0, kRowBytes}, {p.m, row, rows}});
}

// Which experts a map of weights covers: all, one, or one without rows or without an address: next to no values of A's.
enum class Cover { all, one, none };

CUtensorMap map_of_b(GroupedGemm const& p, Operands const& o, Cover cover) {
  bool const bf16 = o.multiply == Multiply::f16, none = cover == Cover::none;
  int const element = bf16 ? 2 : 1;  // of the map: FP4 moves in bytes
  int64_t const row = row_bytes(p), experts = cover == Cover::all ? p.experts : 1;
  void const* const b = cover == Cover::all ? p.b : p.a;
  auto const type = bf16 ? kHalf : kByte;
  auto const size = [&](int64_t all, int64_t least) { return none ? least : all; };
  if (o.b_is_n_major) {
    bool const narrow = o.b_panel_columns * element < kRowBytes;
    return make_map(b, type, narrow ? CU_TENSOR_MAP_SWIZZLE_64B : k128,
                    {{size(p.n, 16 / element), 0, o.b_panel_columns},
                     {size(p.k, 1), p.n * element, o.stage_k},
                     {experts, p.n * row, 1}});
  }
  // Two blocks of one SM each that have the same columns load half of B each.
  int const rows = o.b_rows / (sms_of(p) == 1 ? int(p.cluster_m) : 1);
  return make_map(b, type, k128,
                  {{size(row / element, 16 / element), 0, kRowBytes / element},
                   {size(p.n, 1), row, rows},
                   {experts, p.n * row, 1}});
}

// Atoms of 512 bytes: along K, along rows, of experts.
CUtensorMap map_of_scales(void const* scales, GroupedGemm const& p, Operands const& o, int64_t rows, int box_rows,
                          int64_t experts) {
  int64_t const atoms = ceil_div(ceil_div(p.k, p.sf_vec_size), kAtomBlocks), row_atoms = ceil_div(rows, kAtomRows);
  return make_map(scales, kHalf, CU_TENSOR_MAP_SWIZZLE_NONE,
                  {{kAtomBytes / 2, 0, int(kAtomBytes / 2)},
                   {atoms, kAtomBytes, o.scale_atoms},
                   {row_atoms, atoms * kAtomBytes, box_rows},
                   {experts, row_atoms * atoms * kAtomBytes, 1}});
}

CUtensorMap map_of_sfb(GroupedGemm const& p, Operands const& o, Cover cover) {
  void const* const scales = cover == Cover::all ? p.sfb : p.sfa;
  int64_t const experts = cover == Cover::all ? p.experts : 1;
  if (cover != Cover::none) return map_of_scales(scales, p, o, p.n, o.tile_n / int(kAtomRows), experts);
  GroupedGemm least = p;
  least.k = 1;
  return map_of_scales(scales, least, o, 1, o.tile_n / int(kAtomRows), 1);
}

// C and D of `columns` columns in boxes of a warp's rows and of `width` columns.
CUtensorMap map_of_rows(void const* data, GroupedGemm const& p, int64_t columns, int width, int element_bytes) {
  int const span = width * element_bytes;
  auto const swizzle = span == 128 ? k128 : span == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
  return make_map(data, element_bytes == 1 ? kByte : kHalf, swizzle,
                  {{columns, 0, width}, {p.m, columns * element_bytes, kWarpRows}});
}

// What most calls are: C in BF16, D in BF16 or E4M3, dbias only beside the latter, no bias or epilogue_op.
bool is_usual(GroupedGemm const& p) {
  bool const d = p.quantised() ? p.d_dtype == DType::float8_e4m3fn
                               : p.d_dtype == DType::bfloat16 && (!p.d_col || p.d_col == p.d_row);
  bool const dbias = !p.quantised() && (p.dbias || p.dbias_slots);
  bool const extras = p.bias || dbias || p.epilogue_op != EpilogueOp::identity;
  return p.c && p.c_dtype == DType::bfloat16 && d && !extras;
}

Params params_of(GroupedGemm const& p, Workspace const& w) {
  Params out{cuda::epilogue_params_of(p, w.bias, w.dprob, w.dbias)};
  out.operands = operands_of(p);
  out.cluster_m = int(p.cluster_m), out.cluster_n = int(p.cluster_n);
  out.n_clusters = int(ceil_div(ceil_div(p.n, p.tile_n), p.cluster_n));
  out.group_m = kGroupRows / (kBlockM * out.cluster_m);
  out.dynamic = p.use_dynamic_sched;
  out.reciprocal_largest = p.d_dtype == DType::float8_e4m3fn ? E4M3::kReciprocal : E5M2::kReciprocal;
  out.stages_c = p.c && is_sixteen_bit(p.c_dtype);
  out.stages_d = p.quantised() || is_sixteen_bit(p.d_dtype);
  out.usual = is_usual(p);

  out.a = map_of_a(p, out.operands);
  if (p.block_scaled()) out.sfa = map_of_scales(p.sfa, p, out.operands, p.m, 1, 1);
  int const width = 32 * int(p.width), d_width = p.forward() ? 32 : width, d_bytes = p.quantised() ? 1 : 2;
  if (out.stages_c) out.c = map_of_rows(p.c, p, p.c_columns(), width, 2);
  if (out.stages_d) out.d = map_of_rows(p.d_row, p, p.d_columns(), d_width, d_bytes);
  if (out.stages_d && out.d_col_data) out.d_col = map_of_rows(p.d_col, p, p.d_columns(), d_width, d_bytes);
  return out;
}

// Maps of B and of its scale factors: of all experts, or one for each.
void map_weights(GroupedGemm const& p, Workspace const& w, Params& params, cudaStream_t stream) {
  Operands const& o = params.operands;
  if (!w.b_maps) {
    params.b = map_of_b(p, o, Cover::all);
    if (p.block_scaled()) params.sfb = map_of_sfb(p, o, Cover::all);
    return;
  }
  if (w.b_addresses) cuda::write_addresses(p.b_list, w.b_addresses, stream);
  if (w.sfb_addresses) cuda::write_addresses(p.sfb_list, w.sfb_addresses, stream);
  params.b_maps = w.b_maps, params.sfb_maps = w.sfb_maps;
  // Each expert's copy gets its own address.
  cuda::make_expert_maps(map_of_b(p, o, Cover::one), map_of_b(p, o, Cover::none),
                         w.b_addresses ? w.b_addresses : p.b_pointers, params.experts, w.b_maps, stream);
  if (!p.block_scaled()) return;
  cuda::make_expert_maps(map_of_sfb(p, o, Cover::one), map_of_sfb(p, o, Cover::none),
                         w.sfb_addresses ? w.sfb_addresses : p.sfb_pointers, params.experts, w.sfb_maps, stream);
}

void multiply(GroupedGemm const& p, Workspace const& w, cudaStream_t stream) {
  Params params = params_of(p, w);
  map_weights(p, w, params, stream);
  cuda::zero_padding(p, stream);
  if (w.bias) cuda::widen(p.bias, p.bias_dtype, w.bias, p.experts * p.n, stream);
  ActivationKernels const* const kernels = cuda::visit_activation(
      p, [](auto const& activation) { return &kernels_of<std::decay_t<decltype(activation)>>(); });
  auto const& direction = p.forward() ? kernels->forward : kernels->backward;
  int64_t const clusters = p.m / (kBlockM * p.cluster_m) * params.n_clusters;
  (p.quantised() ? direction.quantised : direction.plain)[sms_of(p) - 1](p, params, clusters, stream);
}

void run(GroupedGemm const& p, Launch const& launch) {
  if (p.m == 0) return;
  cudaStream_t const stream = static_cast<cudaStream_t>(launch.stream);
  Workspace const w(p, launch.workspace);
  int const blocks = cuda::bind_device();
  int parts = 2;
  if (p.operation == Operation::dact) {
    cuda::dact(p, w.dprob, w.dbias, stream);
    parts = 1;
  } else {
    multiply(p, w, stream);
  }
  cuda::finish_outputs(p, w.dprob, int(Workspace::dprob_slots(p)), parts, w.dbias, blocks, stream);
}

// What has no kernel here ----------------------------------------------------------------------------------------

std::optional<Error> missing(GroupedGemm const& p) {
  if (!p.block_scaled() || p.scaled_weights()) return std::nullopt;
  return Error{
      Error::Kind::not_implemented, "b",
      "expected the dtype of a on compute capability 10.x, got bfloat16 (the tensor cores multiply block-scaled "
      "operands as they are: keep the quantised weights)"};
}

std::optional<Error> missing_weight_gradient(WeightGradient const&) {
  return Error{Error::Kind::not_implemented, "device",
               "expected one whose engine has wgrad (cpu, compute capability 9.0), got compute capability 10.x"};
}

// Of the devices that the library was compiled for; setup.py says which.
#ifndef CUDNN_GROUPED_SM100_CAPABILITIES
#define CUDNN_GROUPED_SM100_CAPABILITIES 100, 103
#endif

bool const registered = [] {
  register_engine({"sm100",
                   Device::Type::cuda,
                   {CUDNN_GROUPED_SM100_CAPABILITIES},
                   workspace_bytes,
                   run,
                   nullptr,
                   nullptr,
                   cuda::quantize,
                   cuda::dequantize,
                   cuda::reduce_dbias,
                   missing,
                   missing_weight_gradient});
  return true;
}();

}  // namespace
}  // namespace cudnn_grouped::sm100
