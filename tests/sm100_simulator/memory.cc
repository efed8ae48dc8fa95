// Address checks.
#include "machine.h"

namespace simulator {

void GlobalMemory::add(u64 begin, u64 bytes, bool writable) {
  if (bytes == 0) return;
  ranges_[begin] = {begin + bytes, writable};
  begin_ = 1, end_ = 0;
}
void GlobalMemory::remove(u64 begin) {
  ranges_.erase(begin);
  begin_ = 1, end_ = 0;
}

bool GlobalMemory::contains(u64 address, u64 bytes) const {
  if (address >= begin_ && address + bytes <= end_) return true;
  // Ranges may lie within others: the innermost comes first.
  for (auto after = ranges_.upper_bound(address); after != ranges_.begin(); --after) {
    auto const& [begin, range] = *std::prev(after);
    if (address + bytes > range.end || address + bytes < address) continue;
    begin_ = begin;
    end_ = range.end;
    writable_ = range.writable;
    return true;
  }
  return false;
}

u8* GlobalMemory::check(u64 address, u64 bytes, bool write, char const* what) const {
  if (!contains(address, bytes)) {
    auto after = ranges_.upper_bound(address);
    std::string near = "no allocation below it";
    if (after != ranges_.begin()) {
      auto const& [begin, range] = *std::prev(after);
      near = "the allocation before it has " + std::to_string(range.end - begin) + " bytes and begins " +
             std::to_string(address - begin) + " bytes earlier";
    }
    fail("out_of_bounds", "%s of %llu bytes at %#llx of global memory, outside every allocation (%s)", what,
         (unsigned long long)bytes, (unsigned long long)address, near.c_str());
  }
  if (write && !writable_)
    fail("out_of_bounds", "%s writes what is only to be read (an input, a parameter, a constant) at %#llx", what,
         (unsigned long long)address);
  return reinterpret_cast<u8*>(address);
}

Cta& Cluster::owner(u32 address, u64 bytes, char const* what) {
  u32 const rank = address >> kRankShift, offset = address & kOffsetMask;
  if (rank >= ctas.size())
    fail("out_of_bounds", "%s at shared address %#x: rank %u of a cluster of %zu CTAs", what, address, rank,
         ctas.size());
  Cta& cta = *ctas[rank];
  if (cta.exited) fail("exited", "%s of the shared memory of CTA %u, which has exited", what, rank);
  if (offset < kReservedShared || offset + bytes > cta.shared.size())
    fail("out_of_bounds", "%s of %llu bytes at offset %#x of shared memory, which spans %#x to %#zx", what,
         (unsigned long long)bytes, offset, kReservedShared, cta.shared.size());
  return cta;
}

Mbarrier& Cluster::mbarrier(u32 address) {
  Cta& cta = owner(address, 8, "an mbarrier operation");
  auto found = cta.mbarriers.find(address & kOffsetMask);
  if (found == cta.mbarriers.end())
    fail("mbarrier", "no mbarrier was initialised at offset %#x of CTA %u", address & kOffsetMask,
         address >> kRankShift);
  return *found->second;
}

u32 Cluster::live_warps() const {
  u32 n = 0;
  for (auto const& cta : ctas) n += cta->live_warps;
  return n;
}

u64 read_lane(Context const& c, u32 offset, int size, int lane) {
  switch (size) {
    case 1:
      return c.lanes<u8>(offset)[lane];
    case 2:
      return c.lanes<u16>(offset)[lane];
    case 4:
      return c.lanes<u32>(offset)[lane];
    default:
      return c.lanes<u64>(offset)[lane];
  }
}

std::string describe_agent(Cluster const& cluster, Stamp stamp) {
  return stamp.agent() < cluster.agent_names.size() ? cluster.agent_names[stamp.agent()]
                                                    : "agent " + std::to_string(stamp.agent());
}

}  // namespace simulator
