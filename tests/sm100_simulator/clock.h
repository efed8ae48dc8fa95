// Who has seen what: vector clocks over the agents of a cluster.
//
// An agent is a warp, an mbarrier (it stands for the asynchronous copies that it reports) or a CTA's tensor core. An agent's
// work falls into epochs; it begins a new one when it releases something. `seen[a] >= e` says: everything that agent a did up
// to its epoch e happens before what follows. `fenced` is the same for writes that also passed a proxy fence on their way
// (PTX ISA, "Causality order"), which an asynchronous reader needs.
#pragma once
#include <algorithm>
#include <vector>

#include "base.h"

namespace simulator {

struct Clock {
  std::vector<u32> seen, fenced;

  void resize(size_t agents) {
    seen.assign(agents, 0);
    fenced.assign(agents, 0);
  }
  void join(Clock const& other) {
    u32 *a = seen.data(), *b = fenced.data();
    u32 const *c = other.seen.data(), *d = other.fenced.data();
    for (size_t i = 0; i < seen.size(); ++i) {
      a[i] = std::max(a[i], c[i]);
      b[i] = std::max(b[i], d[i]);
    }
  }
};

// An access in 32 bits: the agent and its epoch. 0: none.
struct Stamp {
  u32 bits = 0;
  static constexpr int kEpochBits = 22;
  static constexpr u32 kMaxAgents = 1u << (32 - kEpochBits);

  Stamp() = default;
  Stamp(u32 agent, u32 epoch) : bits(agent << kEpochBits | epoch) {
    if (epoch >> kEpochBits) fail("launch", "more than %d synchronisations by one agent: the kernel is too long for the race check", 1 << kEpochBits);
  }
  explicit operator bool() const { return bits != 0; }
  u32 agent() const { return bits >> kEpochBits; }
  u32 epoch() const { return bits & ((1u << kEpochBits) - 1); }
  bool before(Clock const& clock) const { return clock.seen[agent()] >= epoch(); }
  bool fenced_before(Clock const& clock) const { return clock.fenced[agent()] >= epoch(); }
};

}  // namespace simulator
