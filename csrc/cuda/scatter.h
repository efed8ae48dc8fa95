// Sums and maxima over lanes.
#pragma once

namespace cudnn_grouped::cuda {

// Combines each of kCount values over the lanes whose numbers differ in the bits from kFirst down to kLast. A lane ends
// with its share in front, the values whose index has the lane's bits in front; with the same one as others do, where
// there are fewer values than lanes.
template <int kFirst, int kLast, int kCount, class Combine>
__device__ __forceinline__ void scatter(float (&v)[kCount], int lane, Combine const& combine) {
  if constexpr (kFirst >= kLast) {
    constexpr int kShare = kCount > 1 ? kCount / 2 : 1;
    float share[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      bool const upper = kCount > 1 && lane & kFirst;
      float const keep = upper ? v[kCount - kShare + i] : v[i], give = upper ? v[i] : v[kCount - kShare + i];
      share[i] = combine(keep, __shfl_xor_sync(~0u, give, kFirst));
    }
    scatter<kFirst / 2, kLast>(share, lane, combine);
#pragma unroll
    for (int i = 0; i < kShare; ++i) v[i] = share[i];
  }
}

struct Sum {
  __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};

}  // namespace cudnn_grouped::cuda
