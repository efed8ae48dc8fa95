#include "finish.h"

#include <algorithm>

#include "../core/number_formats.h"
#include "../core/scale_layout.h"
#include "launch.h"
#include "ptx.h"

namespace cudnn_grouped::cuda {
namespace {

__device__ __forceinline__ void zero(void* data, int64_t begin, int64_t end) {  // multiples of 16 bytes
  uint4* const at = static_cast<uint4*>(data);
  int64_t const step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = begin / 16 + int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < end / 16; i += step) at[i] = {};
}

__global__ void __launch_bounds__(256) finish_kernel(__grid_constant__ Finish const p) {
  int const rows = p.experts.rows(), m = p.experts.m, step = gridDim.x * blockDim.x;
  for (int row = blockIdx.x * blockDim.x + threadIdx.x; row < m && p.dprob_slots; row += step) {
    auto sum = [&](int first, int last) {
      float total = 0.f;
      if (row >= rows) return total;
#pragma unroll 8
      for (int slot = first; slot < last; ++slot) total += p.dprob_slots[int64_t(slot) * m + row];
      return total;
    };
    if (p.documented_dprob) {
      for (int slot = 0; slot < p.documented_slots; ++slot) {
        float const part = sum(slot * p.parts, min((slot + 1) * p.parts, p.n_tiles));
        p.documented_dprob[int64_t(row) * p.documented_slots + slot] = part;
      }
    } else {
      float const total = sum(0, p.n_tiles);
      p.dprob[row] = row < rows && !p.is_new ? p.dprob[row] + total : total;
    }
  }
  for (Finish::Rows const& tensor : p.rows) {
    if (tensor.data) zero(tensor.data, rows * tensor.row_bytes, m * tensor.row_bytes);
  }
  if (!p.sfd_row) return;
  ScaleLayout const by_row = ScaleLayout::of(m, ceil_div(p.d_columns, kQuantBlock));
  ScaleLayout const by_column = ScaleLayout::of(p.d_columns, m / kQuantBlock);
  zero(p.sfd_row, rows / kAtomRows * by_row.block_atoms * kAtomBytes, by_row.bytes());
  if (p.discrete_col_sfd) {
    zero(p.sfd_col, discrete_column_base(rows, p.d_columns, kQuantBlock), by_column.bytes());
    return;
  }
  int64_t const used = rows / (kQuantBlock * kAtomBlocks);
  for (int64_t atom = 0; atom < by_column.row_atoms && used < by_column.block_atoms; ++atom) {
    int64_t const base = atom * by_column.block_atoms * kAtomBytes;
    zero(p.sfd_col, base + used * kAtomBytes, base + by_column.block_atoms * kAtomBytes);
  }
}

// A block's lines of threads, each with four columns a thread: line i sums the slots i, i + kLines, ...; then the lines
// are summed in order.
inline constexpr int kLines = 8, kBiasColumns = 4 * 32;
__global__ void __launch_bounds__(32 * kLines) bias_kernel(__grid_constant__ BiasSums const p) {
  __shared__ alignas(16) float partial[kLines][kBiasColumns];
  int const expert = blockIdx.y, line = threadIdx.y, first_column = blockIdx.x * kBiasColumns;
  int const first = p.experts.start(expert) / kSlotRows, last = p.experts.end(expert) / kSlotRows;
  float4 sum = {};
  if (first_column + int(threadIdx.x) * 4 < p.columns) {
#pragma unroll 8
    for (int slot = first + line; slot < last; slot += kLines) {
      float4 const v = reinterpret_cast<float4 const*>(p.slots + slot * p.columns + first_column)[threadIdx.x];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  reinterpret_cast<float4*>(partial[line])[threadIdx.x] = sum;
  __syncthreads();
  int const column = line * 32 + int(threadIdx.x);
  if (column >= kBiasColumns || first_column + column >= p.columns) return;
  float total = partial[0][column];
#pragma unroll
  for (int i = 1; i < kLines; ++i) total += partial[i][column];
  uint16_t& out = p.dbias[expert * p.columns + first_column + column];
  out = uint16_t(encode_bf16((p.is_new ? 0.f : decode_bf16(out)) + total));
}

__global__ void __launch_bounds__(256) documented_bias_kernel(__grid_constant__ BiasSums const p) {
  int64_t const count = p.experts.m / kDbiasSlotRows * p.columns, step = int64_t(gridDim.x) * blockDim.x;
  int64_t const used = p.experts.rows() / kDbiasSlotRows * p.columns;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    constexpr int kParts = int(kDbiasSlotRows) / kSlotRows;
    float const* slot = p.slots + i / p.columns * kParts * p.columns + i % p.columns;
    float sum = 0.f;
    for (int part = 0; part < kParts && i < used; ++part) sum += slot[part * p.columns];
    p.documented[i] = uint16_t(encode_bf16(sum));
  }
}

__global__ void __launch_bounds__(256) widen_kernel(void const* from, DType dtype, float* to, int64_t count) {
  int64_t const i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  if (dtype == DType::float32) {
    to[i] = static_cast<float const*>(from)[i];
  } else {
    uint32_t const half = static_cast<uint16_t const*>(from)[i];
    to[i] = dtype == DType::bfloat16 ? decode_bf16(half) : decode_fp16(half);
  }
}

struct Addresses {
  static constexpr int kMost = 256;
  int64_t value[kMost];
};
__global__ void address_kernel(__grid_constant__ Addresses const addresses, int count, int64_t* to) {
  if (int(threadIdx.x) < count) to[threadIdx.x] = addresses.value[threadIdx.x];
}

__global__ void map_kernel(__grid_constant__ CUtensorMap const map, __grid_constant__ CUtensorMap const none,
                           int64_t const* addresses, Experts experts, CUtensorMap* maps) {
  __shared__ alignas(128) CUtensorMap copy;
  int const expert = blockIdx.x;
  int64_t const address = experts.start(expert) < experts.end(expert) ? addresses[expert] : 0;
  bool const usable = is_usable(address);
  CUtensorMap const& from = usable ? map : none;
  reinterpret_cast<uint32_t*>(&copy)[threadIdx.x] = reinterpret_cast<uint32_t const*>(&from)[threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0 && usable) {
    ptx::set_map_address(ptx::shared_address(&copy), reinterpret_cast<void const*>(address));
  }
  __syncwarp();
  ptx::publish_map(maps + expert, ptx::shared_address(&copy));
}

}  // namespace

void finish(Finish const& p, int blocks, cudaStream_t stream) { launch(finish_kernel, 2 * blocks, 256, 0, stream, p); }

void sum_bias(BiasSums const& p, cudaStream_t stream) {
  if (p.documented) return launch(documented_bias_kernel, 512, 256, 0, stream, p);
  dim3 const blocks(unsigned(ceil_div<int64_t>(p.columns, kBiasColumns)), p.experts.count);
  launch(bias_kernel, blocks, dim3(32, kLines), 0, stream, p);
}

void widen(void const* from, DType dtype, float* to, int64_t count, cudaStream_t stream) {
  launch(widen_kernel, unsigned(ceil_div<int64_t>(count, 256)), 256, 0, stream, from, dtype, to, count);
}

void write_addresses(std::vector<int64_t> const& addresses, int64_t* to, cudaStream_t stream) {
  for (size_t first = 0; first < addresses.size(); first += Addresses::kMost) {
    int const count = int(std::min<size_t>(Addresses::kMost, addresses.size() - first));
    Addresses part;
    std::copy_n(addresses.begin() + first, count, part.value);
    launch(address_kernel, 1, Addresses::kMost, 0, stream, part, count, to + first);
  }
}

void make_expert_maps(CUtensorMap const& map, CUtensorMap const& none, int64_t const* addresses, Experts const& experts,
                      CUtensorMap* maps, cudaStream_t stream) {
  launch(map_kernel, experts.count, 32, 0, stream, map, none, addresses, experts, maps);
}

}  // namespace cudnn_grouped::cuda
