// atom and red. PTX ISA, "Parallel Synchronization and Communication Instructions".
#include "numbers.h"
#include "types.h"

namespace simulator {
namespace {

enum Function { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCompareSwap, kInc, kDec };

template <class T>
T combine_integer(Function f, T old, T a, T b) {
  switch (f) {
    case kAdd:
      return T(old + a);
    case kMin:
      return std::min(old, a);
    case kMax:
      return std::max(old, a);
    case kAnd:
      return T(old & a);
    case kOr:
      return T(old | a);
    case kXor:
      return T(old ^ a);
    case kExchange:
      return a;
    case kCompareSwap:
      return old == a ? b : old;
    case kInc:
      return old >= a ? T(0) : T(old + 1);
    case kDec:
      return old == 0 || old > a ? a : T(old - 1);
  }
  return old;
}

u64 combine(Type t, Function f, u64 old, u64 a, u64 b) {
  if (t.kind == 'f' && !t.packed && f == kAdd) {
    if (t.size == 4) return bit_cast<u32>(bit_cast<float>(u32(old)) + bit_cast<float>(u32(a)));
    if (t.size == 8) return bit_cast<u64>(bit_cast<double>(old) + bit_cast<double>(a));
    return float_to_f16(f16_to_float(u16(old)) + f16_to_float(u16(a)));
  }
  if ((t.kind == 'f' || t.kind == 'h') && t.size <= 4) {  // narrow, one or two
    u64 r = 0;
    for (int i = 0; i < t.size / 2; ++i) {
      u16 const x = u16(old >> 16 * i), y = u16(a >> 16 * i);
      u16 const sum = t.kind == 'h' ? float_to_bf16(bf16_to_float(x) + bf16_to_float(y))
                                    : float_to_f16(f16_to_float(x) + f16_to_float(y));
      r |= u64(sum) << 16 * i;
    }
    return r;
  }
  bool const is_signed = t.kind == 's';
  switch (t.size) {
    case 2:
      return combine_integer<u16>(f, u16(old), u16(a), u16(b));
    case 4:
      return is_signed ? u32(combine_integer<i32>(f, i32(old), i32(a), i32(b)))
                       : combine_integer<u32>(f, u32(old), u32(a), u32(b));
    default:
      return is_signed ? u64(combine_integer<i64>(f, i64(old), i64(a), i64(b))) : combine_integer<u64>(f, old, a, b);
  }
}

// numbers: type kind | size << 8 | packed << 16, function | vector << 8, space, 1 acquires, 2 releases. values: data
// per element, second operand, results, displacement, address
Step atomic(Context& c, Op const& op) {
  Details const& d = details(c, op);
  Type const t{char(d.numbers[0] & 255), int(d.numbers[0] >> 8 & 255), bool(d.numbers[0] >> 16)};
  Function const f = Function(d.numbers[1] & 255);
  int const count = int(d.numbers[1] >> 8), bytes = t.size * count;
  bool const acquires = d.numbers[3] & 1, releases = d.numbers[3] & 2;
  Value const& address_value = d.values.back();
  i64 const displacement = i32(d.values[d.values.size() - 2].offset);
  bool changed = false;
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    u64 const address = read_lane(c, address_value.offset, address_value.size, l) + u64(displacement);
    if (address & (bytes - 1)) fail("misaligned", "an atomic of %d bytes at %#llx", bytes, (unsigned long long)address);
    bool const shared = d.numbers[2] == 1 || (d.numbers[2] == 2 && address & kSharedTag);
    u8* p;
    Cta* owner = nullptr;
    if (shared) {
      Cta& cta = c.cluster.owner(u32(address), u32(bytes), "an atomic");
      p = &cta.shared[u32(address) & kOffsetMask];
      cta.shadow.read(c.cluster, c.warp, cta.rank, u32(address) & kOffsetMask, u32(bytes));
      cta.shadow.forget_writer(u32(address) & kOffsetMask, u32(bytes));
      owner = &cta;
      acquire_flag(cta, c.warp, u32(address) & kOffsetMask, acquires);
    } else {
      p = c.machine.memory.check(address, u64(bytes), true, "an atomic");
    }
    for (int i = 0; i < count; ++i) {
      u64 old = 0;
      memcpy(&old, p + i * t.size, t.size);
      u64 const a = read_lane(c, d.values[i].offset, d.values[i].size, l);
      u64 const b = f == kCompareSwap ? read_lane(c, d.values[count].offset, d.values[count].size, l) : 0;
      u64 const result = combine(t, f, old, a, b);
      changed |= memcmp(p + i * t.size, &result, t.size) != 0;
      memcpy(p + i * t.size, &result, t.size);
      Value const& out = d.values[count + 1 + i];
      if (out.size) memcpy(c.warp.file + out.offset + l * out.size, &old, out.size);
    }
    if (owner) release_flag(*owner, c.warp, u32(address) & kOffsetMask, releases);
  }
  c.machine.progress += changed;  // else it may be a poll
  if (releases) c.warp.next_epoch();
  return Step::kNext;
}

}  // namespace

bool decode_atomic(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  if ((b != "atom" && b != "red") || s.has("async")) return false;
  kind = Class::kMemory;
  static std::map<std::string, Function> const kFunctions{
      {"add", kAdd}, {"min", kMin},       {"max", kMax},         {"and", kAnd}, {"or", kOr},
      {"xor", kXor}, {"exch", kExchange}, {"cas", kCompareSwap}, {"inc", kInc}, {"dec", kDec}};
  Function f{};
  bool known = false;
  for (std::string const& m : s.modifiers)
    if (auto const found = kFunctions.find(m); found != kFunctions.end()) {
      f = found->second;
      known = true;
    }
  Type const t = last_type(s);
  bool const is_float = t.kind == 'f' || t.kind == 'h';
  if (!known || !t.kind || t.size > 8 || (is_float && f != kAdd)) unsupported(s);
  int const count = s.has("v8") ? 8 : s.has("v4") ? 4 : s.has("v2") ? 2 : 1;
  bool const returns = b == "atom";
  Operand const& memory = s.operands[returns ? 1 : 0];
  Details x;
  x.numbers[0] = u64(t.kind) | u64(t.size) << 8 | u64(t.packed) << 16;
  x.numbers[1] = u64(f) | u64(count) << 8;
  x.numbers[2] = s.has("shared") || s.has("shared::cta") || s.has("shared::cluster") ? 1 : s.has("global") ? 0 : 2;
  x.numbers[3] = (s.has("acquire") ? 1 : s.has("release") ? 2 : s.has("acq_rel") ? 3 : 0);
  auto list = [&](Operand const& o) { return o.kind == Operand::kVector ? o.parts : std::vector<Operand>{o}; };
  for (Operand const& o : list(s.operands[returns ? 2 : 1])) x.values.push_back(d.source(o, t.size));
  x.values.push_back(f == kCompareSwap ? d.source(s.operands[3], t.size) : Value{});
  for (int i = 0; i < count; ++i) {
    Value out;
    if (returns) {
      Operand const o = list(s.operands[0])[i];
      if (o.kind == Operand::kRegister) {
        out = d.reg(o);
        d.writes(out);
      }
    }
    x.values.push_back(out);
  }
  x.values.push_back({u32(i32(memory.offset)), 0, 0});
  x.values.push_back(d.address(memory));
  op.run = atomic;
  op.immediate = d.detail(x);
  return true;
}

}  // namespace simulator
