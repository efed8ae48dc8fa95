#include "shadow.h"

#include "machine.h"

namespace simulator {
namespace {

char const* const kRaceHint = "nothing orders the two (a barrier, or a wait on the mbarrier that reports it)";

u32 byte_mask(u32 offset, u32 bytes, u32 word) {
  u32 const first = word * 4 < offset ? offset & 3 : 0;
  u32 const last = std::min(word * 4 + 4, offset + bytes) - word * 4;
  return (0xfu << first) & ((1u << last) - 1);
}

void remember_reader(Stamp (&readers)[2], Stamp stamp, Clock const& clock) {
  for (Stamp& r : readers) {
    if (!r || r.agent() == stamp.agent() || r.before(clock)) {
      r = stamp;
      return;
    }
  }
  readers[stamp.bits >> 3 & 1] = stamp;
}

[[noreturn]] void race(Cluster const& c, u32 rank, u32 offset, char const* now, Stamp earlier, char const* then) {
  fail("race", "shared memory of CTA %u, offset %#x: %s after %s by %s, and %s", rank, offset, now, then,
       describe_agent(c, earlier).c_str(), kRaceHint);
}

void check_not_moving(SharedWord const& s, u32 rank, u32 offset, bool write, char const* who) {
  if (s.mbarrier) fail("mbarrier", "%s touches a live mbarrier as data (CTA %u, offset %#x)", who, rank, offset);
  if (s.in_flight)
    fail("in_flight",
         "%s touches shared memory that an asynchronous copy is still writing (CTA %u, offset %#x): wait on its "
         "mbarrier first",
         who, rank, offset);
  if (write && s.being_read)
    fail("in_flight",
         "%s writes shared memory that a bulk store or a wgmma has still to read (CTA %u, offset %#x): wait with "
         "cp.async.bulk.wait_group.read or wgmma.wait_group, and a barrier, first",
         who, rank, offset);
}

void check_load(SharedWord const& s, u32 rank, u32 offset, u32 mask) {
  check_not_moving(s, rank, offset, false, "a load");
  if ((s.written_bytes & mask) != mask)
    fail("uninitialised", "a load reads shared memory that was never written (CTA %u, offset %#x)", rank, offset);
}

}  // namespace

void SharedWord::remember_reader(Stamp stamp, u32 bytes, Clock const& clock) {
  int slot = -1;
  for (int i = 0; i < 2 && slot < 0; ++i)
    if (!readers[i] || readers[i].agent() == stamp.agent() || readers[i].before(clock)) slot = i;
  if (slot < 0) slot = stamp.bits >> 3 & 1;
  bool const same = readers[slot].bits == stamp.bits;
  reader_bytes = (same ? reader_bytes : reader_bytes & ~(0xfu << 4 * slot)) | bytes << 4 * slot;
  readers[slot] = stamp;
}

void SharedShadow::read(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes) {
  Stamp const stamp = w.stamp();
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    SharedWord& s = words_[i];
    u32 const mask = byte_mask(offset, bytes, i);
    check_load(s, rank, i * 4, mask);
    if (s.writer_bytes & mask && !s.writer.before(w.clock)) race(c, rank, i * 4, "a read", s.writer, "a write");
    s.remember_reader(stamp, mask, w.clock);
  }
}

void SharedShadow::read_flag(u32 rank, u32 offset, u32 bytes) const {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) check_load(words_[i], rank, i * 4, byte_mask(offset, bytes, i));
}

void SharedShadow::write(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes) {
  Stamp const stamp = w.stamp();
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    SharedWord& s = words_[i];
    u32 const mask = byte_mask(offset, bytes, i);
    check_not_moving(s, rank, i * 4, true, "a store");
    if (s.writer_bytes & mask && !s.writer.before(w.clock)) race(c, rank, i * 4, "a write", s.writer, "a write");
    for (int k = 0; k < 2; ++k)
      if (Stamp const r = s.readers[k]; r && s.reader_bytes >> 4 * k & mask && !r.before(w.clock))
        race(c, rank, i * 4, "a write", r, "a read");
    // Of several writes of parts of a word, the last is remembered.
    s.writer_bytes = s.writer.bits == stamp.bits ? s.writer_bytes | mask : mask;
    s.writer = stamp;
    s.written_bytes |= mask;
    s.generic = true;
  }
}

void SharedShadow::async_read(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes, Stamp stamp,
                              bool may_be_unwritten) {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    SharedWord& s = words_[i];
    check_not_moving(s, rank, i * 4, false, "an asynchronous read");
    if (s.written_bytes != 0xf && !may_be_unwritten)
      fail("uninitialised", "an asynchronous read of shared memory that was never written (CTA %u, offset %#x)", rank,
           i * 4);
    if (!s.writer.before(w.clock)) race(c, rank, i * 4, "an asynchronous read", s.writer, "a write");
    if (s.generic && !s.writer.fenced_before(w.clock))
      fail("proxy",
           "an asynchronous read of shared memory that %s wrote with ordinary stores and no fence.proxy.async between "
           "(CTA %u, offset %#x)",
           describe_agent(c, s.writer).c_str(), rank, i * 4);
    if (stamp) s.remember_reader(stamp, 0xf, w.clock);
  }
}

void SharedShadow::begin_async_write(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes) {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    SharedWord& s = words_[i];
    check_not_moving(s, rank, i * 4, true, "an asynchronous copy");
    if (s.writer && !s.writer.before(w.clock)) race(c, rank, i * 4, "an asynchronous write", s.writer, "a write");
    for (Stamp r : s.readers)
      if (r && !r.before(w.clock)) race(c, rank, i * 4, "an asynchronous write", r, "a read");
    s.in_flight = 1;
  }
}

void SharedShadow::end_async_write(u32 offset, u32 bytes, Stamp stamp) {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    SharedWord& s = words_[i];
    s.in_flight = 0;
    s.generic = false;
    s.writer = stamp;
    s.writer_bytes = s.written_bytes = 0xf;
    s.readers[0] = s.readers[1] = Stamp();
  }
}

void SharedShadow::begin_bulk_read(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes,
                                   bool may_be_unwritten) {
  async_read(c, w, rank, offset, bytes, Stamp(), may_be_unwritten);
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) ++words_[i].being_read;
}

void SharedShadow::end_bulk_read(u32 offset, u32 bytes, Stamp stamp) {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    SharedWord& s = words_[i];
    --s.being_read;
    s.readers[0] = stamp;
    s.reader_bytes |= 0xf;
  }
}

void SharedShadow::end_read(Warp const& w, u32 offset, u32 bytes) {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    --words_[i].being_read;
    words_[i].remember_reader(w.stamp(), 0xf, w.clock);
  }
}

void SharedShadow::forget_writer(u32 offset, u32 bytes) {
  for (u32 i = offset / 4; i * 4 < offset + bytes; ++i) {
    words_[i].writer = Stamp();
    words_[i].writer_bytes = 0;
  }
}

void SharedShadow::set_mbarrier(u32 offset, bool on) {
  for (u32 i = offset / 4; i * 4 < offset + 8; ++i) {
    words_[i].mbarrier = on;
    if (!on) words_[i] = SharedWord();
  }
}

// ---- tensor memory

void TensorMemory::allocate_cells() {
  cells.assign(kTensorLanes * kTensorColumns, 0x7fbadbad);
  parts_.assign(kTensorColumns * 8, {});
}

bool TensorMemory::allocate(u32 columns, u32& base) {
  if (cells.empty()) allocate_cells();
  for (base = 0; base + columns <= kTensorColumns; base += columns) {
    bool free = true;
    for (u32 i = 0; i < columns; ++i) free &= owner_[base + i] == 0;
    if (!free) continue;
    ++next_owner_;
    for (u32 i = 0; i < columns; ++i) {
      owner_[base + i] = next_owner_;
      for (int b = 0; b < 8; ++b) parts_[(base + i) * 8 + b].written = false;
    }
    return true;
  }
  return false;
}

void TensorMemory::free(u32 base, u32 columns) {
  u32 const owner = base < kTensorColumns ? owner_[base] : 0;
  bool whole = owner != 0 && base + columns <= kTensorColumns && (base == 0 || owner_[base - 1] != owner) &&
               (base + columns == kTensorColumns || owner_[base + columns] != owner);
  for (u32 i = 0; whole && i < columns; ++i) whole = owner_[base + i] == owner;
  if (!whole) fail("tensor_memory", "tcgen05.dealloc of %u columns at %u, which is no allocation", columns, base);
  for (u32 i = 0; i < columns; ++i) owner_[base + i] = 0;
}

u32 TensorMemory::allocated() const {
  u32 n = 0;
  for (u32 o : owner_) n += o != 0;
  return n;
}

void TensorMemory::check_range(u32 column, u32 columns, char const* what) const {
  bool allocated = column + columns <= kTensorColumns;
  for (u32 i = 0; allocated && i < columns; ++i) allocated = owner_[column + i] != 0;
  if (!allocated)
    fail("tensor_memory", "%s touches columns %u to %u of tensor memory, which are not allocated", what, column,
         column + columns - 1);
}

void TensorMemory::read(Cluster const& c, Warp const& w, u32 rank, u32 column, u32 columns, u32 blocks, Stamp stamp,
                        bool by_pipe, char const* what) {
  check_range(column, columns, what);
  for (u32 i = column; i < column + columns; ++i) {
    for (u32 b = 0; b < 8; ++b) {
      if (!(blocks >> b & 1)) continue;
      TensorPart& p = parts_[i * 8 + b];
      if (!p.written)
        fail("uninitialised", "%s reads tensor memory that was never written (CTA %u, column %u, lanes from %u)", what,
             rank, i, b * 16);
      bool const same_pipe = by_pipe && p.writer.agent() == stamp.agent();
      if (!same_pipe && !p.writer.before(w.clock))
        fail("race", "%s reads tensor memory of CTA %u, column %u, written by %s, and nothing orders the two", what,
             rank, i, describe_agent(c, p.writer).c_str());
      if (stamp) remember_reader(p.readers, stamp, w.clock);
    }
  }
}

void TensorMemory::write(Cluster const& c, Warp const& w, u32 rank, u32 column, u32 columns, u32 blocks, Stamp stamp,
                         bool by_pipe, char const* what) {
  check_range(column, columns, what);
  for (u32 i = column; i < column + columns; ++i) {
    for (u32 b = 0; b < 8; ++b) {
      if (!(blocks >> b & 1)) continue;
      TensorPart& p = parts_[i * 8 + b];
      auto check = [&](Stamp s, char const* how) {
        if (s && !(by_pipe && s.agent() == stamp.agent()) && !s.before(w.clock))
          fail("race", "%s writes tensor memory of CTA %u, column %u, %s by %s, and nothing orders the two", what, rank,
               i, how, describe_agent(c, s).c_str());
      };
      check(p.writer, "written");
      check(p.readers[0], "read");
      check(p.readers[1], "read");
      p.writer = stamp;
      p.readers[0] = p.readers[1] = Stamp();
      p.written = true;
    }
  }
}

void TensorMemory::mark_read(u32 column, u32 columns, u32 blocks, Stamp stamp) {
  for (u32 i = column; i < column + columns; ++i)
    for (u32 b = 0; b < 8; ++b)
      if (blocks >> b & 1) parts_[i * 8 + b].readers[stamp.bits >> 3 & 1] = stamp;
}

}  // namespace simulator
