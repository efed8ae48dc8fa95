// Integer arithmetic, logic and shifts. PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions".
#include <algorithm>

#include "types.h"

namespace simulator {
namespace {

template <class T>
T add(T a, T b) {
  return T(a + b);
}
template <class T>
T sub(T a, T b) {
  return T(a - b);
}
template <class T>
T mul_lo(T a, T b) {
  return T(u64(a) * u64(b));
}
template <class T>
T div_int(T a, T b) {
  return b == 0 ? T(-1) : b == T(-1) && T(-1) < 0 ? T(0 - u64(a)) : T(a / b);
}
template <class T>
T rem_int(T a, T b) {
  return b == 0 ? a : b == T(-1) && T(-1) < 0 ? T(0) : T(a % b);
}
template <class T>
T min_int(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max_int(T a, T b) {
  return a > b ? a : b;
}
template <class T>
T abs_int(T a) {
  return a < 0 ? T(0 - u64(a)) : a;
}
template <class T>
T neg_int(T a) {
  return T(0 - u64(a));
}
template <class T>
T and_(T a, T b) {
  return T(a & b);
}
template <class T>
T or_(T a, T b) {
  return T(a | b);
}
template <class T>
T xor_(T a, T b) {
  return T(a ^ b);
}
template <class T>
T not_(T a) {
  return T(~a);
}
template <class T>
T cnot(T a) {
  return a == 0;
}
template <class T>
T mad_lo(T a, T b, T d) {
  return T(u64(a) * u64(b) + u64(d));
}
template <class T>
T mul_hi(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<(T(-1) < 0), __int128, unsigned __int128>;
    return T((Wide(a) * Wide(b)) >> 64);
  } else {
    return T((i64(a) * i64(b)) >> (8 * sizeof(T)));
  }
}
template <>
u32 mul_hi<u32>(u32 a, u32 b) {
  return u32(u64(a) * u64(b) >> 32);
}
template <class T>
T mad_hi(T a, T b, T d) {
  return T(mul_hi<T>(a, b) + d);
}
u32 brev32(u32 a) {
  u32 r = 0;
  for (int i = 0; i < 32; ++i) r |= (a >> i & 1) << (31 - i);
  return r;
}
u64 brev64(u64 a) { return u64(brev32(u32(a))) << 32 | brev32(u32(a >> 32)); }
i32 sat_add(i32 a, i32 b) {
  i64 const r = i64(a) + b;
  return i32(std::min<i64>(std::max<i64>(r, INT32_MIN), INT32_MAX));
}
i32 sat_sub(i32 a, i32 b) {
  i64 const r = i64(a) - b;
  return i32(std::min<i64>(std::max<i64>(r, INT32_MIN), INT32_MAX));
}

template <class T>
Step shift_left(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  u32 const* b = c.lanes<u32>(op.in[1]);
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = b[l] >= sizeof(T) * 8 ? T(0) : T(u64(a[l]) << b[l]);
  c.store(op.out, r);
  return Step::kNext;
}
template <class T>
Step shift_right(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  u32 const* b = c.lanes<u32>(op.in[1]);
  T r[kLanes];
  constexpr u32 kTop = sizeof(T) * 8 - 1;
  for (int l = 0; l < kLanes; ++l) r[l] = b[l] > kTop ? (T(-1) < 0 ? T(a[l] >> kTop) : T(0)) : T(a[l] >> b[l]);
  c.store(op.out, r);
  return Step::kNext;
}

template <class T, class Wide, bool kAdd>
Step wide(Context& c, Op const& op) {
  T const *a = c.lanes<T>(op.in[0]), *b = c.lanes<T>(op.in[1]);
  Wide const* d = kAdd ? c.lanes<Wide>(op.in[2]) : nullptr;
  Wide r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = Wide(u64(Wide(a[l])) * u64(Wide(b[l])) + (kAdd ? u64(d[l]) : 0));
  c.store(op.out, r);
  return Step::kNext;
}

Step lop3(Context& c, Op const& op) {
  u32 const *x = c.lanes<u32>(op.in[0]), *y = c.lanes<u32>(op.in[1]), *z = c.lanes<u32>(op.in[2]);
  u32 r[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    u32 v = 0;
    for (int i = 0; i < 8; ++i)
      if (op.immediate >> i & 1) v |= (i & 4 ? x[l] : ~x[l]) & (i & 2 ? y[l] : ~y[l]) & (i & 1 ? z[l] : ~z[l]);
    r[l] = v;
  }
  c.store(op.out, r);
  return Step::kNext;
}

template <bool kLeft, bool kWrap>
Step funnel(Context& c, Op const& op) {
  u32 const *a = c.lanes<u32>(op.in[0]), *b = c.lanes<u32>(op.in[1]), *n = c.lanes<u32>(op.in[2]);
  u32 r[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    u32 const s = kWrap ? n[l] & 31 : std::min(n[l], 32u);
    u64 const both = u64(b[l]) << 32 | a[l];
    r[l] = kLeft ? u32(both << s >> 32) : u32(both >> s);
  }
  c.store(op.out, r);
  return Step::kNext;
}

Step permute_bytes(Context& c, Op const& op) {
  u32 const *a = c.lanes<u32>(op.in[0]), *b = c.lanes<u32>(op.in[1]), *s = c.lanes<u32>(op.in[2]);
  u32 r[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    u64 const both = u64(b[l]) << 32 | a[l];
    r[l] = 0;
    for (int i = 0; i < 4; ++i) {
      u32 const sel = s[l] >> 4 * i & 15;
      u32 byte = u32(both >> 8 * (sel & 7)) & 255;
      if (sel & 8) byte = byte & 128 ? 255 : 0;
      r[l] |= byte << 8 * i;
    }
  }
  c.store(op.out, r);
  return Step::kNext;
}

template <class T>
Step bit_extract(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  u32 const *p = c.lanes<u32>(op.in[1]), *n = c.lanes<u32>(op.in[2]);
  T r[kLanes];
  constexpr int kBits = sizeof(T) * 8;
  for (int l = 0; l < kLanes; ++l) {
    int const position = p[l] & 255, length = n[l] & 255;
    bool const sign = T(-1) < 0 && length && (u64(a[l]) >> std::min(position + length - 1, kBits - 1) & 1);
    u64 v = sign ? ~0ull : 0;
    for (int i = 0; i < length && i < kBits; ++i) {
      u64 const bit = position + i < kBits ? u64(a[l]) >> (position + i) & 1 : sign;
      v = (v & ~(1ull << i)) | bit << i;
    }
    r[l] = T(v);
  }
  c.store(op.out, r);
  return Step::kNext;
}
template <class T>
Step bit_insert(Context& c, Op const& op) {
  T const *a = c.lanes<T>(op.in[0]), *b = c.lanes<T>(op.in[1]);
  u32 const *p = c.lanes<u32>(op.in[2]), *n = c.lanes<u32>(op.in[3]);
  T r[kLanes];
  constexpr int kBits = sizeof(T) * 8;
  for (int l = 0; l < kLanes; ++l) {
    int const position = p[l] & 255, length = n[l] & 255;
    r[l] = b[l];
    for (int i = 0; i < length && position + i < kBits; ++i)
      r[l] = T((r[l] & ~(T(1) << (position + i))) | ((a[l] >> i & 1) << (position + i)));
  }
  c.store(op.out, r);
  return Step::kNext;
}
template <class T, bool kShift>
Step find_bit(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  u32 r[kLanes];
  constexpr int kBits = sizeof(T) * 8;
  for (int l = 0; l < kLanes; ++l) {
    T v = a[l];
    if (T(-1) < 0 && v < 0) v = T(~v);
    u64 const bits = u64(v) & (kBits == 64 ? ~0ull : 0xffffffffull);
    int const top = bits ? 63 - __builtin_clzll(bits) : -1;
    r[l] = bits == 0 ? ~0u : u32(kShift ? kBits - 1 - top : top);
  }
  c.store(op.out, r);
  return Step::kNext;
}
template <class T, bool kLeadingZeros>
Step count_bits(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  u32 r[kLanes];
  constexpr u32 kBits = sizeof(T) * 8;
  for (int l = 0; l < kLanes; ++l) {
    u64 const v = a[l];
    r[l] = kLeadingZeros ? (v ? u32(__builtin_clzll(v)) - (64 - kBits) : kBits) : u32(__builtin_popcountll(v));
  }
  c.store(op.out, r);
  return Step::kNext;
}

template <class T>
Handler integer_binary(std::string const& name) {
  if (name == "add") return binary<T, add<T>>;
  if (name == "sub") return binary<T, sub<T>>;
  if (name == "mul") return binary<T, mul_lo<T>>;
  if (name == "div") return binary<T, div_int<T>>;
  if (name == "rem") return binary<T, rem_int<T>>;
  if (name == "min") return binary<T, min_int<T>>;
  if (name == "max") return binary<T, max_int<T>>;
  if (name == "and") return binary<T, and_<T>>;
  if (name == "or") return binary<T, or_<T>>;
  if (name == "xor") return binary<T, xor_<T>>;
  if (name == "mulhi") return binary<T, mul_hi<T>>;
  if (name == "mad") return ternary<T, mad_lo<T>>;
  if (name == "madhi") return ternary<T, mad_hi<T>>;
  if (name == "not") return unary<T, not_<T>>;
  if (name == "cnot") return unary<T, cnot<T>>;
  if (name == "abs") return unary<T, abs_int<T>>;
  if (name == "neg") return unary<T, neg_int<T>>;
  if (name == "shl") return shift_left<T>;
  if (name == "shr") return shift_right<T>;
  return nullptr;
}

Handler integer_handler(std::string const& name, Type t) {
  bool const is_signed = t.kind == 's';
  switch (t.size) {
    case 2:
      return is_signed ? integer_binary<i16>(name) : integer_binary<u16>(name);
    case 4:
      return is_signed ? integer_binary<i32>(name) : integer_binary<u32>(name);
    case 8:
      return is_signed ? integer_binary<i64>(name) : integer_binary<u64>(name);
  }
  return nullptr;
}

}  // namespace

bool decode_integer(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  Type const t = last_type(s);
  if (!t.integer() || t.packed) return false;
  kind = Class::kInteger;
  op.moves_data = true;
  if ((b == "add" || b == "sub" || b == "mad") && (s.has("cc") || s.has("sat"))) {
    if (s.has("cc") || b == "mad") unsupported(s, "uses the carry flag");
    op.run = b == "add" ? binary<i32, sat_add> : binary<i32, sat_sub>;
    return elementwise(d, s, op, 2, 4);
  }
  if ((b == "mul" || b == "mad") && s.has("wide")) {
    bool const is_signed = t.kind == 's', adds = b == "mad";
    if (t.size == 2)
      op.run = is_signed ? (adds ? wide<i16, i32, true> : wide<i16, i32, false>)
                         : (adds ? wide<u16, u32, true> : wide<u16, u32, false>);
    else
      op.run = is_signed ? (adds ? wide<i32, i64, true> : wide<i32, i64, false>)
                         : (adds ? wide<u32, u64, true> : wide<u32, u64, false>);
    op.out = d.destination(s.operands[0], t.size * 2);
    for (int i = 0; i < 2; ++i) op.in[i] = d.source(s.operands[i + 1], t.size).offset;
    if (adds) op.in[2] = d.source(s.operands[3], t.size * 2).offset;
    return true;
  }
  if (b == "shl" || b == "shr") {
    op.run = integer_handler(b, t);
    op.out = d.destination(s.operands[0], t.size);
    op.in[0] = d.source(s.operands[1], t.size).offset;
    op.in[1] = d.source(s.operands[2], 4).offset;
    return true;
  }
  if (b == "lop3") {
    op.run = lop3;
    op.immediate = d.number(s.operands[4]);
    return elementwise(d, s, op, 3, 4);
  }
  if (b == "shf") {
    bool const left = s.has("l"), wrap = s.has("wrap");
    op.run =
        left ? (wrap ? funnel<true, true> : funnel<true, false>) : (wrap ? funnel<false, true> : funnel<false, false>);
    return elementwise(d, s, op, 3, 4);
  }
  if (b == "prmt") {
    if (s.modifiers.size() > 2) unsupported(s);
    op.run = permute_bytes;
    return elementwise(d, s, op, 3, 4);
  }
  if (b == "bfe" || b == "bfi") {
    bool const insert = b == "bfi";
    if (insert)
      op.run = t.size == 4 ? bit_insert<u32> : bit_insert<u64>;
    else if (t.kind == 's')
      op.run = t.size == 4 ? bit_extract<i32> : bit_extract<i64>;
    else
      op.run = t.size == 4 ? bit_extract<u32> : bit_extract<u64>;
    op.out = d.destination(s.operands[0], t.size);
    for (int i = 0; i < (insert ? 4 : 3); ++i)
      op.in[i] = d.source(s.operands[i + 1], i < (insert ? 2 : 1) ? t.size : 4).offset;
    return true;
  }
  if (b == "bfind") {
    bool const shift = s.has("shiftamt");
    if (t.kind == 's')
      op.run = t.size == 4 ? (shift ? find_bit<i32, true> : find_bit<i32, false>)
                           : (shift ? find_bit<i64, true> : find_bit<i64, false>);
    else
      op.run = t.size == 4 ? (shift ? find_bit<u32, true> : find_bit<u32, false>)
                           : (shift ? find_bit<u64, true> : find_bit<u64, false>);
  } else if (b == "clz") {
    op.run = t.size == 4 ? count_bits<u32, true> : count_bits<u64, true>;
  } else if (b == "popc") {
    op.run = t.size == 4 ? count_bits<u32, false> : count_bits<u64, false>;
  }
  if (op.run) {
    op.out = d.destination(s.operands[0], 4);
    op.in[0] = d.source(s.operands[1], t.size).offset;
    return true;
  }
  if (b == "brev") {
    op.run = t.size == 4 ? Handler(unary<u32, brev32>) : Handler(unary<u64, brev64>);
    return elementwise(d, s, op, 1, t.size);
  }
  std::string name = b;
  if (s.has("hi")) name += "hi";
  op.run = integer_handler(name, t);
  if (!op.run) return false;
  return elementwise(d, s, op, int(s.operands.size()) - 1, t.size);
}

}  // namespace simulator
