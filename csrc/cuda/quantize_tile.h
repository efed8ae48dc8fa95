// What the quantiser's kernels share: eight neighbouring values in registers, their codes, and the experts' rows.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "../core/block_quantize.h"
#include "../core/quantize_problem.h"
#include "../core/scale_layout.h"
#include "inline.h"

namespace cudnn_grouped::cuda {
namespace {

// The dtypes of x as types.
struct Float32 {
  using Storage = uint32_t;
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  CG_DEVICE float decode(uint32_t bits) { return bits_float(bits); }
  CG_DEVICE uint32_t encode(float x) { return float_bits(x); }
};
struct BFloat16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  CG_DEVICE float decode(uint32_t bits) { return decode_bf16(bits); }
  CG_DEVICE float2 decode_pair(uint32_t word) { return {decode_bf16(word), bits_float(word & 0xffff0000u)}; }
  CG_DEVICE uint32_t encode(float x) { return encode_bf16(x); }
};
struct Float16 {
  using Storage = uint16_t;
  static constexpr uint32_t kMagnitude = 0x7fff7fffu;
  CG_DEVICE float decode(uint32_t bits) { return decode_fp16(bits); }
  CG_DEVICE float2 decode_pair(uint32_t word) {
    return __half22float2(__half2(__half2_raw{uint16_t(word), uint16_t(word >> 16)}));
  }
  CG_DEVICE uint32_t encode(float x) { return encode_fp16(x); }
};
template <class X>
inline constexpr bool kIsPacked = sizeof(typename X::Storage) == 2;  // two values to a word

// Eight neighbouring values of a row of x, as they lie in memory. Past `count` they are zero.
template <class X>
struct Chunk {
  using Storage = typename X::Storage;
  static constexpr int kWords = 2 * sizeof(Storage);
  uint32_t word[kWords];

  // kAligned: to 16 bytes, and chunks are whole or absent.
  template <bool kAligned>
  CG_DEVICE Chunk load(Storage const* at, int count) {
    Chunk chunk{};
    if (count <= 0) return chunk;
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        uint4 const v = __ldg(reinterpret_cast<uint4 const*>(at) + i / 4);
        chunk.word[i] = v.x, chunk.word[i + 1] = v.y, chunk.word[i + 2] = v.z, chunk.word[i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) chunk.word[i * kWords / 8] |= uint32_t(__ldg(at + i)) << (kIsPacked<X> ? i % 2 * 16 : 0);
      }
    }
    return chunk;
  }
  template <bool kAligned>
  __device__ __forceinline__ void store(Storage* at, int count) const {
    if (count <= 0) return;
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        // As PTX, because the compiler splits a store of words that were packed from halves.
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at + i / 4 * 4), "r"(word[i]), "r"(word[i + 1]),
                     "r"(word[i + 2]), "r"(word[i + 3])
                     : "memory");
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < count) at[i] = Storage(word[i * kWords / 8] >> (kIsPacked<X> ? i % 2 * 16 : 0));
      }
    }
  }
  __device__ __forceinline__ float2 pair(int i) const {
    if constexpr (kIsPacked<X>) {
      return X::decode_pair(word[i]);
    } else {
      return {bits_float(word[2 * i]), bits_float(word[2 * i + 1])};
    }
  }
};

// Largest magnitudes, each place of a chunk by itself. Bit patterns order as magnitudes do in every dtype of x, with
// NaN on top, so amax is the decoded maximum.
template <class X>
struct Peaks {
  static constexpr int kWords = Chunk<X>::kWords;
  uint32_t word[kWords] = {};

  CG_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
    if constexpr (kIsPacked<X>) return __vmaxu2(a, b);
    return max(a, b);
  }
  __device__ __forceinline__ void take(Chunk<X> const& chunk) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = larger(word[i], chunk.word[i] & X::kMagnitude);
  }
  __device__ __forceinline__ void take_lanes(int distance) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = larger(word[i], __shfl_xor_sync(~0u, word[i], distance));
  }
  __device__ __forceinline__ float at(int i) const {
    if constexpr (kIsPacked<X>) return X::decode(word[i / 2] >> (i % 2 * 16) & 0xffffu);
    return X::decode(word[i]);
  }
  // The largest over the chunk and over `lanes` neighbouring lanes.
  __device__ __forceinline__ float over_lanes(int lanes) const {
    uint32_t most = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) most = larger(most, word[i]);
    if constexpr (kIsPacked<X>) most = max(most & 0xffffu, most >> 16);
    for (int distance = 1; distance < lanes; distance *= 2) most = max(most, __shfl_xor_sync(~0u, most, distance));
    return X::decode(most);
  }
};

// The codes of eight values: FP8 in two words, FP4 in one, the first value lowest.
template <class Format>
struct Codes {
  static constexpr bool kFp4 = std::is_same_v<Format, E2M1>;
  static constexpr int kWords = kFp4 ? 1 : 2, kBits = kFp4 ? 4 : 8, kPerWord = 32 / kBits;
  uint32_t word[kWords];

  // The conversion instructions do what the core's encode does: nearest even, saturating, NaN to 0x7f.
  CG_DEVICE uint32_t encode_pair(float2 v) {
    if constexpr (kFp4) {
      return encode_e2m1(v.x) | encode_e2m1(v.y) << 4;
    } else {
      return __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, std::is_same_v<Format, E4M3> ? __NV_E4M3 : __NV_E5M2);
    }
  }
  __device__ __forceinline__ void set_pair(int i, float2 v) {
    if (2 * i % kPerWord == 0) word[2 * i / kPerWord] = 0;
    word[2 * i / kPerWord] |= encode_pair(v) << (2 * i % kPerWord * kBits);
  }
  __device__ __forceinline__ float decode(int i) const {
    return Format::decode(word[i / kPerWord] >> (i % kPerWord * kBits) & ((1u << kBits) - 1));
  }
  // count is even for FP4. kAligned: to the size of the codes, and chunks are whole or absent.
  template <bool kAligned>
  CG_DEVICE Codes load(uint8_t const* at, int count) {
    Codes codes{};
    if (count <= 0) return codes;
    if constexpr (kAligned) {
      if constexpr (kFp4) {
        codes.word[0] = __ldg(reinterpret_cast<uint32_t const*>(at));
      } else {
        uint2 const v = __ldg(reinterpret_cast<uint2 const*>(at));
        codes.word[0] = v.x, codes.word[1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords * 4; ++i) {
        if (i < count * kBits / 8) codes.word[i / 4] |= uint32_t(__ldg(at + i)) << (i % 4 * 8);
      }
    }
    return codes;
  }
  template <bool kAligned>
  __device__ __forceinline__ void store(uint8_t* at, int count) const {
    if (count <= 0) return;
    if constexpr (kAligned) {
      if constexpr (kFp4) {
        *reinterpret_cast<uint32_t*>(at) = word[0];
      } else {
        *reinterpret_cast<uint2*>(at) = make_uint2(word[0], word[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords * 4; ++i) {
        if (i < count * kBits / 8) at[i] = uint8_t(word[i / 4] >> (i % 4 * 8));
      }
    }
  }
};

// What a kernel receives. A block of threads has one tile; tiles run across, then down, then over the batch.
struct Tiles {
  int64_t rows, columns, block;
  uint32_t across, down;
  void* x;
  uint8_t *data, *scales;
  float const* norm_const;
  int32_t const* offsets;
  int experts;
  bool e4m3_scales, aligned;

  static Tiles of(QuantizeProblem const& p, int64_t tile_rows, int64_t tile_columns) {
    auto aligned = [](void const* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; };
    bool const fp4 = p.data_dtype == DType::float4_e2m1fn_x2;
    // Chunks of x are eight along a row; so are those of the data, or along a column.
    int64_t const run = fp4 && p.by_column ? p.rows : p.columns;
    return {p.rows,
            p.columns,
            p.block,
            uint32_t(ceil_div(p.columns, tile_columns)),
            uint32_t(ceil_div(p.rows, tile_rows)),
            p.x,
            static_cast<uint8_t*>(p.data),
            p.scales,
            p.norm_const,
            p.padded_offsets,
            int(p.experts),
            p.scale_dtype == DType::float8_e4m3fn,
            p.columns % 8 == 0 && run % 8 == 0 && aligned(p.x, 16) && aligned(p.data, fp4 ? 4 : 8)};
  }
  uint32_t count(int64_t batch) const { return uint32_t(across * int64_t(down) * batch); }

  struct Place {
    uint32_t across, down, batch;
  };
  __device__ __forceinline__ Place place() const {
    uint32_t const rest = blockIdx.x / across;
    return {blockIdx.x % across, rest % down, rest / down};
  }
  __device__ __forceinline__ float norm() const { return norm_const ? __ldg(norm_const) : 1.f; }
};

// The expert that a tile's rows belong to. For offsets that break the rules too, its rows lie within the tensor.
struct ExpertRows {
  int64_t start, end;
  bool found;

  // Called by all threads of the block. The offsets do not decrease, so those at or before a row count its expert.
  CG_DEVICE ExpertRows of(Tiles const& t, int64_t row) {
    int expert = 0;
    for (int first = 0; first < t.experts; first += int(blockDim.x)) {
      int const i = first + int(threadIdx.x);
      expert += __syncthreads_count(i < t.experts && __ldg(t.offsets + i) <= row);
    }
    if (expert == t.experts) return {0, 0, false};
    auto whole = [&](int64_t offset) {
      return (offset < 0 ? 0 : offset > t.rows ? t.rows : offset) / kRowAlignment * kRowAlignment;
    };
    int64_t const start = expert ? whole(__ldg(t.offsets + expert - 1)) : 0, end = whole(__ldg(t.offsets + expert));
    return {start, end, start <= row && row < end};
  }
};

}  // namespace
}  // namespace cudnn_grouped::cuda
