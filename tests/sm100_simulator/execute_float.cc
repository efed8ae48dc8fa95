// f32 and f64 arithmetic. PTX ISA, "Floating Point Instructions".
#include <cfenv>
#include <limits>

#include "numbers.h"
#include "types.h"

namespace simulator {
namespace {

// kFlush and kSaturate are .ftz and .sat, the rounding other than to nearest goes a slow way

enum { kFlush = 1, kSaturate = 2 };

float flush(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
float canonical(float x) { return x != x ? bit_cast<float>(0x7fffffffu) : x; }
double canonical(double x) { return x; }

template <class T>
T fadd(T a, T b, T) {
  return a + b;
}
template <class T>
T fsub(T a, T b, T) {
  return a - b;
}
template <class T>
T fmul(T a, T b, T) {
  return a * b;
}
template <class T>
T ffma(T a, T b, T d) {
  return std::fma(a, b, d);
}
template <class T>
T fdiv(T a, T b, T) {
  return a / b;
}
template <class T>
T fmin_(T a, T b, T) {
  return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
T fmax_(T a, T b, T) {
  return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
template <class T>
T fmin3(T a, T b, T d) {
  return fmin_(fmin_(a, b, d), d, d);
}
template <class T>
T fmax3(T a, T b, T d) {
  return fmax_(fmax_(a, b, d), d, d);
}
template <class T>
T fmin_nan(T a, T b, T d) {
  return a != a ? a : b != b ? b : fmin_(a, b, d);
}
template <class T>
T fmax_nan(T a, T b, T d) {
  return a != a ? a : b != b ? b : fmax_(a, b, d);
}
template <class T>
T fmin3_nan(T a, T b, T d) {
  return fmin_nan(fmin_nan(a, b, d), d, d);
}
template <class T>
T fmax3_nan(T a, T b, T d) {
  return fmax_nan(fmax_nan(a, b, d), d, d);
}
// The three-input forms with .abs: of the magnitudes.
template <class T, T (*F)(T, T, T)>
T of_magnitudes(T a, T b, T d) {
  return F(std::fabs(a), std::fabs(b), std::fabs(d));
}
// .xorsign.abs: of the magnitudes, with the product's sign.
template <class T, T (*F)(T, T, T)>
T signed_as_product(T a, T b, T d) {
  T const r = F(std::fabs(a), std::fabs(b), d);
  return std::signbit(a) != std::signbit(b) ? -r : r;
}
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
      if (op.immediate & kSaturate) r[l] = r[l] > 0 ? std::min(r[l], T(1)) : T(0);  // of NaN and of -0 too
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
  for (int l = 0; l < kLanes; ++l) {
    r[l] = kNegate ? T(a[l] ^ kSign) : T(a[l] & ~kSign);
    if (sizeof(T) == 4 && (a[l] & ~kSign) > 0x7f800000u) r[l] = T(0x7fffffff);  // as on an H200
  }
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

template <class T>
Handler float_handler(std::string const& name, bool nan, bool three, bool magnitudes, bool xorsign) {
  if (xorsign && name == "min") {
    return nan ? floating<T, signed_as_product<T, fmin_nan<T>>> : floating<T, signed_as_product<T, fmin_<T>>>;
  }
  if (xorsign && name == "max") {
    return nan ? floating<T, signed_as_product<T, fmax_nan<T>>> : floating<T, signed_as_product<T, fmax_<T>>>;
  }
  if (magnitudes && name == "min") {
    return nan ? floating<T, of_magnitudes<T, fmin3_nan<T>>> : floating<T, of_magnitudes<T, fmin3<T>>>;
  }
  if (magnitudes && name == "max") {
    return nan ? floating<T, of_magnitudes<T, fmax3_nan<T>>> : floating<T, of_magnitudes<T, fmax3<T>>>;
  }
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

}  // namespace

bool decode_float(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  Type const t = last_type(s);
  if (t.kind != 'f' || t.packed || t.size < 4) return false;
  kind = Class::kFloat;
  op.moves_data = true;
  bool const is32 = t.size == 4;
  if (b == "abs" || b == "neg") {
    op.run = is32 ? (b == "neg" ? change_sign<u32, true> : change_sign<u32, false>)
                  : (b == "neg" ? change_sign<u64, true> : change_sign<u64, false>);
    return elementwise(d, s, op, 1, t.size);
  }
  if (b == "copysign" && is32) {
    op.run = copy_sign;
    return elementwise(d, s, op, 2, 4);
  }
  bool const three = s.operands.size() == 4, xorsign = s.has("xorsign"), magnitudes = s.has("abs") && !xorsign;
  bool const extreme = is32 && (b == "min" || b == "max");
  if ((magnitudes && !(extreme && three)) || (xorsign && !(extreme && !three && s.has("abs")))) unsupported(s);
  op.run = is32 ? float_handler<float>(b, s.has("NaN"), three, magnitudes, xorsign)
                : float_handler<double>(b, s.has("NaN"), three, false, false);
  if (!op.run) return false;
  op.immediate = float_flags(s);
  return elementwise(d, s, op, int(s.operands.size()) - 1, t.size);
}

}  // namespace simulator
