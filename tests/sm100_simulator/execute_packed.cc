// Half precision, bfloat16 and the packed forms: f32x2, f16x2, bf16x2, u16x2, s16x2.
#include <limits>

#include "numbers.h"
#include "types.h"

namespace simulator {
namespace {

// Narrow formats compute in double and round once. A float rounded to odd keeps what a second rounding needs.
float round_to_odd(double x) {
  float const f = float(x);
  if (double(f) == x || f != f) return f;
  u32 bits = bit_cast<u32>(f);
  if (!(bits & 1)) bits += std::fabs(double(f)) < std::fabs(x) ? 1 : -1;
  return bit_cast<float>(bits);
}

// p + c, rounded to odd: the tail that is lost still says on which side of a tie the sum lies.
double sum_to_odd(double p, double c) {
  double const sum = p + c, back = sum - p, error = (p - (sum - back)) + (c - back);
  if (!(std::fabs(sum) < INFINITY) || error == 0 || bit_cast<u64>(sum) & 1) return sum;
  return std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

struct Half {
  using Bits = u16;
  static constexpr double kSmallestNormal = 0x1p-14;
  static double read(u16 b) { return double(bit_cast<_Float16>(b)); }
  static u16 write(double x) { return x != x ? u16(0x7fff) : bit_cast<u16>(_Float16(x)); }
};
struct Brain {
  using Bits = u16;
  static constexpr double kSmallestNormal = 0x1p-126;
  static double read(u16 b) { return double(bf16_to_float(b)); }
  static u16 write(double x) { return float_to_bf16(round_to_odd(x)); }
};
struct Single {
  using Bits = u32;
  static constexpr double kSmallestNormal = 0x1p-126;
  static double read(u32 b) { return double(bit_cast<float>(b)); }
  static u32 write(double x) { return x != x ? 0x7fffffffu : bit_cast<u32>(float(x)); }
};

enum Function { kAdd, kSub, kMul, kFma, kMin, kMax, kMinNan, kMaxNan };

double minimum(double a, double b) {
  return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
double maximum(double a, double b) {
  return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}

// kPer elements of format F in each lane. Flags: 1 flush, 2 saturate, 4 relu.
template <class F, int kPer, int kFunction>
Step narrow(Context& c, Op const& op) {
  using Bits = typename F::Bits;
  Bits const* in[3];
  for (int i = 0; i < 3; ++i) in[i] = c.lanes<Bits>(op.in[op.in[i] == kNone ? 0 : i]);
  struct Element {
    Bits v[kPer];
  } r[kLanes];
  double const smallest = F::kSmallestNormal;
  auto flush = [&](double x) { return op.immediate & 1 && std::fabs(x) < smallest ? std::copysign(0., x) : x; };
  for (int i = 0; i < kLanes * kPer; ++i) {
    double const a = flush(F::read(in[0][i])), b = flush(F::read(in[1][i])), d = flush(F::read(in[2][i]));
    double v = 0;
    switch (kFunction) {
      case kAdd:
        v = a + b;
        break;
      case kSub:
        v = a - b;
        break;
      case kMul:
        v = a * b;
        break;
      // The product of two floats is exact in double, but the sum may round twice: std::fma of the float itself for
      // those.
      case kFma:
        v = sizeof(Bits) == 4 ? double(std::fma(float(a), float(b), float(d))) : sum_to_odd(a * b, d);
        break;
      case kMin:
        v = minimum(a, b);
        break;
      case kMax:
        v = maximum(a, b);
        break;
      case kMinNan:
        v = a != a || b != b ? NAN : minimum(a, b);
        break;
      case kMaxNan:
        v = a != a || b != b ? NAN : maximum(a, b);
        break;
    }
    if (op.immediate & 2) v = v > 0 ? std::min(v, 1.) : 0;  // of NaN and of -0 too
    if (op.immediate & 4 && v < 0) v = 0;
    r[i / kPer].v[i % kPer] = F::write(flush(v));
  }
  c.store(op.out, r);
  return Step::kNext;
}

template <class F, int kPer>
Handler narrow_handler(std::string const& name, bool nan) {
  if (name == "add") return narrow<F, kPer, kAdd>;
  if (name == "sub") return narrow<F, kPer, kSub>;
  if (name == "mul") return narrow<F, kPer, kMul>;
  if (name == "fma") return narrow<F, kPer, kFma>;
  if (name == "min") return nan ? narrow<F, kPer, kMinNan> : narrow<F, kPer, kMin>;
  if (name == "max") return nan ? narrow<F, kPer, kMaxNan> : narrow<F, kPer, kMax>;
  return nullptr;
}

template <class T, int kFunction>
Step integer_pairs(Context& c, Op const& op) {
  T const *a = c.lanes<T>(op.in[0]), *b = c.lanes<T>(op.in[1]);
  struct Pair {
    T v[2];
  } r[kLanes];
  for (int i = 0; i < kLanes * 2; ++i)
    r[i / 2].v[i & 1] = kFunction == kAdd   ? T(a[i] + b[i])
                        : kFunction == kMin ? std::min(a[i], b[i])
                                            : std::max(a[i], b[i]);
  c.store(op.out, r);
  return Step::kNext;
}

// NaN becomes the canonical one, as on an H200.
template <int kPer, bool kNegate, u16 kInfinity>
Step signs(Context& c, Op const& op) {
  struct Element {
    u16 v[kPer];
  } r[kLanes];
  u16 const* a = c.lanes<u16>(op.in[0]);
  for (int i = 0; i < kLanes * kPer; ++i) {
    u16 const magnitude = a[i] & 0x7fff;
    r[i / kPer].v[i % kPer] = magnitude > kInfinity ? u16(0x7fff) : kNegate ? u16(a[i] ^ 0x8000) : magnitude;
  }
  c.store(op.out, r);
  return Step::kNext;
}

template <u16 kInfinity>
Handler sign_handler(bool packed, bool negate) {
  if (packed) return negate ? signs<2, true, kInfinity> : signs<2, false, kInfinity>;
  return negate ? signs<1, true, kInfinity> : signs<1, false, kInfinity>;
}

}  // namespace

bool decode_packed(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  Type const t = last_type(s);
  bool const half = t.kind == 'f' && t.size == (t.packed ? 4 : 2), brain = t.kind == 'h',
             pair32 = t.kind == 'f' && t.packed && t.size == 8;
  if (s.modifiers.size() < 2 || b == "cvt" || b == "atom" || b == "red" || b == "mma") return false;
  if (pair32) {
    op.run = narrow_handler<Single, 2>(b, false);
    if (s.has("rz") || s.has("rm") || s.has("rp")) unsupported(s, "has a rounding that the simulator does not do");
  } else if (half || brain) {
    if (b == "abs" || b == "neg")
      op.run = half ? sign_handler<0x7c00>(t.packed, b == "neg") : sign_handler<0x7f80>(t.packed, b == "neg");
    else if (half)
      op.run = t.packed ? narrow_handler<Half, 2>(b, s.has("NaN")) : narrow_handler<Half, 1>(b, s.has("NaN"));
    else
      op.run = t.packed ? narrow_handler<Brain, 2>(b, s.has("NaN")) : narrow_handler<Brain, 1>(b, s.has("NaN"));
  } else if (t.packed && t.integer() && t.size == 4) {
    if (t.kind == 's')
      op.run = b == "add"   ? integer_pairs<i16, kAdd>
               : b == "min" ? integer_pairs<i16, kMin>
               : b == "max" ? integer_pairs<i16, kMax>
                            : nullptr;
    else
      op.run = b == "add"   ? integer_pairs<u16, kAdd>
               : b == "min" ? integer_pairs<u16, kMin>
               : b == "max" ? integer_pairs<u16, kMax>
                            : nullptr;
  }
  if (!op.run) return false;
  if (s.has("xorsign") || s.has("relu") + s.has("sat") > 1) unsupported(s);
  kind = t.integer() ? Class::kInteger : Class::kFloat;
  op.moves_data = true;
  op.immediate = (s.has("ftz") ? 1 : 0) | (s.has("sat") ? 2 : 0) | (s.has("relu") ? 4 : 0);
  op.out = d.destination(s.operands[0], t.size);
  for (size_t i = 1; i < s.operands.size(); ++i) op.in[i - 1] = d.source(s.operands[i], t.size).offset;
  return true;
}

}  // namespace simulator
