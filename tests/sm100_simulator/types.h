// The types that opcodes name, and the lane loops that handlers are made of.
#pragma once
#include <string>

#include "machine.h"

namespace simulator {

// "f32" -> 'f', 4. Kinds: u, s, b, f, p (predicate) and h (bf16).
struct Type {
  char kind = 0;
  int size = 0;
  bool packed = false;  // x2: two in a register of `size` bytes
  bool is(char k, int s) const { return kind == k && size == s && !packed; }
  bool integer() const { return kind == 'u' || kind == 's' || kind == 'b'; }
};

inline Type parse_type(std::string const& name) {
  Type t;
  if (name == "pred") return {'p', 0, false};
  std::string n = name;
  if (n.size() > 2 && n.compare(n.size() - 2, 2, "x2") == 0) {
    t.packed = true;
    n = n.substr(0, n.size() - 2);
  }
  if (n == "bf16") {
    t.kind = 'h';
    t.size = 2;
  } else if (n.size() >= 2 && (n[0] == 'u' || n[0] == 's' || n[0] == 'b' || n[0] == 'f') &&
             n.find_first_not_of("0123456789", 1) == std::string::npos) {
    t.kind = n[0];
    t.size = atoi(n.c_str() + 1) / 8;
  } else {
    return {};
  }
  if (t.packed) t.size *= 2;
  return t;
}

// The last modifier that is a type.
inline Type last_type(Statement const& s) {
  for (size_t i = s.modifiers.size(); i-- > 1;)
    if (Type const t = parse_type(s.modifiers[i]); t.kind) return t;
  return {};
}

// A result and `sources` operands, all of `size` bytes a lane.
inline bool elementwise(Decoder& d, Statement const& s, Op& op, int sources, int size) {
  op.out = d.destination(s.operands[0], size);
  for (int i = 0; i < sources; ++i) op.in[i] = d.source(s.operands[i + 1], size).offset;
  return true;
}

inline Step nothing(Context&, Op const&) { return Step::kNext; }

template <class T, T (*F)(T)>
Step unary(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = F(a[l]);
  c.store(op.out, r);
  return Step::kNext;
}
template <class T, T (*F)(T, T)>
Step binary(Context& c, Op const& op) {
  T const *a = c.lanes<T>(op.in[0]), *b = c.lanes<T>(op.in[1]);
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = F(a[l], b[l]);
  c.store(op.out, r);
  return Step::kNext;
}
template <class T, T (*F)(T, T, T)>
Step ternary(Context& c, Op const& op) {
  T const *a = c.lanes<T>(op.in[0]), *b = c.lanes<T>(op.in[1]), *d = c.lanes<T>(op.in[2]);
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = F(a[l], b[l], d[l]);
  c.store(op.out, r);
  return Step::kNext;
}

}  // namespace simulator
