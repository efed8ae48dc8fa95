// cvt in all its forms. PTX ISA, "Data Movement and Conversion Instructions: cvt".
#include <cfenv>

#include "numbers.h"
#include "types.h"

namespace simulator {
namespace {

// ---- between scalars: through i64 or double, one lane loop in and one out

// Packed into Op::immediate.
struct Scalar {
  u8 source_kind, source_size, source_register, kind, size, register_size, rounding;
  bool integer_rounding, saturate, flush;
};
enum { kNearest, kZero, kDown, kUp, kNearestAway };

template <class T>
void read_integers(Context const& c, Op const& op, int stride, i64 (&out)[kLanes]) {
  u8 const* in = c.lanes<u8>(op.in[0]);
  for (int l = 0; l < kLanes; ++l) {
    T v;
    memcpy(&v, in + l * stride, sizeof v);
    out[l] = i64(v);
  }
}

void load_integers(Context const& c, Op const& op, Scalar const& s, i64 (&v)[kLanes]) {
  bool const is_signed = s.source_kind == 's';
  switch (s.source_size) {
    case 1:
      return is_signed ? read_integers<i8>(c, op, s.source_register, v)
                       : read_integers<u8>(c, op, s.source_register, v);
    case 2:
      return is_signed ? read_integers<i16>(c, op, s.source_register, v)
                       : read_integers<u16>(c, op, s.source_register, v);
    case 4:
      return is_signed ? read_integers<i32>(c, op, s.source_register, v)
                       : read_integers<u32>(c, op, s.source_register, v);
    default:
      return read_integers<i64>(c, op, s.source_register, v);
  }
}

template <class T>
void write_register(Context& c, Op const& op, i64 const (&v)[kLanes]) {
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = T(v[l]);
  c.store(op.out, r);
}
void store_bits(Context& c, Op const& op, int size, i64 const (&v)[kLanes]) {
  switch (size) {
    case 1:
      return write_register<u8>(c, op, v);
    case 2:
      return write_register<u16>(c, op, v);
    case 4:
      return write_register<u32>(c, op, v);
    default:
      return write_register<u64>(c, op, v);
  }
}

void narrow(Scalar const& s, bool source_signed, i64 (&v)[kLanes]) {
  if (s.size == 8 && !s.saturate) return;
  int const bits = s.size * 8;
  for (i64& x : v) {
    if (s.saturate) {
      if (s.kind == 's') {
        i64 const top = i64((1ull << (bits - 1)) - 1);
        if (!source_signed && x < 0) x = top;  // a 64-bit unsigned value above i64
        x = std::min(std::max(x, -top - 1), top);
      } else {
        u64 const top = bits == 64 ? ~0ull : (1ull << bits) - 1;
        if (source_signed && x < 0) x = 0;
        x = i64(std::min(u64(x), top));
      }
    }
    if (bits < 64) x = s.kind == 's' ? i64(u64(x) << (64 - bits)) >> (64 - bits) : i64(u64(x) & ((1ull << bits) - 1));
  }
}

double read_float(Scalar const& s, u8 const* p) {
  switch (s.source_kind == 'h' ? 1 : s.source_size) {
    case 1:
      return bf16_to_float(*reinterpret_cast<u16 const*>(p));
    case 2:
      return f16_to_float(*reinterpret_cast<u16 const*>(p));
    case 4:
      return *reinterpret_cast<float const*>(p);
    default:
      return *reinterpret_cast<double const*>(p);
  }
}

double to_integral(double x, int rounding) {
  switch (rounding) {
    case kZero:
      return std::trunc(x);
    case kDown:
      return std::floor(x);
    case kUp:
      return std::ceil(x);
    default:
      return std::nearbyint(x);
  }
}

i64 to_integer(double x, Scalar const& s) {  // saturates; NaN gives 0, or the top bit of 64
  if (x != x) return s.size == 8 ? INT64_MIN : 0;
  if (s.kind == 's') {
    double const top = std::ldexp(1., s.size * 8 - 1);
    if (x >= top) return i64((1ull << (s.size * 8 - 1)) - 1);
    if (x <= -top) return -i64(1ull << (s.size * 8 - 2)) * 2;
    return i64(x);
  }
  double const top = std::ldexp(1., s.size * 8);
  return x <= 0 ? 0 : x >= top ? i64(s.size == 8 ? ~0ull : (1ull << s.size * 8) - 1) : i64(u64(x));
}

i64 float_bits(double x, Scalar const& s) {
  int const modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
  if (s.saturate) x = x > 0 ? std::min(x, 1.) : 0;  // of NaN and of -0 too
  if (s.size == 8) return bit_cast<i64>(x);
  if (s.size == 4) {
    if (x != x) return 0x7fffffff;
    fesetround(modes[s.rounding]);
    volatile double const in = x;
    volatile float f = float(in);
    fesetround(FE_TONEAREST);
    if (s.flush && std::fabs(f) < 0x1p-126f) f = std::copysign(0.f, f);
    return bit_cast<u32>(float(f));
  }
  Rounding const r = s.rounding == kZero ? Rounding::kZero : Rounding::kNearest;
  return s.kind == 'h' ? float_to_bf16(float(x), r) : float_to_f16(float(x), r);
}

Step scalar(Context& c, Op const& op) {
  Scalar const s = bit_cast<Scalar>(*reinterpret_cast<std::array<u8, sizeof(Scalar)> const*>(
      c.machine.launch->program->details[op.immediate].numbers));
  bool const from_float = s.source_kind == 'f' || s.source_kind == 'h', to_float = s.kind == 'f' || s.kind == 'h';
  i64 v[kLanes];
  if (!from_float) {
    load_integers(c, op, s, v);
    if (!to_float) {
      narrow(s, s.source_kind == 's', v);
    } else {
      for (i64& x : v) {
        if (s.size == 4 && s.rounding == kNearest) {
          x = bit_cast<u32>(s.source_kind == 's' ? float(x) : float(u64(x)));
        } else {
          x = float_bits(s.source_kind == 's' ? double(x) : double(u64(x)), s);
        }
      }
    }
  } else {
    u8 const* in = c.lanes<u8>(op.in[0]);
    for (int l = 0; l < kLanes; ++l) {
      double x = read_float(s, in + l * s.source_register);
      if (s.flush && std::fabs(x) < 0x1p-126) x = std::copysign(0., x);
      if (s.integer_rounding) x = to_integral(x, s.rounding);
      v[l] = to_float ? float_bits(x, s) : to_integer(x, s);
    }
  }
  store_bits(c, op, s.register_size, v);
  return Step::kNext;
}

// ---- two narrow floats at once

enum Narrow : u8 { kF32, kF16, kBF16, kNE4M3, kNE5M2, kNE2M3, kNE3M2, kNE2M1, kNE8M0 };
Narrow parse_narrow(std::string const& name) {
  static std::map<std::string, Narrow> const kNames{{"f32", kF32},      {"f16x2", kF16},    {"bf16x2", kBF16},
                                                    {"e4m3x2", kNE4M3}, {"e5m2x2", kNE5M2}, {"e2m3x2", kNE2M3},
                                                    {"e3m2x2", kNE3M2}, {"e2m1x2", kNE2M1}, {"ue8m0x2", kNE8M0}};
  auto const found = kNames.find(name);
  return found == kNames.end() ? Narrow(255) : found->second;
}
constexpr int pair_bits(Narrow n) { return n == kF16 || n == kBF16 ? 16 : n == kNE2M1 ? 4 : 8; }
constexpr Format format(Narrow n) {
  return n == kNE4M3 ? kE4M3 : n == kNE5M2 ? kE5M2 : n == kNE2M3 ? kE2M3 : n == kNE3M2 ? kE3M2 : kE2M1;
}

float widen(Narrow n, u32 bits) {
  switch (n) {
    case kF16:
      return f16_to_float(u16(bits));
    case kBF16:
      return bf16_to_float(u16(bits));
    case kNE8M0:
      return decode_e8m0(u8(bits));
    default:
      return decode(format(n), bits);
  }
}
u32 narrow_bits(Narrow n, float x, Rounding rounding, bool saturate) {
  switch (n) {
    case kF16:
    case kBF16: {
      u32 const r = n == kF16 ? float_to_f16(x, rounding) : float_to_bf16(x, rounding);
      u32 const infinity = n == kF16 ? 0x7c00 : 0x7f80;
      return saturate && (r & 0x7fff) == infinity ? r - 1 : r;
    }
    case kNE8M0:
      return encode_e8m0(x, rounding == Rounding::kUp);
    default:
      fail("internal", "a narrow format that narrow_lanes does");
  }
}

using Floats = float[kLanes];

template <Narrow kTo>
void narrow_lanes(Floats const& high, Floats const& low, i64 (&v)[kLanes]) {
  Format const f = format(kTo);
  int const bits = pair_bits(kTo);
  for (int l = 0; l < kLanes; ++l) v[l] = i64(encode(f, high[l]) << bits | encode(f, low[l]));
}

// numbers: destination, source, rounding, flags (1 relu, 2 satfinite, 4 second source)
Step pair(Context& c, Op const& op) {
  Details const& d = c.machine.launch->program->details[op.immediate];
  Narrow const to = Narrow(d.numbers[0]), from = Narrow(d.numbers[1]);
  Rounding const rounding = Rounding(d.numbers[2]);
  bool const relu = d.numbers[3] & 1, saturate = d.numbers[3] & 2, two = d.numbers[3] & 4;
  Floats high, low;
  if (two) {
    memcpy(high, c.lanes<float>(op.in[0]), sizeof high);
    memcpy(low, c.lanes<float>(op.in[1]), sizeof low);
  } else {
    int const n = pair_bits(from);
    for (int l = 0; l < kLanes; ++l) {
      u32 const packed = u32(read_lane(c, op.in[0], int(d.values[0].size), l));
      high[l] = widen(from, packed >> n & ((1u << n) - 1));
      low[l] = widen(from, packed & ((1u << n) - 1));
    }
  }
  if (relu) {
    for (float& x : high) x = x > 0 || x != x ? x : 0;
    for (float& x : low) x = x > 0 || x != x ? x : 0;
  }
  i64 v[kLanes];
  switch (to) {
    case kNE4M3:
      narrow_lanes<kNE4M3>(high, low, v);
      break;
    case kNE5M2:
      narrow_lanes<kNE5M2>(high, low, v);
      break;
    case kNE2M3:
      narrow_lanes<kNE2M3>(high, low, v);
      break;
    case kNE3M2:
      narrow_lanes<kNE3M2>(high, low, v);
      break;
    case kNE2M1:
      narrow_lanes<kNE2M1>(high, low, v);
      break;
    default:
      for (int l = 0; l < kLanes; ++l)
        v[l] = i64(narrow_bits(to, high[l], rounding, saturate)) << pair_bits(to) |
               narrow_bits(to, low[l], rounding, saturate);
  }
  store_bits(c, op, d.values[1].size, v);
  return Step::kNext;
}

Step to_tf32(Context& c, Op const& op) {
  u32 const* a = c.lanes<u32>(op.in[0]);
  u32 r[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    bool const nan = (a[l] & 0x7fffffff) > 0x7f800000;
    u32 const add = op.immediate ? 0x1000 : 0xfff + (a[l] >> 13 & 1);  // ties away, or to even
    r[l] = (nan ? a[l] : a[l] + add) & ~0x1fffu;
  }
  c.store(op.out, r);
  return Step::kNext;
}

}  // namespace

bool decode_convert(Decoder& d, Statement const& s, Op& op, Class& kind) {
  if (s.base() != "cvt") return false;
  kind = Class::kConvert;
  op.moves_data = true;
  std::string const &to = s.modifiers[s.modifiers.size() - 2], &from = s.modifiers.back();
  if (s.modifiers.back() == "f32" && to == "tf32") {
    op.run = to_tf32;
    op.immediate = s.has("rna");
    op.out = d.destination(s.operands[0], 4);
    op.in[0] = d.source(s.operands[1], 4).offset;
    return true;
  }
  Narrow const narrow_to = parse_narrow(to), narrow_from = parse_narrow(from);
  bool const packed = to.size() > 2 && to.compare(to.size() - 2, 2, "x2") == 0;
  if (packed) {
    if (narrow_to == Narrow(255) || narrow_from == Narrow(255) || s.has("rs")) unsupported(s);
    Details x;
    bool const two = narrow_from == kF32;
    x.numbers[0] = narrow_to;
    x.numbers[1] = narrow_from;
    x.numbers[2] = u64(s.has("rz") ? Rounding::kZero : s.has("rp") ? Rounding::kUp : Rounding::kNearest);
    x.numbers[3] = (s.has("relu") ? 1 : 0) | (s.has("satfinite") ? 2 : 0) | (two ? 4 : 0);
    bool const narrow_result = narrow_to != kF16 && narrow_to != kBF16;
    if (narrow_result && !s.has("satfinite") && narrow_to != kNE8M0) unsupported(s, "needs .satfinite");
    op.run = pair;
    Value const out = d.reg(s.operands[0]);
    if (two) {
      for (int i = 0; i < 2; ++i) op.in[i] = d.source(s.operands[i + 1], 4).offset;
      x.values = {{}, out};
    } else {
      Value const in = d.reg(s.operands[1]);
      d.reads(in);
      op.in[0] = in.offset;
      x.values = {in, out};
    }
    op.out = d.destination(s.operands[0]);
    op.immediate = d.detail(x);
    return true;
  }
  Type const a = parse_type(from), b = parse_type(to);
  if (!a.kind || !b.kind) unsupported(s);
  Operand const& in = s.operands[1];
  Value const out = d.reg(s.operands[0]);
  Value const source = in.kind == Operand::kRegister ? d.reg(in) : d.source(in, a.size);
  if (in.kind == Operand::kRegister) d.reads(source);
  Scalar x{};
  x.source_kind = u8(a.kind);
  x.source_size = u8(a.size);
  x.source_register = u8(source.size);
  x.kind = u8(b.kind);
  x.size = u8(b.size);
  x.register_size = u8(out.size);
  bool const is_float = a.kind == 'f' || a.kind == 'h';
  x.integer_rounding = s.has("rni") || s.has("rzi") || s.has("rmi") || s.has("rpi");
  x.rounding = s.has("rz") || s.has("rzi")   ? kZero
               : s.has("rm") || s.has("rmi") ? kDown
               : s.has("rp") || s.has("rpi") ? kUp
                                             : kNearest;
  x.saturate = s.has("sat") && (!is_float || b.kind == 'f');
  x.flush = s.has("ftz");
  if (s.has("relu")) unsupported(s);
  Details details;
  memcpy(details.numbers, &x, sizeof x);
  op.run = scalar;
  op.in[0] = source.offset;
  op.out = d.destination(s.operands[0]);
  op.immediate = d.detail(details);
  return true;
}

}  // namespace simulator
