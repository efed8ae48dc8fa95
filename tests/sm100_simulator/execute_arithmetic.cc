// Integer and f32 / f64 arithmetic, logic, comparison and selection. PTX ISA, "Integer Arithmetic Instructions" to "Logic and
// Shift Instructions".
#include <cfenv>
#include <limits>

#include "numbers.h"
#include "types.h"

namespace simulator {
namespace {

// ---- integers

template <class T> T add(T a, T b) { return T(a + b); }
template <class T> T sub(T a, T b) { return T(a - b); }
template <class T> T mul_lo(T a, T b) { return T(u64(a) * u64(b)); }
template <class T> T div_int(T a, T b) { return b == 0 ? T(-1) : b == T(-1) && T(-1) < 0 ? T(0 - u64(a)) : T(a / b); }
template <class T> T rem_int(T a, T b) { return b == 0 ? a : b == T(-1) && T(-1) < 0 ? T(0) : T(a % b); }
template <class T> T min_int(T a, T b) { return a < b ? a : b; }
template <class T> T max_int(T a, T b) { return a > b ? a : b; }
template <class T> T abs_int(T a) { return a < 0 ? T(0 - u64(a)) : a; }
template <class T> T neg_int(T a) { return T(0 - u64(a)); }
template <class T> T and_(T a, T b) { return T(a & b); }
template <class T> T or_(T a, T b) { return T(a | b); }
template <class T> T xor_(T a, T b) { return T(a ^ b); }
template <class T> T not_(T a) { return T(~a); }
template <class T> T cnot(T a) { return a == 0; }
template <class T> T mad_lo(T a, T b, T d) { return T(u64(a) * u64(b) + u64(d)); }
template <class T> T mul_hi(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<(T(-1) < 0), __int128, unsigned __int128>;
    return T((Wide(a) * Wide(b)) >> 64);
  } else {
    return T((i64(a) * i64(b)) >> (8 * sizeof(T)));
  }
}
template <> u32 mul_hi<u32>(u32 a, u32 b) { return u32(u64(a) * u64(b) >> 32); }
template <class T> T mad_hi(T a, T b, T d) { return T(mul_hi<T>(a, b) + d); }
u32 brev32(u32 a) { u32 r = 0; for (int i = 0; i < 32; ++i) r |= (a >> i & 1) << (31 - i); return r; }
u64 brev64(u64 a) { return u64(brev32(u32(a))) << 32 | brev32(u32(a >> 32)); }
i32 sat_add(i32 a, i32 b) { i64 const r = i64(a) + b; return i32(std::min<i64>(std::max<i64>(r, INT32_MIN), INT32_MAX)); }
i32 sat_sub(i32 a, i32 b) { i64 const r = i64(a) - b; return i32(std::min<i64>(std::max<i64>(r, INT32_MIN), INT32_MAX)); }

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

// ---- floating point: kFlush and kSaturate are .ftz and .sat, the rounding other than to nearest goes a slow way

enum { kFlush = 1, kSaturate = 2 };

float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
float canonical(float x) { return x != x ? bit_cast<float>(0x7fffffffu) : x; }
double canonical(double x) { return x; }

template <class T> T fadd(T a, T b, T) { return a + b; }
template <class T> T fsub(T a, T b, T) { return a - b; }
template <class T> T fmul(T a, T b, T) { return a * b; }
template <class T> T ffma(T a, T b, T d) { return std::fma(a, b, d); }
template <class T> T fdiv(T a, T b, T) { return a / b; }
template <class T> T fmin_(T a, T b, T) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b; }
template <class T> T fmax_(T a, T b, T) { return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b; }
template <class T> T fmin3(T a, T b, T d) { return fmin_(fmin_(a, b, d), d, d); }
template <class T> T fmax3(T a, T b, T d) { return fmax_(fmax_(a, b, d), d, d); }
template <class T> T fmin_nan(T a, T b, T d) { return a != a ? a : b != b ? b : fmin_(a, b, d); }
template <class T> T fmax_nan(T a, T b, T d) { return a != a ? a : b != b ? b : fmax_(a, b, d); }
template <class T> T fmin3_nan(T a, T b, T d) { return fmin_nan(fmin_nan(a, b, d), d, d); }
template <class T> T fmax3_nan(T a, T b, T d) { return fmax_nan(fmax_nan(a, b, d), d, d); }
float ex2(float a, float, float) { return std::exp2(a); }
float lg2(float a, float, float) { return std::log2(a); }
float rcp(float a, float, float) { return 1.f / a; }
float sqrt_(float a, float, float) { return std::sqrt(a); }
float rsqrt(float a, float, float) { return float(1.0 / std::sqrt(double(a))); }
float tanh_(float a, float, float) { return std::tanh(a); }
float sin_(float a, float, float) { return std::sin(a); }
float cos_(float a, float, float) { return std::cos(a); }

template <class T, T (*F)(T, T, T)>
__attribute__((noinline)) void float_lanes(T const* a, T const* b, T const* d, T* r) {
  for (int l = 0; l < kLanes; ++l) r[l] = canonical(F(a[l], b[l], d[l]));
}

template <class T, T (*F)(T, T, T)>
Step floating(Context& c, Op const& op) {
  T const* in[3];
  for (int i = 0; i < 3; ++i) in[i] = c.lanes<T>(op.in[op.in[i] == kNone ? 0 : i]);
  T r[kLanes];
  if (op.immediate == 0) {
    for (int l = 0; l < kLanes; ++l) r[l] = canonical(F(in[0][l], in[1][l], in[2][l]));
  } else {
    T flushed[3][kLanes];
    for (int i = 0; i < 3; ++i)
      for (int l = 0; l < kLanes; ++l) flushed[i][l] = op.immediate & kFlush ? T(flush(float(in[i][l]))) : in[i][l];
    int const rounding[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    fesetround(rounding[op.immediate >> 4]);
    float_lanes<T, F>(flushed[0], flushed[1], flushed[2], r);
    fesetround(FE_TONEAREST);
    for (int l = 0; l < kLanes; ++l) {
      if (op.immediate & kFlush) r[l] = T(flush(float(r[l])));
      if (op.immediate & kSaturate) r[l] = r[l] != r[l] ? T(0) : std::min(std::max(r[l], T(0)), T(1));
    }
  }
  c.store(op.out, r);
  return Step::kNext;
}
template <class T, bool kNegate>
Step change_sign(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  T r[kLanes];
  constexpr T kSign = T(1) << (sizeof(T) * 8 - 1);
  for (int l = 0; l < kLanes; ++l) r[l] = kNegate ? T(a[l] ^ kSign) : T(a[l] & ~kSign);
  c.store(op.out, r);
  return Step::kNext;
}
Step copy_sign(Context& c, Op const& op) {
  u32 const *a = c.lanes<u32>(op.in[0]), *b = c.lanes<u32>(op.in[1]);
  u32 r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = (a[l] & 0x80000000u) | (b[l] & 0x7fffffffu);
  c.store(op.out, r);
  return Step::kNext;
}

// ---- predicates and comparison

enum Compare : u8 { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <class T, int kCompare>
u32 compare_lanes(T const* a, T const* b) {
  u32 r = 0;
  for (int l = 0; l < kLanes; ++l) {
    bool const unordered = a[l] != a[l] || b[l] != b[l];
    bool v = false;
    switch (kCompare) {
      case kEq: v = a[l] == b[l]; break;
      case kNe: v = a[l] != b[l] && !unordered; break;
      case kLt: v = a[l] < b[l]; break;
      case kLe: v = a[l] <= b[l]; break;
      case kGt: v = a[l] > b[l]; break;
      case kGe: v = a[l] >= b[l]; break;
      case kEqu: v = unordered || a[l] == b[l]; break;
      case kNeu: v = unordered || a[l] != b[l]; break;
      case kLtu: v = unordered || a[l] < b[l]; break;
      case kLeu: v = unordered || a[l] <= b[l]; break;
      case kGtu: v = unordered || a[l] > b[l]; break;
      case kGeu: v = unordered || a[l] >= b[l]; break;
      case kNum: v = !unordered; break;
      case kNan: v = unordered; break;
    }
    r |= u32(v) << l;
  }
  return r;
}

// immediate: bits 0-1 the Boolean operation with in[2] (0 none, 1 and, 2 or, 3 xor), bit 2 its negation
template <class T, int kCompare>
Step set_predicate(Context& c, Op const& op) {
  u32 const v = compare_lanes<T, kCompare>(c.lanes<T>(op.in[0]), c.lanes<T>(op.in[1]));
  u32 p = v, q = ~v;
  if (op.immediate & 3) {
    u32 third = c.predicate(op.in[2]);
    if (op.immediate & 4) third = ~third;
    auto combine = [&](u32 x) { return (op.immediate & 3) == 1 ? x & third : (op.immediate & 3) == 2 ? x | third : x ^ third; };
    p = combine(v);
    q = combine(~v);
  }
  if (op.out != kNone) c.store_predicate(op.out, p);
  if (op.out2 != kNone) c.store_predicate(op.out2, q);
  return Step::kNext;
}

template <class T>
Handler pick_compare(int compare) {
  switch (compare) {
    case kEq: return set_predicate<T, kEq>;
    case kNe: return set_predicate<T, kNe>;
    case kLt: return set_predicate<T, kLt>;
    case kLe: return set_predicate<T, kLe>;
    case kGt: return set_predicate<T, kGt>;
    case kGe: return set_predicate<T, kGe>;
    case kEqu: return set_predicate<T, kEqu>;
    case kNeu: return set_predicate<T, kNeu>;
    case kLtu: return set_predicate<T, kLtu>;
    case kLeu: return set_predicate<T, kLeu>;
    case kGtu: return set_predicate<T, kGtu>;
    case kGeu: return set_predicate<T, kGeu>;
    case kNum: return set_predicate<T, kNum>;
    default: return set_predicate<T, kNan>;
  }
}

template <int kFunction>  // 0 and, 1 or, 2 xor, 3 not, 4 mov
Step predicate_logic(Context& c, Op const& op) {
  u32 a = c.predicate(op.in[0]), b = op.in[1] == kNone ? 0 : c.predicate(op.in[1]);
  if (op.immediate & 1) a = ~a;
  if (op.immediate & 2) b = ~b;
  c.store_predicate(op.out, kFunction == 0 ? a & b : kFunction == 1 ? a | b : kFunction == 2 ? a ^ b : kFunction == 3 ? ~a : a);
  return Step::kNext;
}

template <class T>
Step select(Context& c, Op const& op) {
  T const *a = c.lanes<T>(op.in[0]), *b = c.lanes<T>(op.in[1]);
  u32 p = c.predicate(op.in[2]);
  if (op.immediate) p = ~p;
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = p >> l & 1 ? a[l] : b[l];
  c.store(op.out, r);
  return Step::kNext;
}

// ---- decoding

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
    case 2: return is_signed ? integer_binary<i16>(name) : integer_binary<u16>(name);
    case 4: return is_signed ? integer_binary<i32>(name) : integer_binary<u32>(name);
    case 8: return is_signed ? integer_binary<i64>(name) : integer_binary<u64>(name);
  }
  return nullptr;
}

template <class T>
Handler float_handler(std::string const& name, bool nan, bool three) {
  if (three && name == "min") return nan ? floating<T, fmin3_nan<T>> : floating<T, fmin3<T>>;
  if (three && name == "max") return nan ? floating<T, fmax3_nan<T>> : floating<T, fmax3<T>>;
  if (name == "add") return floating<T, fadd<T>>;
  if (name == "sub") return floating<T, fsub<T>>;
  if (name == "mul") return floating<T, fmul<T>>;
  if (name == "fma" || name == "mad") return floating<T, ffma<T>>;
  if (name == "div") return floating<T, fdiv<T>>;
  if (name == "min") return nan ? floating<T, fmin_nan<T>> : floating<T, fmin_<T>>;
  if (name == "max") return nan ? floating<T, fmax_nan<T>> : floating<T, fmax_<T>>;
  if constexpr (sizeof(T) == 4) {
    if (name == "ex2") return floating<float, ex2>;
    if (name == "lg2") return floating<float, lg2>;
    if (name == "rcp") return floating<float, rcp>;
    if (name == "sqrt") return floating<float, sqrt_>;
    if (name == "rsqrt") return floating<float, rsqrt>;
    if (name == "tanh") return floating<float, tanh_>;
    if (name == "sin") return floating<float, sin_>;
    if (name == "cos") return floating<float, cos_>;
  }
  return nullptr;
}

i64 float_flags(Statement const& s) {
  i64 const rounding = s.has("rz") ? 1 : s.has("rm") ? 2 : s.has("rp") ? 3 : 0;
  return (s.has("ftz") ? kFlush : 0) | (s.has("sat") ? kSaturate : 0) | rounding << 4;
}

bool decode_setp(Decoder& d, Statement const& s, Op& op) {
  static std::map<std::string, int> const kCompares{{"eq", kEq}, {"ne", kNe}, {"lt", kLt}, {"le", kLe}, {"gt", kGt}, {"ge", kGe},
    {"lo", kLt}, {"ls", kLe}, {"hi", kGt}, {"hs", kGe}, {"equ", kEqu}, {"neu", kNeu}, {"ltu", kLtu}, {"leu", kLeu}, {"gtu", kGtu}, {"geu", kGeu}, {"num", kNum}, {"nan", kNan}};
  Type const t = last_type(s);
  auto const compare = kCompares.find(s.modifiers[1]);
  if (compare == kCompares.end() || t.packed) unsupported(s);
  int const k = compare->second;
  bool const is_signed = t.kind == 's';
  if (t.is('f', 4)) op.run = pick_compare<float>(k);
  else if (t.is('f', 8)) op.run = pick_compare<double>(k);
  else if (t.is('f', 2)) op.run = pick_compare<_Float16>(k);
  else if (!t.integer()) unsupported(s);
  else if (t.size == 2) op.run = is_signed ? pick_compare<i16>(k) : pick_compare<u16>(k);
  else if (t.size == 4) op.run = is_signed ? pick_compare<i32>(k) : pick_compare<u32>(k);
  else op.run = is_signed ? pick_compare<i64>(k) : pick_compare<u64>(k);
  op.in[0] = d.source(s.operands[1], t.size, op).offset;
  op.in[1] = d.source(s.operands[2], t.size, op).offset;
  op.immediate = s.has("and") ? 1 : s.has("or") ? 2 : s.has("xor") ? 3 : 0;
  if (op.immediate) {
    bool negated = false;
    op.in[2] = d.predicate(s.operands[3], op, &negated).offset;
    op.immediate |= negated ? 4 : 0;
  }
  Operand first = s.operands[0];
  if (!first.parts.empty()) op.out2 = d.destination(first.parts[0], op);
  op.out = d.destination(first, op);
  return true;
}

}  // namespace

bool decode_arithmetic(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  Type const t = last_type(s);
  kind = t.kind == 'f' ? Class::kFloat : Class::kInteger;
  op.moves_data = true;
  if (b == "setp") return decode_setp(d, s, op);
  if (t.packed || t.kind == 'h' || t.is('f', 2)) return false;
  auto simple = [&](int sources, int size) {
    op.out = d.destination(s.operands[0], op, size);
    for (int i = 0; i < sources; ++i) op.in[i] = d.source(s.operands[i + 1], size, op).offset;
    return true;
  };
  if (t.kind == 'p' && (b == "and" || b == "or" || b == "xor" || b == "not" || b == "mov")) {
    bool negated = false;
    for (size_t i = 1; i < s.operands.size(); ++i) {
      op.in[i - 1] = d.predicate(s.operands[i], op, &negated).offset;
      if (negated) op.immediate |= 1 << (i - 1);
    }
    op.out = d.destination(s.operands[0], op);
    op.run = b == "and" ? predicate_logic<0> : b == "or" ? predicate_logic<1> : b == "xor" ? predicate_logic<2> : b == "not" ? predicate_logic<3> : predicate_logic<4>;
    return true;
  }
  if (b == "selp") {
    kind = Class::kMove;
    op.run = t.size == 2 ? select<u16> : t.size == 4 ? select<u32> : select<u64>;
    simple(2, t.size);
    bool negated = false;
    op.in[2] = d.predicate(s.operands[3], op, &negated).offset;
    op.immediate = negated;
    return true;
  }
  if (t.kind == 'f') {
    bool const is32 = t.size == 4;
    if (b == "abs" || b == "neg") {
      op.run = is32 ? (b == "neg" ? change_sign<u32, true> : change_sign<u32, false>) : (b == "neg" ? change_sign<u64, true> : change_sign<u64, false>);
      return simple(1, t.size);
    }
    if (b == "copysign" && is32) {
      op.run = copy_sign;
      return simple(2, 4);
    }
    if (s.has("xorsign") || s.has("abs")) unsupported(s);
    bool const three = s.operands.size() == 4;
    op.run = is32 ? float_handler<float>(b, s.has("NaN"), three) : float_handler<double>(b, s.has("NaN"), three);
    if (!op.run) return false;
    op.immediate = float_flags(s);
    return simple(int(s.operands.size()) - 1, t.size);
  }
  if (!t.integer()) return false;
  if ((b == "add" || b == "sub" || b == "mad") && (s.has("cc") || s.has("sat"))) {
    if (s.has("cc") || b == "mad") unsupported(s, "uses the carry flag");
    op.run = b == "add" ? binary<i32, sat_add> : binary<i32, sat_sub>;
    return simple(2, 4);
  }
  if ((b == "mul" || b == "mad") && s.has("wide")) {
    bool const is_signed = t.kind == 's', adds = b == "mad";
    if (t.size == 2) op.run = is_signed ? (adds ? wide<i16, i32, true> : wide<i16, i32, false>) : (adds ? wide<u16, u32, true> : wide<u16, u32, false>);
    else op.run = is_signed ? (adds ? wide<i32, i64, true> : wide<i32, i64, false>) : (adds ? wide<u32, u64, true> : wide<u32, u64, false>);
    op.out = d.destination(s.operands[0], op, t.size * 2);
    for (int i = 0; i < 2; ++i) op.in[i] = d.source(s.operands[i + 1], t.size, op).offset;
    if (adds) op.in[2] = d.source(s.operands[3], t.size * 2, op).offset;
    return true;
  }
  if (b == "shl" || b == "shr") {
    op.run = integer_handler(b, t);
    op.out = d.destination(s.operands[0], op, t.size);
    op.in[0] = d.source(s.operands[1], t.size, op).offset;
    op.in[1] = d.source(s.operands[2], 4, op).offset;
    return true;
  }
  if (b == "lop3") {
    op.run = lop3;
    op.immediate = d.number(s.operands[4]);
    return simple(3, 4);
  }
  if (b == "shf") {
    bool const left = s.has("l"), wrap = s.has("wrap");
    op.run = left ? (wrap ? funnel<true, true> : funnel<true, false>) : (wrap ? funnel<false, true> : funnel<false, false>);
    return simple(3, 4);
  }
  if (b == "prmt") {
    if (s.modifiers.size() > 2) unsupported(s);
    op.run = permute_bytes;
    return simple(3, 4);
  }
  if (b == "bfe" || b == "bfi") {
    bool const insert = b == "bfi";
    if (insert) op.run = t.size == 4 ? bit_insert<u32> : bit_insert<u64>;
    else if (t.kind == 's') op.run = t.size == 4 ? bit_extract<i32> : bit_extract<i64>;
    else op.run = t.size == 4 ? bit_extract<u32> : bit_extract<u64>;
    op.out = d.destination(s.operands[0], op, t.size);
    for (int i = 0; i < (insert ? 4 : 3); ++i) op.in[i] = d.source(s.operands[i + 1], i < (insert ? 2 : 1) ? t.size : 4, op).offset;
    return true;
  }
  if (b == "bfind") {
    bool const shift = s.has("shiftamt");
    if (t.kind == 's') op.run = t.size == 4 ? (shift ? find_bit<i32, true> : find_bit<i32, false>) : (shift ? find_bit<i64, true> : find_bit<i64, false>);
    else op.run = t.size == 4 ? (shift ? find_bit<u32, true> : find_bit<u32, false>) : (shift ? find_bit<u64, true> : find_bit<u64, false>);
  } else if (b == "clz") {
    op.run = t.size == 4 ? count_bits<u32, true> : count_bits<u64, true>;
  } else if (b == "popc") {
    op.run = t.size == 4 ? count_bits<u32, false> : count_bits<u64, false>;
  }
  if (op.run) {
    op.out = d.destination(s.operands[0], op, 4);
    op.in[0] = d.source(s.operands[1], t.size, op).offset;
    return true;
  }
  if (b == "brev") {
    op.run = t.size == 4 ? Handler(unary<u32, brev32>) : Handler(unary<u64, brev64>);
    return simple(1, t.size);
  }
  std::string name = b;
  if (s.has("hi")) name += "hi";
  op.run = integer_handler(name, t);
  if (!op.run) return false;
  return simple(int(s.operands.size()) - 1, t.size);
}

}  // namespace simulator
