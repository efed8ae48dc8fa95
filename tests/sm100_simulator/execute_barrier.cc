// Named barriers, cluster barriers, mbarriers and fences. PTX ISA, "Parallel Synchronization and Communication
// Instructions".
#include "types.h"

namespace simulator {
namespace {

void release(Warp& w, Clock& into) {
  into.join(w.clock);
  w.next_epoch();
}

// The next to meet there are ordered by what they bring, not by those who met before.
void complete(Cta const& cta, NamedBarrier& b) {
  b.arrived = 0;
  b.result = b.votes;
  b.done = b.gathering;
  if (b.needed == 0) b.done.join(cta.departed);  // at a barrier of all, a warp that has left counts as arrived
  b.gathering.resize(b.done.seen.size());
  ++b.generation;
}

// ---- bar, barrier. numbers: 0 sync 1 arrive 2 red, 0 popc 1 and 2 or; in: barrier, threads, predicate

Step named_barrier(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  int const mode = int(op.immediate & 3), vote = int(op.immediate >> 2 & 3);
  u32 const id = c.uniform<u32>(op.in[0], "a barrier's number");
  u32 const threads = op.in[1] == kNone ? 0 : c.uniform<u32>(op.in[1], "a barrier's thread count");
  if (id > 15) fail("barrier", "barrier %u: there are 16", id);
  if (threads % kLanes) fail("barrier", "barrier %u of %u threads: a multiple of 32 is needed", id, threads);
  NamedBarrier& b = c.cta.barriers[id];
  Warp& w = c.warp;
  if (w.bar_generation < 0) {
    auto const named = [&](u32 n) { return n ? n : u32(c.cta.warps.size()) * kLanes; };
    if (b.arrived && named(b.needed) != named(threads))
      fail("barrier", "barrier %u of %u threads, which others use with %u (0: all of the CTA)", id, threads, b.needed);
    if (b.arrived == 0) {
      b.needed = threads;
      b.votes = vote == 1 ? kAllLanes : 0;
    }
    b.arrived += kLanes;
    if (mode == 2) {
      u32 p = c.predicate(op.in[2]);
      if (op.immediate & 16) p = ~p;
      p &= c.mask;
      if (vote == 0)
        b.votes += u32(__builtin_popcount(p));
      else if (vote == 1)
        b.votes = b.votes && p == c.mask ? kAllLanes : 0;
      else
        b.votes = b.votes || p ? kAllLanes : 0;
    }
    w.bar_generation = b.generation;
    release(w, b.gathering);
    ++c.machine.progress;
    u32 const needed = threads ? threads : c.cta.live_warps * kLanes;
    if (b.arrived > needed) fail("barrier", "%u threads at barrier %u, which expects %u", b.arrived, id, needed);
    if (b.arrived == needed) complete(c.cta, b);
  }
  if (mode == 1) {
    w.bar_generation = -1;
    return Step::kNext;
  }
  if (b.generation == w.bar_generation) return Step::kBlocked;
  w.bar_generation = -1;
  w.clock.join(b.done);
  if (mode == 2) {
    if (vote == 0) {
      u32 r[kLanes];
      for (u32& v : r) v = b.result;
      c.store(op.out, r);
    } else {
      c.store_predicate(op.out, b.result);
    }
  }
  return Step::kNext;
}

// ---- barrier.cluster

Step cluster_arrive(Context& c, Op const& op) {  // immediate: relaxed
  if (!c.converged()) return Step::kBlocked;
  Warp& w = c.warp;
  if (w.cluster_arrived >= 0) fail("barrier", "barrier.cluster.arrive twice without a wait");
  w.cluster_arrived = c.cluster.generation;
  if (op.immediate && !c.machine.settings.allow_relaxed_release) {
    c.cluster.gathering.join(w.fence);
  } else {
    release(w, c.cluster.gathering);
  }
  ++c.cluster.arrived;
  ++c.machine.progress;
  finish_cluster_barrier(c.cluster);
  return Step::kNext;
}

Step cluster_wait(Context& c, Op const&) {
  if (!c.converged()) return Step::kBlocked;
  Warp& w = c.warp;
  if (w.cluster_arrived < 0) fail("barrier", "barrier.cluster.wait without an arrive");
  if (c.cluster.generation == w.cluster_arrived) return Step::kBlocked;
  w.cluster_arrived = -1;
  w.clock.join(c.cluster.done);
  return Step::kNext;
}

// ---- mbarrier. in[0] is the address, op.out2 its size, immediate the displacement

u32 address(Context const& c, Op const& op, int lane) {
  return u32(read_lane(c, op.in[0], int(op.out2), lane)) + u32(op.immediate);
}
u32 first_address(Context const& c, Op const& op) {
  u32 const a = address(c, op, c.first_lane());
  for (int l = 0; l < kLanes; ++l)
    if (c.mask >> l & 1 && address(c, op, l) != a)
      fail("unsupported", "the lanes of a warp use different mbarriers in one instruction");
  return a;
}

void initialise_one(Context& c, u32 a, i64 count) {
  Cta& cta = c.cluster.owner(a, 8, "mbarrier.init");
  if (&cta != &c.cta) fail("mbarrier", "mbarrier.init in another CTA's shared memory");
  if (a & 7) fail("misaligned", "an mbarrier at %#x", a);
  if (count < 1 || count >= 1 << 20)
    fail("mbarrier", "mbarrier.init with a count of %lld: 1 to 2^20 - 1", (long long)count);
  auto& slot = cta.mbarriers[a & kOffsetMask];
  if (slot) fail("mbarrier", "mbarrier.init of the live mbarrier at %#x: mbarrier.inval first", a);
  cta.shadow.write(c.cluster, c.warp, cta.rank, a & kOffsetMask, 8);
  cta.shadow.set_mbarrier(a & kOffsetMask, true);
  slot = std::make_unique<Mbarrier>();
  slot->address = a;
  slot->expected = slot->pending = u32(count);
  if (auto& unused = c.cluster.free_agents; !unused.empty()) {
    std::tie(slot->agent, slot->first_epoch) = unused.back();
    unused.pop_back();
  } else if (c.cluster.next_agent < c.cluster.agents) {
    slot->agent = c.cluster.next_agent++;
  } else {
    fail("launch", "more mbarriers in a cluster than the race check has room for");
  }
  char name[64];
  snprintf(name, sizeof name, "the copies that mbarrier %#x reports", a);
  c.cluster.agent_names[slot->agent] = name;
  slot->gathering.resize(c.cluster.agents);
  slot->done.resize(c.cluster.agents);
  slot->initialised = c.warp.stamp();
  ++c.machine.progress;
}
Step initialise(Context& c, Op const& op) {
  for (int l = 0; l < kLanes; ++l)
    if (c.mask >> l & 1) initialise_one(c, address(c, op, l), c.lanes<u32>(op.in[1])[l]);
  return Step::kNext;
}

Step invalidate(Context& c, Op const& op) {
  u32 const a = first_address(c, op);
  Mbarrier const& b = usable_mbarrier(c, a);
  c.cluster.free_agents.push_back({b.agent, b.first_epoch + u32(b.completed) + 1});
  Cta& cta = c.cluster.owner(a, 8, "mbarrier.inval");
  cta.mbarriers.erase(a & kOffsetMask);
  cta.shadow.set_mbarrier(a & kOffsetMask, false);
  return Step::kNext;
}

// in[1]: the count, or the bytes where it expects them
template <bool kExpects, bool kArrives, bool kDrops>
Step arrive(Context& c, Op const& op) {
  u64 state[kLanes] = {};
  Mbarrier* released = nullptr;
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    Mbarrier& b = usable_mbarrier(c, address(c, op, l));
    state[l] = b.completed;
    u32 const value = op.in[1] == kNone ? 1 : c.lanes<u32>(op.in[1])[l];
    if (kExpects) mbarrier_complete_bytes(c.machine, b, -i64(value));
    if (kDrops) {
      if (b.expected < 2) fail("mbarrier", "mbarrier.arrive_drop leaves no arrivals to expect");
      --b.expected;
    }
    if (kArrives) {
      if (released != &b) b.gathering.join(c.warp.clock);
      released = &b;
      mbarrier_arrive(c.machine, b, kExpects ? 1 : value);
    }
  }
  if (released) c.warp.next_epoch();
  if (op.out != kNone) c.store(op.out, state);
  return Step::kNext;
}

Step complete_bytes(Context& c, Op const& op) {
  Mbarrier& b = usable_mbarrier(c, first_address(c, op));
  mbarrier_complete_bytes(c.machine, b, c.lanes<u32>(op.in[1])[c.first_lane()]);
  return Step::kNext;
}

template <bool kBlocks, bool kParity>
Step wait(Context& c, Op const& op) {
  Mbarrier& b = usable_mbarrier(c, first_address(c, op));
  if (b.address >> kRankShift != c.cta.rank) fail("mbarrier", "a wait on another CTA's mbarrier");
  bool done;
  if (kParity) {
    done = mbarrier_poll(c, b, c.uniform<u32>(op.in[1], "a parity"));
  } else {
    u64 const state = c.uniform<u64>(op.in[1], "an mbarrier's state");
    done = b.completed > state;
    if (done) c.warp.clock.join(b.done);
  }
  if (!done && kBlocks && !c.warp.timed_out && !(c.machine.settings.adversarial && c.machine.random() % 8 == 0)) {
    c.warp.waits_on = b.address | (kParity ? c.lanes<u32>(op.in[1])[c.first_lane()] : 0);
    return Step::kBlocked;
  }
  c.warp.timed_out = false;
  c.store_predicate(op.out, done ? kAllLanes : 0);
  return done ? Step::kNext : Step::kYield;
}

Step pending_count(Context& c, Op const&) {
  fail("unsupported", "mbarrier.pending_count on %s", c.machine.launch->program->kernel->name.c_str());
}

// ---- fences

Step fence_proxy(Context& c, Op const&) {
  Warp& w = c.warp;
  w.clock.fenced = w.clock.seen;
  w.next_epoch();
  return Step::kNext;
}
Step fence_threads(Context& c, Op const&) {
  c.warp.clock.join(c.warp.observed);
  c.warp.fence = c.warp.clock;
  c.warp.next_epoch();
  return Step::kNext;
}
Step fence_tensor_map(Context& c, Op const& op) {
  c.warp.acquired_maps[read_lane(c, op.in[0], 8, c.first_lane()) + u64(op.immediate)] = ++c.machine.map_time;
  return Step::kNext;
}

void decode_mbarrier(Decoder& d, Statement const& s, Op& op) {
  std::string const& what = s.modifiers[1];
  size_t at = 0;  // the operand that is the address
  while (at < s.operands.size() && !s.operands[at].memory) ++at;
  if (at == s.operands.size()) unsupported(s);
  Value const a = d.address(s.operands[at]);
  op.in[0] = a.offset;
  op.out2 = u32(a.size);
  op.immediate = s.operands[at].offset;
  bool const more = at + 1 < s.operands.size();
  if (what == "init") {
    op.in[1] = d.source(s.operands[at + 1], 4).offset;
    op.run = initialise;
  } else if (what == "inval") {
    op.run = invalidate;
  } else if (what == "expect_tx" || what == "complete_tx") {
    op.in[1] = d.source(s.operands[at + 1], 4).offset;
    op.run = what == "expect_tx" ? arrive<true, false, false> : complete_bytes;
  } else if (what == "arrive" || what == "arrive_drop") {
    bool const drops = what == "arrive_drop", expects = s.has("expect_tx");
    if (s.has("noComplete")) unsupported(s);
    if (more) op.in[1] = d.source(s.operands[at + 1], 4).offset;
    if (at == 1) op.out = d.destination(s.operands[0]);
    op.run = drops ? (expects ? arrive<true, true, true> : arrive<false, true, true>)
                   : (expects ? arrive<true, true, false> : arrive<false, true, false>);
  } else if (what == "test_wait" || what == "try_wait") {
    bool const blocks = what == "try_wait", parity = s.has("parity");
    op.in[1] = d.source(s.operands[at + 1], parity ? 4 : 8).offset;
    op.out = d.destination(s.operands[0]);
    op.run =
        blocks ? (parity ? wait<true, true> : wait<true, false>) : (parity ? wait<false, true> : wait<false, false>);
  } else if (what == "pending_count") {
    op.run = pending_count;
  } else {
    unsupported(s);
  }
}

}  // namespace

void acquire_flag(Cta& cta, Warp& w, u32 offset, bool acquires) {
  auto const found = cta.flags.find(offset / 4);
  if (found != cta.flags.end()) (acquires ? w.clock : w.observed).join(found->second);
}
void release_flag(Cta& cta, Warp& w, u32 offset, bool releases) {
  if (!releases && !w.fence.seen[w.agent]) return;  // no fence as yet
  Clock& flag = cta.flags[offset / 4];
  if (flag.seen.empty()) flag.resize(w.clock.seen.size());
  flag.join(releases ? w.clock : w.fence);
}

void finish_cluster_barrier(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived != cluster.live_warps()) return;
  cluster.arrived = 0;
  ++cluster.generation;
  cluster.done = cluster.gathering;
  for (auto const& cta : cluster.ctas) cluster.done.join(cta->departed);
}

// After a warp has left: barriers of all threads may now be complete.
void finish_named_barriers(Cta& cta) {
  for (NamedBarrier& b : cta.barriers) {
    if (b.arrived == 0 || b.needed != 0 || b.arrived != cta.live_warps * kLanes) continue;
    complete(cta, b);
  }
}

bool decode_barrier(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  kind = Class::kBarrier;
  if (b == "barrier" && s.has("cluster")) {
    bool const arrives = s.has("arrive");
    op.run = arrives ? cluster_arrive : cluster_wait;
    op.immediate = s.has("relaxed");
    return true;
  }
  if ((b == "bar" || b == "barrier") && !s.has("warp")) {
    bool const red = s.has("red"), arrives = s.has("arrive");
    int const vote = s.has("and") ? 1 : s.has("or") ? 2 : 0;
    op.immediate = (red ? 2 : arrives ? 1 : 0) | vote << 2;
    size_t const first = red ? 1 : 0, count = s.operands.size() - first - red;
    op.in[0] = d.source(s.operands[first], 4).offset;
    if (count > 1) op.in[1] = d.source(s.operands[first + 1], 4).offset;
    if (red) {
      bool negated = false;
      op.in[2] = d.predicate(s.operands.back(), &negated).offset;
      op.immediate |= negated ? 16 : 0;
      op.out = d.destination(s.operands[0]);
    }
    op.run = named_barrier;
    return true;
  }
  if (b == "mbarrier") {
    decode_mbarrier(d, s, op);
    return true;
  }
  if (b == "fence" || b == "membar") {
    if (s.has("tensormap::generic")) {
      if (s.has("acquire")) {
        Value const a = d.address(s.operands[0]);
        op.in[0] = a.offset;
        op.immediate = s.operands[0].offset;
        op.run = fence_tensor_map;
      } else {
        op.run = nothing;
      }
    } else if (s.has("proxy") && (s.has("async") || s.has("async::generic"))) {
      op.run = fence_proxy;
    } else {
      // async.shared::cta and the like are one modifier by dots, and several by name
      op.run = s.opcode.find("proxy.async") != std::string::npos ? fence_proxy
               : s.has("proxy")                                  ? nothing
                                                                 : fence_threads;
    }
    return true;
  }
  return false;
}

}  // namespace simulator
