// The tensor core of SM100: matrices in shared memory named by descriptors, times, into tensor memory. PTX ISA,
// "TensorCore 5th Generation Family Instructions".
#pragma once
#include "machine.h"

namespace simulator {

enum class MultiplyKind : u8 { kF16, kTF32, kF8F6F4, kMXF8F6F4, kMXF4, kMXF4NVF4 };

struct Multiply {
  MultiplyKind kind;
  int ctas;          // of the group: 1 or 2
  int scale_vector;  // scale factors of a row for one instruction's K: 1, 2 or 4; 0 without
  u32 rank;          // of the CTA that issues it
  u32 d;             // tensor memory address of the accumulators
  u64 a, b;          // shared-memory descriptors
  u32 instruction;   // instruction descriptor
  u32 scale_a, scale_b;
  bool accumulate;
  u32 disabled_lanes[8];
};

// A descriptor's place in shared memory.
struct MatrixDescriptor {
  u32 start, leading, stride;  // bytes
  int swizzle;                 // 0 none, 1: 32, 2: 64, 3: 128 bytes
};
MatrixDescriptor parse_descriptor(u64 descriptor);
// The fields that SM90's descriptors have at the same place. Fails where the swizzle's pattern does not fit the start.
MatrixDescriptor place_of(u64 descriptor, int swizzle);
// Offset of the piece of 16 bytes that holds row `row`'s `piece` along K.
u32 k_major_offset(MatrixDescriptor const& d, u32 row, u32 piece);
// Of the piece that holds 16 bytes of rows at step k, where rows are contiguous.
u32 row_major_offset(MatrixDescriptor const& d, u32 piece, u32 k);

// Fails if a tcgen05.ld without a wait still reads these columns of the CTA.
void check_loads_finished(Cta const& cta, u32 column, u32 columns, u32 blocks);

// Checks everything that the instruction touches, on behalf of the warp that issues it, and returns the work itself.
std::function<void()> prepare_multiply(Context& c, Multiply const& m);

}  // namespace simulator
