// Exchanges between the lanes of a warp: shfl, vote, match, redux, elect, bar.warp.sync. Each waits until the lanes
// that it names have come together.
#include "numbers.h"
#include "types.h"

namespace simulator {
namespace {

// Runs a handler once those lanes that its mask operand names have come together or exited. Lanes with different masks
// form sets of their own.
template <Handler kRun, int kSlot>
Step together(Context& c, Op const& op) {
  u32 const* masks = c.lanes<u32>(op.in[kSlot]);
  u32 sets[kLanes];
  int count = 0;
  for (u32 rest = c.mask; rest;) {
    u32 const members = masks[__builtin_ctz(rest)];
    u32 set = 0;
    for (int l = 0; l < kLanes; ++l) set |= u32(rest >> l & 1 && masks[l] == members) << l;
    if (set & ~members)
      fail("divergence", "a lane executes a warp-wide instruction whose mask %#x leaves it out", members);
    if (((set | c.warp.exited) & members) != members) return Step::kBlocked;
    sets[count++] = set;
    rest &= ~set;
  }
  Context part = c;
  for (int i = 0; i < count; ++i) {
    part.mask = sets[i];
    kRun(part, op);
  }
  return Step::kNext;
}

// in: value, lane, clamp and segment, members. immediate: the mode
Step shuffle(Context& c, Op const& op) {
  u32 const *a = c.lanes<u32>(op.in[0]), *b = c.lanes<u32>(op.in[1]), *w = c.lanes<u32>(op.in[2]);
  u32 r[kLanes] = {}, in_range = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    int const clamp = w[l] & 31, segment = w[l] >> 8 & 31, lane = int(b[l] & 31);
    int const top = (l & segment) | (clamp & ~segment), bottom = l & segment;
    int j;
    bool valid;
    switch (op.immediate) {
      case 0:
        j = l - lane;
        valid = j >= top;
        break;  // up
      case 1:
        j = l + lane;
        valid = j <= top;
        break;  // down
      case 2:
        j = l ^ lane;
        valid = j <= top;
        break;  // bfly
      default:
        j = bottom | (lane & ~segment);
        valid = j <= top;
        break;
    }
    if (!valid) j = l;
    in_range |= u32(valid) << l;
    if (!(c.mask >> j & 1)) fail("divergence", "shfl reads lane %d, which takes no part", j);
    r[l] = a[j];
  }
  c.store(op.out, r);
  if (op.out2 != kNone) c.store_predicate(op.out2, in_range);
  return Step::kNext;
}

Step vote(Context& c, Op const& op) {  // immediate: 0 ballot, 1 any, 2 all, 3 uni; 4: negated
  u32 p = c.predicate(op.in[0]);
  if (op.immediate & 4) p = ~p;
  p &= c.mask;
  int const mode = op.immediate & 3;
  if (mode == 0) {
    u32 r[kLanes];
    for (u32& v : r) v = p;
    c.store(op.out, r);
  } else {
    bool const v = mode == 1 ? p != 0 : mode == 2 ? p == c.mask : p == 0 || p == c.mask;
    c.store_predicate(op.out, v ? kAllLanes : 0);
  }
  return Step::kNext;
}

template <class T, bool kAllSame>
Step match(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  u32 r[kLanes] = {};
  for (int l = 0; l < kLanes; ++l)
    for (int j = 0; j < kLanes; ++j)
      if (c.mask >> j & 1 && a[l] == a[j]) r[l] |= 1u << j;
  if (kAllSame) {
    bool const same = r[c.first_lane()] == c.mask;
    for (u32& v : r) v = same ? c.mask : 0;
    if (op.out2 != kNone) c.store_predicate(op.out2, same ? kAllLanes : 0);
  }
  c.store(op.out, r);
  return Step::kNext;
}

enum Reduction { kAdd, kAnd, kOr, kXor, kMinU, kMaxU, kMinS, kMaxS, kMinF, kMaxF };

Step reduce(Context& c, Op const& op) {  // immediate: the function, 16 absolute values, 32 NaN wins
  u32 const* a = c.lanes<u32>(op.in[0]);
  int const f = op.immediate & 15;
  u32 r = 0;
  bool first = true, nan = false, any_number = false;
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    u32 v = a[l];
    if (f >= kMinF) {
      if (op.immediate & 16) v &= 0x7fffffff;
      float const x = bit_cast<float>(v);
      if (x != x) {
        nan = true;
        continue;
      }
      any_number = true;
      float const y = bit_cast<float>(r);
      bool const less = x < y || (x == y && std::signbit(x) && !std::signbit(y));
      if (first || (f == kMinF ? less : x > y || (x == y && std::signbit(y) && !std::signbit(x)))) r = v;
    } else {
      r = first        ? v
          : f == kAdd  ? r + v
          : f == kAnd  ? r & v
          : f == kOr   ? r | v
          : f == kXor  ? r ^ v
          : f == kMinU ? std::min(r, v)
          : f == kMaxU ? std::max(r, v)
          : f == kMinS ? u32(std::min(i32(r), i32(v)))
                       : u32(std::max(i32(r), i32(v)));
    }
    first = false;
  }
  if (nan && (op.immediate & 32 || !any_number)) r = 0x7fffffff;
  u32 out[kLanes];
  for (u32& v : out) v = r;
  c.store(op.out, out);
  return Step::kNext;
}

Step elect(Context& c, Op const& op) {
  u32 const leader = u32(c.first_lane());
  u32 r[kLanes];
  for (u32& v : r) v = leader;
  if (op.out != kNone) c.store(op.out, r);
  if (op.out2 != kNone) c.store_predicate(op.out2, 1u << leader);
  return Step::kNext;
}

Step active_mask(Context& c, Op const& op) {
  u32 r[kLanes];
  for (u32& v : r) v = c.mask;
  c.store(op.out, r);
  return Step::kNext;
}

Step warp_sync(Context&, Op const&) { return Step::kNext; }

}  // namespace

bool decode_lanes(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  kind = Class::kShuffle;
  auto results = [&](int size) {
    Operand first = s.operands[0];
    if (!first.parts.empty()) op.out2 = d.destination(first.parts[0]);
    op.out = d.destination(first, size);
  };
  if (b == "shfl") {
    if (!s.has("sync")) unsupported(s);
    op.immediate = s.has("up") ? 0 : s.has("down") ? 1 : s.has("bfly") ? 2 : 3;
    for (int i = 0; i < 4; ++i) op.in[i] = d.source(s.operands[i + 1], 4).offset;
    results(4);
    op.run = together<shuffle, 3>;
    return true;
  }
  if (b == "vote") {
    bool negated = false;
    op.immediate = s.has("any") ? 1 : s.has("all") ? 2 : s.has("uni") ? 3 : 0;
    op.in[0] = d.predicate(s.operands[1], &negated).offset;
    op.immediate |= negated ? 4 : 0;
    op.in[1] = d.source(s.operands[2], 4).offset;
    op.out = d.destination(s.operands[0]);
    op.run = together<vote, 1>;
    return true;
  }
  if (b == "match") {
    Type const t = last_type(s);
    bool const all = s.has("all");
    op.run = t.size == 8 ? (all ? together<match<u64, true>, 1> : together<match<u64, false>, 1>)
                         : (all ? together<match<u32, true>, 1> : together<match<u32, false>, 1>);
    op.in[0] = d.source(s.operands[1], t.size).offset;
    op.in[1] = d.source(s.operands[2], 4).offset;
    results(4);
    return true;
  }
  if (b == "redux") {
    Type const t = last_type(s);
    bool const max = s.has("max");
    int f = s.has("add") ? kAdd : s.has("and") ? kAnd : s.has("or") ? kOr : s.has("xor") ? kXor : -1;
    if (f < 0)
      f = t.kind == 'f' ? (max ? kMaxF : kMinF) : t.kind == 's' ? (max ? kMaxS : kMinS) : (max ? kMaxU : kMinU);
    if (t.size != 4) unsupported(s);
    op.immediate = f | (s.has("abs") ? 16 : 0) | (s.has("NaN") ? 32 : 0);
    op.in[0] = d.source(s.operands[1], 4).offset;
    op.in[1] = d.source(s.operands[2], 4).offset;
    op.out = d.destination(s.operands[0], 4);
    op.run = together<reduce, 1>;
    return true;
  }
  if (b == "elect") {
    op.in[0] = d.source(s.operands[1], 4).offset;
    results(-1);
    op.run = together<elect, 0>;
    return true;
  }
  if (b == "activemask") {
    op.out = d.destination(s.operands[0], 4);
    op.run = active_mask;
    return true;
  }
  if (b == "bar" && s.has("warp")) {
    op.in[0] = d.source(s.operands[0], 4).offset;
    op.run = together<warp_sync, 0>;
    return true;
  }
  return false;
}

}  // namespace simulator
