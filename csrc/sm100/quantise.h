// FP8 D: every 32 values along rows and along columns share a scale factor (decisions.md, "Block quantiser"). A thread
// holds a row, a warp 32 rows: a row's maximum is the thread's own, a column's is taken over the warp.
#pragma once

#include "../core/block_quantize.h"
#include "../cuda/scale_places.h"
#include "params.h"

namespace cudnn_grouped::sm100 {

// A row of a box of rows of kBytes, swizzled as TMA does with that span: its unit of 16 bytes u is at row ^ u * 16.
// Boxes are aligned to 1024 bytes.
template <int kBytes>
CG_DEVICE uint32_t swizzled_row(uint32_t box, int row) {
  uint32_t const offset = row * kBytes;
  return box + (offset ^ (offset >> 3 & (kBytes - 16)));
}

// The largest magnitude of 32 values; NaN stays.
CG_DEVICE float max_magnitude_of(float const* v) {
  float m = ptx::max_magnitude(v[0], v[1], v[2]);
#pragma unroll
  for (int e = 3; e < 31; e += 2) m = ptx::max_magnitude(m, v[e], v[e + 1]);
  return ptx::max_magnitude(m, v[31], v[31]);
}

struct FourFactors {
  Pair low, high;
};
// This thread's row of a box, kUnits * 32 bytes. factors(e): of the four columns from e on.
template <bool kE4M3, int kUnits, class Factors>
CG_DEVICE void store_form(float const (&v)[32 * kUnits], uint32_t box, int lane, Factors const& factors) {
  uint32_t const row = swizzled_row<32 * kUnits>(box, lane);
#pragma unroll
  for (int unit = 0; unit < 2 * kUnits; ++unit) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const e = unit * 16 + i * 4;
      FourFactors const f = factors(e);
      Pair const low = Pair(v[e], v[e + 1]) * f.low, high = Pair(v[e + 2], v[e + 3]) * f.high;
      packed[i] = cuda::ptx::pack_fp8<kE4M3>(low.lo, low.hi, high.lo, high.hi);
    }
    ptx::store_shared_16(row ^ unit * 16, packed[0], packed[1], packed[2], packed[3]);
  }
}
// The row form, with a factor for each 32 columns; behind it the column form, with one for each column, from shared
// memory.
template <bool kE4M3, int kUnits>
CG_DEVICE void store_forms(float const (&v)[32 * kUnits], float const (&row_factor)[kUnits], uint32_t column_factors,
                           uint32_t box, int lane) {
  store_form<kE4M3, kUnits>(v, box, lane, [&](int e) { return FourFactors{row_factor[e / 32], row_factor[e / 32]}; });
  store_form<kE4M3, kUnits>(v, box + 1024 * kUnits, lane, [&](int e) {
    uint4 const f = ptx::load_shared_16(column_factors + e * 4);
    return FourFactors{{__uint_as_float(f.x), __uint_as_float(f.y)}, {__uint_as_float(f.z), __uint_as_float(f.w)}};
  });
}

// Quantises the warp's 32 rows by kUnits blocks of 32 columns, the first of them at `column` of D. Both forms go to the
// box, the column form behind the row form; row_max: of this thread's row, in each block. scratch: 2 * 32 * kUnits
// floats.
// kE4M3: else the format is asked about at run time.
template <bool kE4M3, int kUnits>
CG_DEVICE void quantise(Params const& p, cuda::ScalePlaces const& places, float const (&v)[32 * kUnits],
                        float const (&row_max)[kUnits], float norm, int column, uint32_t box, uint32_t scratch,
                        int lane) {
  uint32_t const factors = scratch + 32 * kUnits * 4;
  auto value = [&](float max) { return scale_value(max, p.reciprocal_largest, norm); };
  uint32_t const row_bytes = ptx::encode_two_e8m0_up(value(row_max[0]), value(row_max[kUnits - 1]));
  float row_factor[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) row_factor[u] = e8m0_factor(row_bytes >> 8 * u & 0xff, norm);
  uint8_t* const row_scales = p.sfd_row + places.of_row(column / 32);
  if constexpr (kUnits == 2) {
    *reinterpret_cast<uint16_t*>(row_scales) = uint16_t(row_bytes);  // past the last column, zero: padding
  } else {
    *row_scales = uint8_t(row_bytes);
  }
  // A column's maximum is needed by one lane only: it takes it from shared memory.
#pragma unroll
  for (int e = 0; e < 32 * kUnits; e += 4) {
    uint32_t max[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) max[i] = __float_as_uint(ptx::warp_max_magnitude(v[e + i]));
    ptx::store_shared_16(scratch + e * 4, max[0], max[1], max[2], max[3]);
  }
  __syncwarp();
  float column_max[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) column_max[u] = __uint_as_float(ptx::load_shared_4(scratch + (u * 32 + lane) * 4));
  uint32_t const column_bytes = ptx::encode_two_e8m0_up(value(column_max[0]), value(column_max[kUnits - 1]));
  uint8_t* const column_scales = p.sfd_col + places.of_column(column + lane);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    uint32_t const byte = column_bytes >> 8 * u & 0xff;
    ptx::store_shared_4(factors + (u * 32 + lane) * 4, __float_as_uint(e8m0_factor(byte, norm)));
    // The next 32 columns of an atom are four bytes on.
    if (places.inside()) column_scales[u * 4] = uint8_t(byte);  // past the last column, zero: padding
  }
  __syncwarp();
  if (kE4M3 || p.d_dtype == DType::float8_e4m3fn) {
    store_forms<true, kUnits>(v, row_factor, factors, box, lane);
  } else {
    store_forms<false, kUnits>(v, row_factor, factors, box, lane);
  }
}

}  // namespace cudnn_grouped::sm100
