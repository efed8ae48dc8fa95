// Tensor maps: the 128 bytes that describe a tensor to the copy unit. The layout inside is the simulator's own; kernels may only
// treat it as opaque, and the encoder and tensormap.replace are the only ones that know it.
#pragma once
#include <string>

#include "machine.h"

namespace simulator {

// As CUtensorMapDataType counts them.
enum class Element : u8 { kU8, kU16, kU32, kS32, kU64, kS64, kF16, kF32, kF64, kBF16, kF32Flush, kTF32, kTF32Flush, kU4, kU4Padded, kU6Padded };

struct alignas(64) TensorMap {
  u32 magic;
  Element element;
  u8 rank, swizzle, nan_fill, interleave;
  u64 base;
  u64 stride[4];   // bytes, of dimensions 1 and up
  u64 dimension[5];
  u16 box[5];
  u8 element_stride[5];

  static constexpr u32 kMagic = 0x50414d54;
  int element_bits() const;
  u32 row_bytes() const;  // of a box in shared memory
  u32 box_bytes() const;
  std::string problem() const;  // the rule it breaks, or nothing
};
static_assert(sizeof(TensorMap) == 128);

// Copies a box at `coordinates` into shared memory at `shared` (an address with the CTA's rank); what lies outside the tensor is
// filled.
void load_box(Machine& m, Cluster& cluster, TensorMap const& map, u32 shared, i32 const* coordinates);
// A store in two halves: out of shared memory, in the order of the box's elements, and into global memory. `function` is a
// reduction's name, or empty.
std::vector<u8> gather_box(Cluster& cluster, TensorMap const& map, u32 shared);
void write_box(Machine& m, TensorMap const& map, i32 const* coordinates, std::vector<u8> const& data, std::string const& function);
// Combines `bytes` of elements at `from` into those at `to`.
void reduce_elements(Element element, std::string const& function, u8* to, u8 const* from, u32 bytes);

}  // namespace simulator
