// The simulated machine: a grid of clusters of CTAs of warps, their memories, and the asynchronous units.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <random>

#include "clock.h"
#include "program.h"
#include "shadow.h"

namespace simulator {

struct Cluster;
struct Cta;
class Machine;

// Addresses. Global memory is the host's own. A shared address has the CTA's rank in bits 24 and up, as the
// instructions of a CTA pair assume (they clear bit 24 to reach the even CTA); generic addresses have a tag.
constexpr u64 kSharedTag = 1ull << 62, kLocalTag = 1ull << 61;
constexpr u32 kRankShift = 24, kOffsetMask = (1u << kRankShift) - 1;
constexpr u32 kReservedShared = 1024;  // at the bottom of every CTA's shared memory
constexpr u32 kMaxShared = 227 * 1024;
constexpr u32 kTensorColumns = 512, kTensorLanes = 128;

struct LaneGroup {  // lanes of a warp that are at the same instruction
  u32 mask, pc;
  bool asleep = false;
};

struct Mbarrier {
  u32 address, agent;
  u32 expected, pending;
  i64 bytes = 0;        // transaction count
  u64 completed = 0;    // phases
  u32 first_epoch = 0;  // of its agent, which an earlier mbarrier may have had
  Clock gathering, done;
  Stamp initialised;

  // Of work that the present phase reports.
  Stamp next_completion() const { return Stamp(agent, first_epoch + u32(completed) + 1); }
};

struct BulkGroup {  // bulk stores of one thread, committed together
  struct Range {
    u32 address, bytes;
  };
  int lane = 0;
  std::vector<Range> reads;       // of shared memory, until a wait says that they are over
  int unread = 0, unwritten = 0;  // operations that have still to read shared memory, to write
};

struct Warp {
  Cta* cta = nullptr;
  u32 index = 0, agent = 0;
  std::unique_ptr<u8[]> storage;
  u8* file = nullptr;
  std::vector<u32> written;  // a mask of lanes for every register
  std::vector<LaneGroup> groups;
  u32 exited = 0;
  u32 divided = 0;  // slices since its lanes last met
  Clock clock;
  Clock fence;     // what the last thread fence covered: what a relaxed arrival or store releases
  Clock observed;  // what relaxed loads have found released: a thread fence acquires it
  std::vector<u32> counts;
  std::vector<u8> local;

  // What a blocked warp waits for, for the scheduler and the report of a deadlock.
  u32 waits_on = 0;         // an mbarrier's address
  u64 waits_since = 0;      // its phase count when the wait began
  u32 waits_at = 0;         // the instruction
  bool timed_out = false;   // a try_wait may give up
  i64 bar_generation = -1;  // of the named barrier that it arrived at
  i64 cluster_arrived = -1;
  u32 bulk_lanes = 0;  // that have ever issued a bulk store
  std::shared_ptr<BulkGroup> open_groups[kLanes];
  std::vector<std::shared_ptr<BulkGroup>> bulk_groups;  // committed, oldest first
  struct TensorLoad {
    u32 column, columns, blocks;  // of 16 lanes
    std::function<void()> fetch;
    std::vector<Value> values;
  };
  std::vector<TensorLoad> tensor_loads;  // tcgen05.ld without a wait as yet
  struct Multiplications {               // a group of wgmma
    std::vector<u32> reads;              // pieces of 16 bytes of shared memory
    std::vector<std::vector<Value> const*> results;
  };
  Multiplications open_multiplications;
  std::deque<Multiplications> multiplications;  // committed, oldest first
  bool multiplies_into(u32 id) const;           // the register is an accumulator of a wgmma without a wait
  std::map<u64, u64> acquired_maps;             // tensor map to the time of its fence
  u32 registers = 0;

  bool done() const { return groups.empty(); }
  u32 epoch() const { return clock.seen[agent]; }
  Stamp stamp() const { return Stamp(agent, epoch()); }
  void next_epoch() { ++clock.seen[agent]; }
};

struct NamedBarrier {
  u32 arrived = 0, needed = 0;
  i64 generation = 0;
  u32 votes = 0, result = 0;
  Clock gathering, done;
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 rank = 0, index[3] = {0, 0, 0};
  std::vector<Warp> warps;
  std::vector<u8> shared;
  SharedShadow shadow;
  TensorMemory tensor;
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<u32, std::unique_ptr<Mbarrier>> mbarriers;
  std::unordered_map<u32, Clock> flags;  // what was released through a word of shared memory
  u32 tensor_agent = 0, tensor_epoch = 1;
  u64 tensor_due = 0;  // the tensor core's queue is in order
  u32 live_warps = 0;
  Clock departed;  // of the warps that have left
  u32 registers_used = 0;
  u32 copies_in_flight = 0;  // into its shared memory
  bool exited = false;
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  u32 index[3] = {0, 0, 0};
  u32 arrived = 0;
  i64 generation = 0;
  Clock gathering, done;
  u32 next_agent = 0, agents = 0;
  std::vector<std::pair<u32, u32>> free_agents;  // of mbarriers that are no more, and the epoch to go on with
  std::vector<std::string> agent_names;

  Cta& owner(u32 address, u64 bytes, char const* what);  // checks bounds and that the CTA is alive
  u8* pointer(u32 address, u64 bytes, char const* what) {
    return &owner(address, bytes, what).shared[address & kOffsetMask];
  }
  Mbarrier& mbarrier(u32 address);
  u32 live_warps() const;
};

// Ranges that the kernel may touch.
class GlobalMemory {
 public:
  void add(u64 begin, u64 bytes, bool writable);
  void remove(u64 begin);
  u8* check(u64 address, u64 bytes, bool write, char const* what) const;
  bool contains(u64 address, u64 bytes) const;

 private:
  struct Range {
    u64 end;
    bool writable;
  };
  std::map<u64, Range> ranges_;
  mutable u64 begin_ = 1, end_ = 0;  // the last hit
  mutable bool writable_ = false;
};

struct Event {
  u64 due;
  u64 order;
  Cluster const* cluster;
  std::function<void()> run;
};

struct Traffic {
  u64 loads = 0, load_bytes = 0, stores = 0, store_bytes = 0, reductions = 0, reduction_bytes = 0;
  u64 multiplications = 0;
  double multiply_cycles = 0;  // of tensor cores, summed over the SMs
  u64 instructions = 0, clusters = 0;
};

// Parameters may hold tensor maps, and those are aligned.
class Parameters {
 public:
  void resize(size_t bytes) {
    size_ = bytes;
    storage_.assign(bytes + 128, 0);
    data_ = storage_.data() + (128 - reinterpret_cast<uintptr_t>(storage_.data()) % 128) % 128;
  }
  u8* data() const { return data_; }
  size_t size() const { return size_; }
  u8& operator[](size_t i) const { return data_[i]; }

 private:
  std::vector<u8> storage_;
  u8* data_ = nullptr;
  size_t size_ = 0;
};

struct Launch {
  Program const* program = nullptr;
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_shared = 0;
  Parameters parameters;
};

struct Settings {
  bool adversarial = false;
  u64 seed = 1;
  u32 sms = 4;
  u64 max_instructions = 4000000000ull;
  // What the PTX ISA does not allow and the hardware forgives; CUTLASS relies on both.
  bool allow_unwaited_loads = false;   // the result of a tcgen05.ld is there when an instruction reads it
  bool allow_relaxed_release = false;  // a relaxed arrival at the cluster's barrier releases like any other
};

class Machine {
 public:
  explicit Machine(Settings const& settings) : settings(settings), random(settings.seed) {}
  void run(Launch const& launch);

  // Runs `work` of a cluster now, or at a random later time before the cluster ends.
  void later(Cluster const& cluster, std::function<void()> work);
  void later_in_order(Cta& cta, std::function<void()> work);

  Settings settings;
  GlobalMemory memory;
  Launch const* launch = nullptr;
  std::mt19937_64 random;
  u64 progress = 0;  // grows when anything happens that a waiting warp may wait for
  Traffic traffic;
  std::vector<std::vector<u64>> counts;  // executions of each instruction by each warp of a cluster
  std::map<u64, u64> maps_written;       // tensor maps that this launch has written, and when
  u64 map_time = 0;
  bool slept = false;                  // a warp has executed nanosleep
  u32 next_cluster = 0, clusters = 0;  // of the grid
  u64 now = 0;

  bool cancel_cluster(u32 out[3]);  // cluster-launch control: takes the next cluster that has not started

 private:
  void take_cluster(u32 (&index)[3]);  // the next that has not started
  void start_cluster();
  void start_warp(Cta& cta, u32 index);
  bool run_slice(Cluster& cluster, Warp& warp, int quantum);  // true: it could have gone on
  void retire(Cluster& cluster);
  void deliver(Cluster const* ending = nullptr);  // what is due, or all that the cluster still has
  void report_deadlock();
  u64 delay();

  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<Event> events_;
  u64 order_ = 0;
};

// What a handler works on.
struct Context {
  Machine& machine;
  Cluster& cluster;
  Cta& cta;
  Warp& warp;
  LaneGroup* group;
  u32 mask;

  template <class T>
  T* lanes(u32 offset) const {
    return reinterpret_cast<T*>(warp.file + offset);
  }
  // Writes a result to the active lanes.
  template <class T>
  void store(u32 offset, T const (&result)[kLanes]) const {
    T* out = lanes<T>(offset);
    if (mask == kAllLanes) {
      memcpy(out, result, sizeof result);
    } else {
      for (int l = 0; l < kLanes; ++l) out[l] = mask >> l & 1 ? result[l] : out[l];
    }
  }
  void store_predicate(u32 offset, u32 value) const {
    u32& out = *lanes<u32>(offset);
    out = (out & ~mask) | (value & mask);
  }
  u32 predicate(u32 offset) const { return *lanes<u32>(offset); }
  int first_lane() const { return __builtin_ctz(mask); }
  // A value that all active lanes share.
  template <class T>
  T uniform(u32 offset, char const* what) const {
    T const* v = lanes<T>(offset);
    T const value = v[first_lane()];
    for (int l = 0; l < kLanes; ++l)
      if (mask >> l & 1 && v[l] != value) fail("divergence", "%s differs between the lanes of a warp", what);
    return value;
  }
  bool converged() const { return (group->mask | warp.exited) == kAllLanes; }
};

u64 read_lane(Context const& c, u32 offset, int size, int lane);
inline Details const& details(Context const& c, Op const& op) {
  return c.machine.launch->program->details[op.immediate];
}
// Swizzles of 32, 64 and 128 bytes (modes 1 to 3; 0: none), of the copy unit and of the tensor core alike: units of 16
// bytes change places by the number of their row of 128 bytes.
inline u32 swizzled(u32 address, int mode) { return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4); }
std::string describe_agent(Cluster const& cluster, Stamp stamp);

// mbarrier.cc
void mbarrier_arrive(Machine& m, Mbarrier& b, u32 count);
void mbarrier_complete_bytes(Machine& m, Mbarrier& b, i64 bytes);
Mbarrier& usable_mbarrier(Context& c, u32 address);  // checks that its initialisation is ordered before
bool mbarrier_poll(Context& c, Mbarrier& b, u32 parity);

// execute_barrier.cc
void finish_cluster_barrier(Cluster& cluster);
void finish_named_barriers(Cta& cta);
// A warp's access to the word at `offset` by an atomic or by a load or store that synchronises.
void acquire_flag(Cta& cta, Warp& w, u32 offset, bool acquires);
void release_flag(Cta& cta, Warp& w, u32 offset, bool releases);

}  // namespace simulator
