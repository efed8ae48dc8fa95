#include "tensor_map.h"

#include "numbers.h"

namespace simulator {

int TensorMap::element_bits() const {
  static int const kBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  return kBits[int(element)];
}
u32 TensorMap::row_bytes() const {
  bool const padded = element == Element::kU4Padded || element == Element::kU6Padded;  // 16 elements in 16 bytes
  return padded ? box[0] : box[0] * u32(element_bits()) / 8;
}
u32 TensorMap::box_bytes() const {
  u32 bytes = row_bytes();
  for (int i = 1; i < rank; ++i) bytes *= box[i];
  return bytes;
}

// CUDA Driver API, cuTensorMapEncodeTiled.
std::string TensorMap::problem() const {
  auto text = [](char const* format, auto... values) {
    char out[256];
    snprintf(out, sizeof out, format, values...);
    return std::string(out);
  };
  if (magic != kMagic) return "it is no tensor map";
  if (int(element) > 15) return "its data type is not known";
  if (rank < 1 || rank > 5) return text("rank %d: 1 to 5", rank);
  if (interleave) return "interleaved layouts are not known to the simulator";
  if (swizzle > 3) return text("swizzle mode %d is not known to the simulator", swizzle);
  bool const padded = element == Element::kU4Padded || element == Element::kU6Padded;
  u64 const alignment = padded ? 32 : 16;
  if (base % alignment)
    return text("its base %#llx is no multiple of %llu", (unsigned long long)base, (unsigned long long)alignment);
  for (int i = 0; i < rank; ++i) {
    if (dimension[i] == 0 || dimension[i] > 1ull << 32)
      return text("dimension %d is %llu: 1 to 2^32", i, (unsigned long long)dimension[i]);
    if (box[i] == 0 || box[i] > 256) return text("box dimension %d is %d: 1 to 256", i, box[i]);
    if (element_stride[i] != 1) return "element strides other than 1 are not known to the simulator";
    if (i && (stride[i - 1] % alignment || stride[i - 1] >= 1ull << 40))
      return text("the stride of dimension %d is %llu bytes: a multiple of %llu below 2^40", i,
                  (unsigned long long)stride[i - 1], (unsigned long long)alignment);
  }
  if (row_bytes() % 16) return text("the box is %u bytes wide: a multiple of 16", row_bytes());
  if (padded && (box[0] != 128 || dimension[0] % 128))
    return "of a padded type, the box must be 128 elements wide and dimension 0 a multiple of 128";
  if (element == Element::kU4 && dimension[0] % 2) return "dimension 0 of a 4-bit type is odd";
  u32 const span = 16u << swizzle;
  if (swizzle && row_bytes() > span)
    return text("the box is %u bytes wide, and its swizzle spans %u", row_bytes(), span);
  return "";
}

namespace {

u64 not_a_number(Element e) {
  switch (e) {
    case Element::kF16:
      return 0x7fff;
    case Element::kBF16:
      return 0x7fff;
    case Element::kF64:
      return 0x7ff8000000000000ull;
    default:
      return 0x7fffffff;
  }
}

template <class T>
T combine(std::string const& f, T old, T x) {
  if (f == "add") return T(old + x);
  if (f == "min") return x < old ? x : old;
  if (f == "max") return x > old ? x : old;
  if constexpr (std::is_integral_v<T>) {
    if (f == "and") return T(old & x);
    if (f == "or") return T(old | x);
    if (f == "xor") return T(old ^ x);
    if (f == "inc") return old >= x ? T(0) : T(old + 1);
    if (f == "dec") return old == 0 || old > x ? x : T(old - 1);
  }
  fail("unsupported", "a reduction by %s of this type", f.c_str());
}

template <class T>
void combine_all(std::string const& f, u8* to, u8 const* from, u32 bytes) {
  for (u32 i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    memcpy(&a, to + i, sizeof a);
    memcpy(&b, from + i, sizeof b);
    a = combine(f, a, b);
    memcpy(to + i, &a, sizeof a);
  }
}

void combine_narrow(Element e, std::string const& f, u8* to, u8 const* from, u32 bytes) {
  for (u32 i = 0; i < bytes; i += 2) {
    u16 a, b;
    memcpy(&a, to + i, 2);
    memcpy(&b, from + i, 2);
    float const x = e == Element::kF16 ? f16_to_float(a) : bf16_to_float(a),
                y = e == Element::kF16 ? f16_to_float(b) : bf16_to_float(b);
    float const r = combine(f, x, y);
    a = e == Element::kF16 ? float_to_f16(r) : float_to_bf16(r);
    memcpy(to + i, &a, 2);
  }
}

}  // namespace

void reduce_elements(Element element, std::string const& f, u8* to, u8 const* from, u32 bytes) {
  switch (element) {
    case Element::kU32:
      return combine_all<u32>(f, to, from, bytes);
    case Element::kS32:
      return combine_all<i32>(f, to, from, bytes);
    case Element::kU64:
      return combine_all<u64>(f, to, from, bytes);
    case Element::kS64:
      return combine_all<i64>(f, to, from, bytes);
    case Element::kF32:
    case Element::kF32Flush:
      return combine_all<float>(f, to, from, bytes);
    case Element::kF64:
      return combine_all<double>(f, to, from, bytes);
    case Element::kF16:
    case Element::kBF16:
      return combine_narrow(element, f, to, from, bytes);
    default:
      fail("unsupported", "a reduction of this tensor map's type");
  }
}

namespace {

// Visits the box in pieces of 16 bytes of shared memory: their place in the box, the address of their part that lies
// inside the tensor, the bytes of the piece before that part, and its own.
template <class Visit>
void for_each_piece(TensorMap const& map, i32 const* coordinates, Visit visit) {
  u32 const row = map.row_bytes(), rows = map.box_bytes() / row;
  int const bits = map.element_bits();
  bool const padded = map.element == Element::kU4Padded || map.element == Element::kU6Padded;
  i64 const count = padded ? 16 : 128 / bits;  // elements of a piece
  for (u32 r = 0; r < rows; ++r) {
    bool inside = true;
    u64 address = map.base;
    for (u32 i = 1, rest = r; i < map.rank; rest /= map.box[i++]) {
      i64 const at = i64(coordinates[i]) + rest % map.box[i];
      inside &= at >= 0 && u64(at) < map.dimension[i];
      address += u64(at) * map.stride[i - 1];
    }
    for (u32 piece = 0; piece < row / 16; ++piece) {
      i64 const first = coordinates[0] + i64(piece) * count, last = first + count;
      i64 const low = std::min(std::max(first, i64(0)), last),
                high = std::max(std::min(last, i64(map.dimension[0])), low);
      u32 const bytes = inside ? u32((high - low) * bits / 8) : 0;
      visit(r * row + piece * 16, address + u64(low * bits / 8), u32((low - first) * bits / 8), bytes);
    }
  }
}

}  // namespace

void load_box(Machine& m, Cluster& cluster, TensorMap const& map, u32 shared, i32 const* coordinates) {
  Cta& cta = cluster.owner(shared, map.box_bytes(), "a tensor copy");
  u64 const nan = map.nan_fill ? not_a_number(map.element) : 0;
  int const size = std::max(map.element_bits() / 8, 1);
  for_each_piece(map, coordinates, [&](u32 at, u64 address, u32 before, u32 bytes) {
    u8* to = &cta.shared[swizzled((shared & kOffsetMask) + at, map.swizzle)];
    u8 const* from = bytes ? m.memory.check(address, bytes, false, "a tensor copy") : nullptr;
    if (bytes == 16) {
      memcpy(to, from, 16);
      return;
    }
    for (int i = 0; i < 16; i += size) memcpy(to + i, &nan, size);
    if (bytes) memcpy(to + before, from, bytes);
  });
}

std::vector<u8> gather_box(Cluster& cluster, TensorMap const& map, u32 shared) {
  std::vector<u8> data(map.box_bytes());
  Cta& cta = cluster.owner(shared, map.box_bytes(), "a tensor copy");
  for (u32 i = 0; i < data.size(); i += 16)
    memcpy(&data[i], &cta.shared[swizzled((shared & kOffsetMask) + i, map.swizzle)], 16);
  return data;
}

void write_box(Machine& m, TensorMap const& map, i32 const* coordinates, std::vector<u8> const& data,
               std::string const& function) {
  for_each_piece(map, coordinates, [&](u32 at, u64 address, u32 before, u32 bytes) {
    if (!bytes) return;
    u8* to = m.memory.check(address, bytes, true, "a tensor copy");
    if (function.empty())
      memcpy(to, &data[at + before], bytes);
    else
      reduce_elements(map.element, function, to, &data[at + before], bytes);
  });
}

}  // namespace simulator
