// Comparison, predicates and selection. PTX ISA, "Comparison and Selection Instructions".
#include "types.h"

namespace simulator {
namespace {

enum Compare : u8 { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <class T, int kCompare>
u32 compare_lanes(T const* a, T const* b) {
  u32 r = 0;
  for (int l = 0; l < kLanes; ++l) {
    bool const unordered = a[l] != a[l] || b[l] != b[l];
    bool v = false;
    switch (kCompare) {
      case kEq:
        v = a[l] == b[l];
        break;
      case kNe:
        v = a[l] != b[l] && !unordered;
        break;
      case kLt:
        v = a[l] < b[l];
        break;
      case kLe:
        v = a[l] <= b[l];
        break;
      case kGt:
        v = a[l] > b[l];
        break;
      case kGe:
        v = a[l] >= b[l];
        break;
      case kEqu:
        v = unordered || a[l] == b[l];
        break;
      case kNeu:
        v = unordered || a[l] != b[l];
        break;
      case kLtu:
        v = unordered || a[l] < b[l];
        break;
      case kLeu:
        v = unordered || a[l] <= b[l];
        break;
      case kGtu:
        v = unordered || a[l] > b[l];
        break;
      case kGeu:
        v = unordered || a[l] >= b[l];
        break;
      case kNum:
        v = !unordered;
        break;
      case kNan:
        v = unordered;
        break;
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
    auto combine = [&](u32 x) {
      return (op.immediate & 3) == 1 ? x & third : (op.immediate & 3) == 2 ? x | third : x ^ third;
    };
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
    case kEq:
      return set_predicate<T, kEq>;
    case kNe:
      return set_predicate<T, kNe>;
    case kLt:
      return set_predicate<T, kLt>;
    case kLe:
      return set_predicate<T, kLe>;
    case kGt:
      return set_predicate<T, kGt>;
    case kGe:
      return set_predicate<T, kGe>;
    case kEqu:
      return set_predicate<T, kEqu>;
    case kNeu:
      return set_predicate<T, kNeu>;
    case kLtu:
      return set_predicate<T, kLtu>;
    case kLeu:
      return set_predicate<T, kLeu>;
    case kGtu:
      return set_predicate<T, kGtu>;
    case kGeu:
      return set_predicate<T, kGeu>;
    case kNum:
      return set_predicate<T, kNum>;
    default:
      return set_predicate<T, kNan>;
  }
}

template <int kFunction>  // 0 and, 1 or, 2 xor, 3 not, 4 mov
Step predicate_logic(Context& c, Op const& op) {
  u32 a = c.predicate(op.in[0]), b = op.in[1] == kNone ? 0 : c.predicate(op.in[1]);
  if (op.immediate & 1) a = ~a;
  if (op.immediate & 2) b = ~b;
  c.store_predicate(op.out, kFunction == 0   ? a & b
                            : kFunction == 1 ? a | b
                            : kFunction == 2 ? a ^ b
                            : kFunction == 3 ? ~a
                                             : a);
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

bool decode_setp(Decoder& d, Statement const& s, Op& op) {
  static std::map<std::string, int> const kCompares{
      {"eq", kEq},   {"ne", kNe},   {"lt", kLt},   {"le", kLe},   {"gt", kGt},   {"ge", kGe},
      {"lo", kLt},   {"ls", kLe},   {"hi", kGt},   {"hs", kGe},   {"equ", kEqu}, {"neu", kNeu},
      {"ltu", kLtu}, {"leu", kLeu}, {"gtu", kGtu}, {"geu", kGeu}, {"num", kNum}, {"nan", kNan}};
  Type const t = last_type(s);
  auto const compare = kCompares.find(s.modifiers[1]);
  if (compare == kCompares.end() || t.packed) unsupported(s);
  int const k = compare->second;
  bool const is_signed = t.kind == 's';
  if (t.is('f', 4))
    op.run = pick_compare<float>(k);
  else if (t.is('f', 8))
    op.run = pick_compare<double>(k);
  else if (t.is('f', 2))
    op.run = pick_compare<_Float16>(k);
  else if (!t.integer())
    unsupported(s);
  else if (t.size == 2)
    op.run = is_signed ? pick_compare<i16>(k) : pick_compare<u16>(k);
  else if (t.size == 4)
    op.run = is_signed ? pick_compare<i32>(k) : pick_compare<u32>(k);
  else
    op.run = is_signed ? pick_compare<i64>(k) : pick_compare<u64>(k);
  op.in[0] = d.source(s.operands[1], t.size).offset;
  op.in[1] = d.source(s.operands[2], t.size).offset;
  op.immediate = s.has("and") ? 1 : s.has("or") ? 2 : s.has("xor") ? 3 : 0;
  if (op.immediate) {
    bool negated = false;
    op.in[2] = d.predicate(s.operands[3], &negated).offset;
    op.immediate |= negated ? 4 : 0;
  }
  Operand first = s.operands[0];
  if (!first.parts.empty()) op.out2 = d.destination(first.parts[0]);
  op.out = d.destination(first);
  return true;
}

}  // namespace

bool decode_compare(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  Type const t = last_type(s);
  op.moves_data = true;
  if (b == "setp") {
    kind = Class::kInteger;
    return decode_setp(d, s, op);
  }
  if (t.kind == 'p' && (b == "and" || b == "or" || b == "xor" || b == "not" || b == "mov")) {
    bool negated = false;
    for (size_t i = 1; i < s.operands.size(); ++i) {
      op.in[i - 1] = d.predicate(s.operands[i], &negated).offset;
      if (negated) op.immediate |= 1 << (i - 1);
    }
    kind = Class::kInteger;
    op.out = d.destination(s.operands[0]);
    op.run = b == "and"   ? predicate_logic<0>
             : b == "or"  ? predicate_logic<1>
             : b == "xor" ? predicate_logic<2>
             : b == "not" ? predicate_logic<3>
                          : predicate_logic<4>;
    return true;
  }
  if (b == "selp" && !t.packed) {
    kind = Class::kMove;
    op.run = t.size == 2 ? select<u16> : t.size == 4 ? select<u32> : select<u64>;
    elementwise(d, s, op, 2, t.size);
    bool negated = false;
    op.in[2] = d.predicate(s.operands[3], &negated).offset;
    op.immediate = negated;
    op.selects = s.operands[3].kind == Operand::kRegister;
    for (int i = 0; i < 2; ++i)
      if (s.operands[size_t(i) + 1].kind == Operand::kRegister) op.selected[i] = d.reg(s.operands[size_t(i) + 1]).id;
    return true;
  }
  return false;
}

}  // namespace simulator
