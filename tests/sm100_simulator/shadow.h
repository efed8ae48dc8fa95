// Who last touched each word of shared memory and each part of tensor memory, and whether it was ever written.
#pragma once
#include <vector>

#include "clock.h"

namespace simulator {

struct Cluster;
struct Warp;

// One for every 4 bytes of shared memory. Two readers are remembered; a third displaces one of them, so that a race may
// be missed but never invented.
struct SharedWord {
  Stamp writer, readers[2];
  u32 written_bytes : 4;  // ever
  u32 writer_bytes : 4;   // by `writer`
  u32 reader_bytes : 8;   // by each of `readers`
  u32 being_read : 13;    // bulk stores and multiplications that have not yet read it
  u32 in_flight : 1;      // an asynchronous copy is writing it
  u32 generic : 1;        // `writer` wrote through the generic proxy
  u32 mbarrier : 1;

  SharedWord()
      : written_bytes(0), writer_bytes(0), reader_bytes(0), being_read(0), in_flight(0), generic(0), mbarrier(0) {}
  void remember_reader(Stamp stamp, u32 bytes, Clock const& clock);
};

class SharedShadow {
 public:
  void resize(u32 bytes) { words_.assign((bytes + 3) / 4, {}); }

  // Accesses by instructions of a warp (the generic proxy).
  void read(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes);
  void read_flag(u32 rank, u32 offset, u32 bytes) const;  // by a load that synchronises: it may race
  void write(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes);
  // By an asynchronous unit, on behalf of the warp that issued it.
  void async_read(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes, Stamp stamp,
                  bool may_be_unwritten = false);
  void begin_async_write(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes);
  void end_async_write(u32 offset, u32 bytes, Stamp stamp);
  void begin_bulk_read(Cluster const& c, Warp const& w, u32 rank, u32 offset, u32 bytes, bool may_be_unwritten = false);
  void end_bulk_read(u32 offset, u32 bytes, Stamp stamp);
  void end_read(Warp const& w, u32 offset, u32 bytes);  // the same, by a wait of the warp: several may read at once
  void forget_writer(u32 offset, u32 bytes);            // atomics order themselves
  void set_mbarrier(u32 offset, bool on);

 private:
  std::vector<SharedWord> words_;
};

// Tensor memory: 128 lanes x 512 columns of 32 bits. Tracked in parts of 16 lanes x 1 column.
struct TensorPart {
  Stamp writer, readers[2];
  bool written = false;
};

class TensorMemory {
 public:
  std::vector<u32> cells;  // [lane][column]

  void allocate_cells();
  // Allocation, in columns.
  bool allocate(u32 columns, u32& base);  // false: not enough free columns now
  void free(u32 base, u32 columns);
  u32 allocated() const;
  void check_range(u32 column, u32 columns, char const* what) const;
  bool relinquished = false;

  // `blocks`: a mask of the 8 blocks of 16 lanes. `pipe`: the agent of the tensor core, whose own accesses are in
  // order.
  void read(Cluster const& c, Warp const& w, u32 rank, u32 column, u32 columns, u32 blocks, Stamp stamp, bool by_pipe,
            char const* what);
  void write(Cluster const& c, Warp const& w, u32 rank, u32 column, u32 columns, u32 blocks, Stamp stamp, bool by_pipe,
             char const* what);
  void mark_read(u32 column, u32 columns, u32 blocks, Stamp stamp);

 private:
  std::vector<TensorPart> parts_;                      // [column][block]
  std::vector<u32> owner_ = std::vector<u32>(512, 0);  // columns of one allocation share a number, 0: free
  u32 next_owner_ = 0;
};

}  // namespace simulator
