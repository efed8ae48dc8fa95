// The main loop: a thread fills a ring of stages with A, B and their scale factors by TMA, another multiplies them into
// tensor memory. Two accumulators take turns: the next tile is multiplied while this one is in the epilogue.
#pragma once

#include "params.h"

namespace cudnn_grouped::sm100 {

inline constexpr int kABytes = kBlockM * kRowBytes, kAtom = 512;  // kAtom: bytes of an atom of scale factors

// Tensor memory: 512 columns. Block-scaled tiles of 256 columns leave no room for two whole accumulators beside the
// scale factors: theirs overlap by 64 columns, which the epilogue reads first. So the first accumulator's columns are
// read in falling order, the second one's in rising order.
struct TensorMemory {
  static constexpr int kColumns = 512, kScales = 448, kScalesB = kScales + 16, kOverlap = 64;

  bool overlap;
  int tile_n;

  __device__ __forceinline__ explicit TensorMemory(Operands const& o)
      : overlap(o.tile_n == 256 && o.multiply != Multiply::f16), tile_n(o.tile_n) {}
  __device__ __forceinline__ int accumulators(int tile) const {
    return (tile & 1) * (overlap ? tile_n - kOverlap : tile_n);
  }
  // After how many more tiles the columns of a tile are written again.
  __device__ __forceinline__ int reuse() const { return overlap ? 1 : 2; }
};

constexpr int stage_bytes(Operands const& o) {
  return kABytes + o.b_rows * kRowBytes + o.scale_atoms * kAtom * (1 + o.tile_n / kBlockM);
}

// Where a stage's parts are.
struct Stages {
  uint32_t a, b, sfa, sfb;  // shared addresses of the first
  uint32_t b_bytes, sfa_bytes, sfb_bytes;

  __device__ __forceinline__ Stages(Operands const& o, uint32_t base) {
    b_bytes = o.b_rows * kRowBytes, sfa_bytes = o.scale_atoms * kAtom, sfb_bytes = sfa_bytes * (o.tile_n / kBlockM);
    a = base, b = a + o.stages * kABytes, sfa = b + o.stages * b_bytes, sfb = sfa + o.stages * sfa_bytes;
  }
  __device__ __forceinline__ uint32_t bytes() const { return kABytes + b_bytes + sfa_bytes + sfb_bytes; }
};

// Which blocks of the cluster use what this one loads, and wait for it.
struct Sharing {
  int a_parts, a_part, b_parts, b_part;
  uint16_t a_mask, b_mask, empty_mask, full_mask;  // as ptx::load and ptx::commit take them
  int empty_arrivals;

  template <int kSMs>
  static __device__ __forceinline__ Sharing of(Params const& p, int rank) {
    Sharing s;
    int const n = rank / p.cluster_m, m = rank - n * p.cluster_m, first = n * p.cluster_m;
    uint32_t row = 0;  // the blocks of the same rows of A
    for (int i = 0; i < p.cluster_n; ++i) row |= 1u << (m + i * p.cluster_m);
    s.a_parts = p.cluster_n, s.a_part = n;
    s.a_mask = uint16_t(s.a_parts > 1 ? row : 0);
    bool const shares_b = kSMs == 1 && p.cluster_m == 2 && !p.operands.b_is_n_major;
    uint32_t const column = 3u << first;  // the blocks of the same columns of B
    s.b_parts = shares_b ? 2 : 1, s.b_part = shares_b ? m : 0;
    s.b_mask = uint16_t(shares_b ? column : 0);
    if (kSMs == 2) {
      // The pair's first block multiplies for both, with what every pair of the cluster has loaded.
      s.empty_mask = uint16_t((1u << (2 * p.cluster_n)) - 1), s.empty_arrivals = p.cluster_n;
      s.full_mask = uint16_t(column);
    } else {
      uint32_t const loaders = row | (shares_b ? column : 0);
      s.empty_arrivals = __popc(loaders);
      s.empty_mask = uint16_t(s.empty_arrivals > 1 ? loaders : 0), s.full_mask = 0;
    }
    return s;
  }
};

// One thread of each block.
template <int kSMs>
__device__ __forceinline__ void load_operands(Params const& p, Control& control, Stages const& stages, int rank) {
  Operands const& o = p.operands;
  Sharing const sharing = Sharing::of<kSMs>(p, rank);
  bool const expects = kSMs == 1 || rank % 2 == 0;
  int const half = kSMs == 2 ? rank % 2 * o.b_rows : 0, a_rows = kBlockM / sharing.a_parts,
            b_rows = o.b_rows / sharing.b_parts;
  Schedule schedule(p, control, rank);
  Ring ring(o.stages);
  Tile tile;
  int acquired = -1;
  while (schedule.next(tile)) {
    CUtensorMap const *b = &p.b, *sfb = &p.sfb;
    if (p.b_maps) {
      b = p.b_maps + tile.expert, sfb = p.sfb_maps + tile.expert;
      if (acquired != tile.expert) {
        ptx::acquire_map(b);
        if (o.scale_atoms) ptx::acquire_map(sfb);
      }
      acquired = tile.expert;
    }
    int const expert = p.b_maps ? 0 : tile.expert;
    for (int k = 0, step = 0; k < p.k; k += o.stage_k, ++step, ring.advance()) {
      int const i = ring.slot, column = step * o.stage_columns;
      uint32_t const full = ptx::shared_address(&control.full[i]);
      ptx::barrier_wait(ptx::shared_address(&control.empty[i]), ring.phase ^ 1);
      if (expects) ptx::barrier_expect(full, kSMs * stages.bytes());
      ptx::load_2d<kSMs>(stages.a + i * kABytes + sharing.a_part * a_rows * kRowBytes, &p.a, full, sharing.a_mask,
                         column, tile.m + sharing.a_part * a_rows);
      uint32_t const to_b = stages.b + i * stages.b_bytes;
      if (o.b_is_n_major) {
        for (int panel = 0; panel < o.b_panels; ++panel) {
          ptx::load_3d<kSMs>(to_b + panel * o.b_panel_bytes, b, full, 0, tile.n + half + panel * o.b_panel_columns, k,
                             expert);
        }
      } else {
        ptx::load_3d<kSMs>(to_b + sharing.b_part * b_rows * kRowBytes, b, full, sharing.b_mask, column,
                           tile.n + half + sharing.b_part * b_rows, expert);
      }
      if (o.scale_atoms) {
        ptx::load_4d<kSMs>(stages.sfa + i * stages.sfa_bytes, &p.sfa, full, 0, 0, step * o.scale_atoms,
                           tile.m / kBlockM, 0);
        ptx::load_4d<kSMs>(stages.sfb + i * stages.sfb_bytes, sfb, full, 0, 0, step * o.scale_atoms, tile.n / kBlockM,
                           expert);
      }
    }
  }
  // Whoever frees a stage of this block's still signals it: the block may not leave before.
  for (int i = 0; i < o.stages; ++i, ring.advance()) {
    ptx::barrier_wait(ptx::shared_address(&control.empty[ring.slot]), ring.phase ^ 1);
  }
}

// PTX ISA, "Shared memory descriptor": version 1; offsets in units of 16 bytes.
CG_DEVICE uint64_t address_field(uint32_t address) { return uint64_t((address & 0x3ffff) >> 4); }
inline constexpr uint64_t kDescriptorVersion = uint64_t(1) << 46, kSwizzle128 = uint64_t(2) << 61,
                          kSwizzle64 = uint64_t(4) << 61;
constexpr uint64_t leading_field(int bytes) { return uint64_t(bytes >> 4) << 16; }
constexpr uint64_t stride_field(int bytes) { return uint64_t(bytes >> 4) << 32; }
// K-major rows of 128 bytes: groups of eight rows are 1024 bytes apart.
inline constexpr uint64_t kRowsDescriptor =
    kDescriptorVersion | kSwizzle128 | stride_field(8 * kRowBytes) | leading_field(16);
// N-major: a panel has `span` bytes of N, its swizzle's; groups of eight rows along K, panels along N.
constexpr uint64_t columns_descriptor(int span, int panel_bytes) {
  return kDescriptorVersion | (span == 128 ? kSwizzle128 : kSwizzle64) | stride_field(8 * span) |
         leading_field(panel_bytes);
}
// An atom of scale factors, not swizzled: groups of eight rows of 16 bytes.
inline constexpr uint64_t kAtomDescriptor = kDescriptorVersion | stride_field(128) | leading_field(128);

// PTX ISA, "Instruction descriptor": which of the four scale factors in a column of tensor memory.
CG_DEVICE uint32_t scale_ids(int id) { return uint32_t(id) << 4 | uint32_t(id) << 29; }

// One thread of each block, or of the first block of each pair.
template <int kSMs, Multiply kMultiply>
__device__ __forceinline__ void multiply_tiles(Params const& p, Control& control, Stages const& stages, int rank) {
  Operands const& o = p.operands;
  Sharing const sharing = Sharing::of<kSMs>(p, rank);
  TensorMemory const memory(o);
  uint32_t const base = control.tensor_memory, scales_a = base + TensorMemory::kScales,
                 scales_b = base + TensorMemory::kScalesB;
  int const atoms_n = o.tile_n / kBlockM, instruction_k = o.stage_k / 4;
  Schedule schedule(p, control, rank);
  Ring ring(o.stages);
  Tile tile;
  for (int t = 0; schedule.next(tile); ++t) {
    if (int const last = t - memory.reuse(); last >= 0) {
      ptx::barrier_wait(ptx::shared_address(&control.accumulators_free[last & 1]), last >> 1 & 1);
      ptx::tensor_fence_after();
    }
    ptx::Product product;
    product.accumulators = base + memory.accumulators(t);
    for (int k = 0; k < p.k; k += o.stage_k, ring.advance()) {
      int const i = ring.slot;
      ptx::barrier_wait(ptx::shared_address(&control.full[i]), ring.phase);
      ptx::tensor_fence_after();
      if constexpr (kMultiply != Multiply::f16) {
        for (int atom = 0; atom < o.scale_atoms; ++atom) {
          uint32_t const a = stages.sfa + i * stages.sfa_bytes + atom * kAtom;
          ptx::copy_scale_atom<kSMs>(scales_a + atom * 4, kAtomDescriptor | address_field(a));
          for (int h = 0; h < atoms_n; ++h) {
            uint32_t const b = stages.sfb + i * stages.sfb_bytes + (h * o.scale_atoms + atom) * kAtom;
            ptx::copy_scale_atom<kSMs>(scales_b + (atom * atoms_n + h) * 4, kAtomDescriptor | address_field(b));
          }
        }
      }
      uint64_t const a = kRowsDescriptor | address_field(stages.a + i * kABytes);
      uint64_t const b = o.b_descriptor | address_field(stages.b + i * stages.b_bytes);
      // Past K there is nothing to multiply, and padding of scale factors could be NaN.
      int const steps = min(4, ceil_div(p.k - k, instruction_k));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step >= steps) break;
        product.a = a + step * (kRowBytes / 4 / 16), product.b = b + step * o.b_step;
        product.accumulate = uint32_t(k | step);
        product.instruction = o.instruction;
        if constexpr (kMultiply == Multiply::f16) {
          ptx::multiply_f16<kSMs>(product);
        } else if constexpr (kMultiply == Multiply::mxf8f6f4) {
          product.instruction |= scale_ids(step);
          ptx::multiply_mxf8f6f4<kSMs>(product, scales_a, scales_b);
        } else if constexpr (kMultiply == Multiply::mxf4_block32) {
          product.instruction |= scale_ids(step % 2 * 2);
          ptx::multiply_mxf4nvf4<kSMs, 32>(product, scales_a + step / 2 * 4, scales_b + step / 2 * 4 * atoms_n);
        } else {
          ptx::multiply_mxf4nvf4<kSMs, 16>(product, scales_a + step * 4, scales_b + step * 4 * atoms_n);
        }
      }
      ptx::commit<kSMs>(ptx::shared_address(&control.empty[i]), sharing.empty_mask);
    }
    ptx::commit<kSMs>(ptx::shared_address(&control.accumulators_full[t & 1]), sharing.full_mask);
  }
}

template <int kSMs>
__device__ __forceinline__ void multiply_tiles(Params const& p, Control& control, Stages const& stages, int rank) {
  switch (p.operands.multiply) {
    case Multiply::f16:
      return multiply_tiles<kSMs, Multiply::f16>(p, control, stages, rank);
    case Multiply::mxf8f6f4:
      return multiply_tiles<kSMs, Multiply::mxf8f6f4>(p, control, stages, rank);
    case Multiply::mxf4_block32:
      return multiply_tiles<kSMs, Multiply::mxf4_block32>(p, control, stages, rank);
    default:
      return multiply_tiles<kSMs, Multiply::mxf4_block16>(p, control, stages, rank);
  }
}

// One thread of the cluster's first block: keeps the ring of answers full until no cluster is left.
__device__ __forceinline__ void ask_for_tiles(Params const& p, Control& control) {
  int const blocks = p.cluster_m * p.cluster_n;
  Ring ring(Control::kAnswers);
  for (int block = 0; block >= 0; ring.advance()) {
    uint32_t const full = ptx::shared_address(&control.answer_full[ring.slot]),
                   answer = ptx::shared_address(&control.answer[ring.slot]);
    ptx::barrier_wait(ptx::shared_address(&control.answer_free[ring.slot]), ring.phase ^ 1);
    for (int i = 0; i < blocks; ++i) ptx::barrier_expect_in(full, i, sizeof(uint4));
    ptx::ask_for_cluster(answer, full);
    ptx::barrier_wait(full, ring.phase);
    block = ptx::answered_block(answer);
    ptx::fence_async();
  }
}

}  // namespace cudnn_grouped::sm100
