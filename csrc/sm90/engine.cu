// The Hopper engine: what it launches for a problem, and its entry in the dispatcher's table.
#include "../core/engine.h"

#include <algorithm>

#include "../core/arena.h"
#include "../cuda/dact.h"
#include "../cuda/outputs.h"
#include "../cuda/quantize.h"
#include "../cuda/tensor_map.h"
#include "dequantise.h"
#include "kernels.h"
#include "weight_gradient.h"

namespace cudnn_grouped::sm90 {
namespace {

using cuda::bind_device, cuda::make_map, cuda::write_addresses;

inline constexpr auto kBF16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
inline constexpr auto kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
inline constexpr auto k128 = CU_TENSOR_MAP_SWIZZLE_128B;

ActivationKernels const& kernels_of(GroupedGemm const& p) {
  switch (p.activation) {
    case Activation::none:
      return identity_kernels();
    case Activation::srelu:
      return srelu_kernels(p.srelu.c_is_preactivation);
    case Activation::clamped_srelu:
      return clamped_srelu_kernels();
    case Activation::swiglu:
      return swiglu_kernels();
    case Activation::geglu:
      return geglu_kernels();
    case Activation::geglu_by_value:
      return geglu_by_value_kernels();
    default:
      return situglu_kernels();
  }
}

// Whether C and D are BF16 tensors that move by TMA.
bool stages_c(GroupedGemm const& p) { return p.c_dtype == DType::bfloat16 && !(p.forward() && p.quantised()); }
bool is_staged(GroupedGemm const& p) {
  bool const c = stages_c(p) || (p.forward() && !p.c);
  // The documented slots of dprob are sums over N tiles of 128 or 256.
  return c && !p.dprob_slots && p.epilogue_op == EpilogueOp::identity && p.d_dtype == DType::bfloat16 &&
         (!p.d_col || p.d_col == p.d_row);
}

// FP8 D: a tile of 192 columns reads less than tiles of 128 do, but a gated epilogue with its few registers needs K to
// hide behind, and N has to fill it (docs/hopper.md, "Wide"). The documented slots of dprob are sums over N tiles of
// 128 or 256.
bool prefers_wide(GroupedGemm const& p, Kernel const& wide) {
  int64_t const columns = ceil_div<int64_t>(p.n, 192) * 192, narrow = ceil_div<int64_t>(p.n, 128) * 128;
  return wide.launch && !p.dprob_slots && (p.width == 1 || p.k > 2048) && columns * 24 <= narrow * 25;
}

Kernel kernel_of(GroupedGemm const& p) {
  auto const& kernels = kernels_of(p);
  auto const& direction = p.forward() ? kernels.forward : kernels.backward;
  bool const dbias = p.dbias || p.dbias_slots, others = p.amax || p.bias || p.epilogue_op != EpilogueOp::identity;
  if (p.d_dtype == DType::float8_e5m2) return direction.e5m2_any_c;
  if (p.d_dtype == DType::float8_e4m3fn) {
    if (!stages_c(p) && !p.forward()) return direction.e4m3_any_c;
    if (others) return direction.e4m3_with_extras;
    Kernel const& wide = dbias ? direction.e4m3_wide_with_dbias : direction.e4m3_wide;
    return prefers_wide(p, wide) ? wide : dbias ? direction.e4m3_with_dbias : direction.e4m3;
  }
  if (!is_staged(p)) return direction.direct;
  return others ? direction.staged_with_extras : dbias ? direction.staged_with_dbias : direction.staged;
}

// Columns of the GEMM behind one slot of dprob.
int columns_of_slot(GroupedGemm const& p) {
  return p.operation == Operation::dact ? cuda::kDactColumns : kernel_of(p).tile_n;
}

struct Workspace {
  int64_t bytes;
  int64_t *b_addresses, *sfb_addresses;  // of a list of tensors, on the device
  CUtensorMap* maps;
  __nv_bfloat16 *a, *b;         // dequantised
  float *dprob, *dbias, *bias;  // bias: in FP32

  Workspace(GroupedGemm const& p, void* base) {
    Arena arena(base);
    b_addresses = p.b_list.empty() ? nullptr : arena.take<int64_t>(p.experts);
    sfb_addresses = p.sfb_list.empty() ? nullptr : arena.take<int64_t>(p.experts);
    bool const discrete = b_addresses || p.b_pointers;
    maps = discrete && !p.scaled_weights() ? arena.take<CUtensorMap>(p.experts) : nullptr;
    a = p.block_scaled() ? arena.take<__nv_bfloat16>(p.m * p.k) : nullptr;
    b = p.scaled_weights() ? arena.take<__nv_bfloat16>(p.experts * padded_n(p) * p.k) : nullptr;
    dprob = p.forward() ? nullptr : arena.take<float>(ceil_div<int64_t>(p.n, columns_of_slot(p)) * p.m);
    dbias = p.dbias || p.dbias_slots ? arena.take<float>(p.m / kSlotRows * p.d_columns()) : nullptr;
    bias = cuda::copies_bias(p) ? arena.take<float>(p.experts * p.n) : nullptr;
    bytes = arena.used();
  }
  // A permuted tile takes whole units of 32 rows of B.
  static int64_t padded_n(GroupedGemm const& p) { return ceil_div<int64_t>(p.n, 32) * 32; }
};

int64_t workspace_bytes(GroupedGemm const& p, int) { return p.m ? Workspace(p, nullptr).bytes : 0; }

void dequantise_operands(GroupedGemm const& p, Workspace const& w, int64_t const* pointers,
                         int64_t const* scale_pointers, cudaStream_t stream) {
  Dequantise a{};
  a.format = p.operands, a.scale_dtype = p.scale_dtype, a.sf_vec_size = int(p.sf_vec_size);
  a.data = p.a, a.scales = p.sfa, a.rows = p.m, a.columns = p.k;
  a.experts = p.experts, a.padded_offsets = p.single_group ? nullptr : p.padded_offsets;
  a.by_token = true, a.offset_limit = p.m, a.out = w.a;
  if (!p.scaled_weights()) return dequantise(a, nullptr, stream);
  Dequantise b = a;
  b.data = p.b, b.scales = p.sfb, b.rows_per_expert = p.n, b.out_rows_per_expert = Workspace::padded_n(p);
  b.expert_bytes = p.b_expert_bytes, b.scale_expert_bytes = p.sfb_expert_bytes;
  b.pointers = pointers, b.scale_pointers = scale_pointers;
  b.by_token = false, b.transposed = p.b_is_n_major, b.out = w.b;
  dequantise(a, &b, stream);
}

CUtensorMap map_of_a(void const* a, GroupedGemm const& p, bool interleaved) {
  int64_t const row = p.k * 2;
  if (!interleaved) return make_map(a, kBF16, k128, {{p.k, 0, kTileK}, {p.m, row, kTileM}});
  // Rows of a tile in the order [16-row half of a 32-row block][block][16 rows]: a warp then has 32 adjacent ones.
  return make_map(a, kBF16, k128,
                  {{p.k, 0, kTileK}, {16, row, 16}, {p.m / 32, 32 * row, kTileM / 32}, {2, 16 * row, 2}});
}

// n_stride: rows of B behind one expert in memory. experts: 1 for a map of one expert.
CUtensorMap map_of_b(void const* b, GroupedGemm const& p, Kernel const& kernel, bool n_major, int64_t n_stride,
                     int64_t experts) {
  int64_t const row = p.k * 2;
  if (n_major) return make_map(b, kBF16, k128, {{p.n, 0, 64}, {p.k, p.n * 2, kTileK}, {experts, p.n * row, 1}});
  if (!kernel.interleaved) {
    return make_map(b, kBF16, k128, {{p.k, 0, kTileK}, {p.n, row, kernel.tile_n}, {experts, n_stride * row, 1}});
  }
  // Of 32 rows, row 8 j + 2 q + e of shared memory is row 8 q + 2 j + e: see quantised.h.
  return make_map(b, kBF16, k128,
                  {{p.k, 0, kTileK},
                   {2, row, 2},
                   {4, 8 * row, 4},
                   {4, 2 * row, 4},
                   {experts * n_stride / 32, 32 * row, kernel.tile_n / 32}});
}

// Of an expert without rows: next to no values, all of them A's.
CUtensorMap map_of_nothing(void const* a, GroupedGemm const& p, Kernel const& kernel) {
  if (kernel.interleaved) {
    return make_map(a, kBF16, k128, {{8, 0, kTileK}, {1, 16, 2}, {1, 16, 4}, {1, 16, 4}, {1, 16, kernel.tile_n / 32}});
  }
  return make_map(a, kBF16, k128, {{8, 0, kTileK}, {1, 16, p.b_is_n_major ? kTileK : kernel.tile_n}, {1, 16, 1}});
}

// C and D of `columns` columns in boxes of `width`.
CUtensorMap map_of_rows(void const* data, GroupedGemm const& p, int64_t columns, int width, bool fp8) {
  auto const swizzle = width * (fp8 ? 1 : 2) == 128  ? k128
                       : width * (fp8 ? 1 : 2) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                     : CU_TENSOR_MAP_SWIZZLE_NONE;
  return make_map(data, fp8 ? kByte : kBF16, swizzle,
                  {{columns, 0, width}, {p.m, columns * (fp8 ? 1 : 2), fp8 ? kSlotRows : kTileM}});
}

// An expert of the average size takes as few groups as it can, of one even size: few groups have tiles of two experts.
TileOrder order_of(GroupedGemm const& p, Kernel const& kernel) {
  int const rows = std::max(int(p.m / kTileM / p.experts), 1), groups = ceil_div(rows, kernel.order.group);
  return {ceil_div(ceil_div(rows, groups), 2) * 2, kernel.order.serpentine && groups > 1};
}

Params params_of(GroupedGemm const& p, Workspace const& w, Kernel const& kernel) {
  Params out{cuda::epilogue_params_of(p, w.bias, w.dprob, w.dbias)};
  out.order = order_of(p, kernel);
  out.b_is_n_major = p.b_is_n_major && !p.block_scaled();
  out.a = map_of_a(p.block_scaled() ? w.a : p.a, p, kernel.interleaved);
  out.expert_maps = w.maps;
  int const d_width = p.forward() ? 64 / int(p.width) : 64;
  if (stages_c(p) && p.c) out.c = map_of_rows(p.c, p, p.c_columns(), 64, false);
  if (p.quantised()) {
    out.d = map_of_rows(p.d_row, p, p.d_columns(), d_width, true);
    out.d_col = map_of_rows(p.d_col, p, p.d_columns(), d_width, true);
  } else if (is_staged(p)) {
    out.d = map_of_rows(p.d_row, p, p.d_columns(), d_width, false);
  }
  return out;
}

// Everything but dact.
void multiply(GroupedGemm const& p, Workspace const& w, int blocks, cudaStream_t stream) {
  Kernel const kernel = kernel_of(p);
  if (w.b_addresses) write_addresses(p.b_list, w.b_addresses, stream);
  if (w.sfb_addresses) write_addresses(p.sfb_list, w.sfb_addresses, stream);
  int64_t const* pointers = w.b_addresses ? w.b_addresses : p.b_pointers;
  Params params = params_of(p, w, kernel);
  if (p.block_scaled()) {
    dequantise_operands(p, w, pointers, w.sfb_addresses ? w.sfb_addresses : p.sfb_pointers, stream);
  }
  if (p.scaled_weights()) {
    params.b = map_of_b(w.b, p, kernel, false, Workspace::padded_n(p), p.experts);
  } else if (w.maps) {
    // Each expert's copy gets its own address.
    void const* const a = p.block_scaled() ? w.a : p.a;
    CUtensorMap const map = map_of_b(a, p, kernel, p.b_is_n_major, p.n, 1), none = map_of_nothing(a, p, kernel);
    cuda::make_expert_maps(map, none, pointers, params.experts, w.maps, stream);
  } else {
    params.b = map_of_b(p.b, p, kernel, p.b_is_n_major, p.b_expert_bytes / (p.k * 2), p.experts);
  }
  cuda::zero_padding(p, stream);
  if (w.bias) cuda::widen(p.bias, p.bias_dtype, w.bias, p.experts * p.n, stream);
  kernel.launch(p, params, blocks, stream);
}

void run(GroupedGemm const& p, Launch const& launch) {
  if (p.m == 0) return;
  cudaStream_t const stream = static_cast<cudaStream_t>(launch.stream);
  Workspace const w(p, launch.workspace);
  int const blocks = bind_device(), slot_columns = columns_of_slot(p);
  if (p.operation == Operation::dact) {
    cuda::dact(p, w.dprob, w.dbias, stream);
  } else {
    multiply(p, w, blocks, stream);
  }
  int const slots = int(ceil_div<int64_t>(p.n, slot_columns)), parts = int(p.tile_n / slot_columns);
  cuda::finish_outputs(p, w.dprob, slots, parts, w.dbias, blocks, stream);
}

// Weight gradient ------------------------------------------------------------------------------------------------

struct WeightWorkspace {
  int64_t bytes;
  int64_t* addresses;
  __nv_bfloat16 *a, *b;

  WeightWorkspace(WeightGradient const& p, void* base) {
    Arena arena(base);
    addresses = arena.take<int64_t>(p.experts);
    a = p.block_scaled() ? arena.take<__nv_bfloat16>(p.a.rows * p.tokens) : nullptr;
    b = p.block_scaled() ? arena.take<__nv_bfloat16>(p.b.rows * p.tokens) : nullptr;
    bytes = arena.used();
  }
};

int64_t weight_gradient_workspace_bytes(WeightGradient const& p, int) { return WeightWorkspace(p, nullptr).bytes; }

CUtensorMap map_of_tokens(void const* data, WeightGradient const& p, WeightGradient::Operand const& o, int tile) {
  if (o.tokens_contiguous) return make_map(data, kBF16, k128, {{p.tokens, 0, kTileK}, {o.rows, p.tokens * 2, tile}});
  return make_map(data, kBF16, k128, {{o.rows, 0, 64}, {p.tokens, o.rows * 2, kTileK}});
}

void weight_gradient(WeightGradient const& p, Launch const& launch) {
  cudaStream_t const stream = static_cast<cudaStream_t>(launch.stream);
  WeightWorkspace const w(p, launch.workspace);
  int const blocks = bind_device();
  std::vector<int64_t> addresses;
  for (void* out : p.out) addresses.push_back(reinterpret_cast<int64_t>(out));
  write_addresses(addresses, w.addresses, stream);
  WeightTiles tiles{};
  tiles.experts = {p.padded_offsets, int(p.experts), int(p.tokens)};
  tiles.rows = int(p.a.rows), tiles.columns = int(p.b.rows);
  tiles.a_tokens_contiguous = p.a.tokens_contiguous, tiles.b_tokens_contiguous = p.b.tokens_contiguous;
  tiles.scale_a = p.global_scale_a, tiles.scale_b = p.global_scale_b;
  tiles.out = w.addresses, tiles.out_dtype = p.out_dtype, tiles.accumulate = p.accumulate;
  tiles.pairs = p.b.rows % 2 == 0;
  for (int64_t address : addresses) tiles.pairs &= address % (2 * bytes_of(p.out_dtype)) == 0;
  if (p.tokens > 0) {
    void const *a = p.a.data, *b = p.b.data;
    if (p.block_scaled()) {
      for (auto const& [operand, out] : {std::pair{p.a, w.a}, std::pair{p.b, w.b}}) {
        dequantise_tokens({p.operands, p.scale_dtype, int(p.sf_vec_size), operand, p.tokens, p.experts,
                           p.discrete_scales, p.padded_offsets, out},
                          stream);
      }
      a = w.a, b = w.b;
    }
    tiles.a = map_of_tokens(a, p, p.a, kTileM), tiles.b = map_of_tokens(b, p, p.b, kWeightTileN);
  }
  multiply_tokens(tiles, blocks, stream);
}

bool const registered = [] {
  register_engine({"sm90",
                   Device::Type::cuda,
                   {90},
                   workspace_bytes,
                   run,
                   weight_gradient_workspace_bytes,
                   weight_gradient,
                   cuda::quantize,
                   cuda::dequantize,
                   cuda::reduce_dbias});
  return true;
}();

}  // namespace
}  // namespace cudnn_grouped::sm90
