// Barriers in shared memory. PTX ISA, "mbarrier".
#include "machine.h"

namespace simulator {
namespace {

constexpr i64 kMaxCount = (1 << 20) - 1;

void finish_phase(Machine& m, Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  ++b.completed;
  b.pending = b.expected;
  b.gathering.seen[b.agent] = b.first_epoch + u32(b.completed);
  b.done = b.gathering;
  ++m.progress;
}

}  // namespace

void mbarrier_arrive(Machine& m, Mbarrier& b, u32 count) {
  ++m.progress;
  if (b.pending < count)
    fail("mbarrier", "over-arrival: %u arrivals at the mbarrier at %#x, whose phase %llu waits for %u more", count,
         b.address, (unsigned long long)b.completed, b.pending);
  b.pending -= count;
  finish_phase(m, b);
}

// Positive: bytes have arrived. Negative: more are expected.
void mbarrier_complete_bytes(Machine& m, Mbarrier& b, i64 bytes) {
  ++m.progress;
  b.bytes -= bytes;
  if (b.bytes > kMaxCount || b.bytes < -kMaxCount)
    fail("mbarrier", "the transaction count of the mbarrier at %#x leaves its range: %lld", b.address,
         (long long)b.bytes);
  if (bytes > 0) finish_phase(m, b);
}

Mbarrier& usable_mbarrier(Context& c, u32 address) {
  Mbarrier& b = c.cluster.mbarrier(address);
  if (!b.initialised.before(c.warp.clock))
    fail("mbarrier", "the mbarrier at %#x is used, and no barrier orders its initialisation before", address);
  return b;
}

bool mbarrier_poll(Context& c, Mbarrier& b, u32 parity) {
  Warp& w = c.warp;
  if (parity > 1) fail("mbarrier", "parity %u of a wait on the mbarrier at %#x", parity, b.address);
  u32 const key = b.address | parity;  // addresses are multiples of 8
  if ((b.completed & 1) != parity) {
    w.clock.join(b.done);
    w.waits_on = 0;
    return true;
  }
  if (w.waits_on != key || w.waits_at != c.group->pc) {
    w.waits_on = key;
    w.waits_at = c.group->pc;
    w.waits_since = b.completed;
  } else if (b.completed >= w.waits_since + 2) {
    fail("mbarrier",
         "two phases of the mbarrier at %#x passed while a warp waited for the first of them: parity cannot tell them "
         "apart",
         b.address);
  }
  return false;
}

}  // namespace simulator
