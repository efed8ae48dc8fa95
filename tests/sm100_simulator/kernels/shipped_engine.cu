// A GPU engine in the CPU engine's place: what the operators are given, tensors of the CPU, is device memory of the
// simulator. Compiled together with csrc/cuda and csrc/ENGINE, where SHIPPED_ENGINE is "ENGINE".
// tests/simulated_engine.py calls the C functions.
#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "core/engine.h"
#include "core/scale_layout.h"
#include "core/weight_gradient.h"

// The simulator's (api.cc); it is loaded before this library.
extern "C" {
void* simulator_active();
int simulator_device();
void simulator_add_range(void* session, void* p, unsigned long long bytes, int writable);
void simulator_remove_range(void* session, void* p);
char const* simulator_category(void* session);
char const* simulator_text(void* session);
char const* simulator_map_problem(void* session);
}

namespace {

using namespace cudnn_grouped;

// The engine that this library brought; nameless where there is none. The process's list of engines is left as it
// was: other tests print it.
Engine const& shipped() {
  static Engine const engine = [] {
    auto& all = const_cast<std::deque<Engine>&>(engines());
    Engine const last = all.back();
    if (std::string(last.name) != SHIPPED_ENGINE) return Engine{};
    all.pop_back();
    return last;
  }();
  return engine;
}

Engine& cpu_entry() { return const_cast<Engine&>(engines().front()); }  // the core's own

Engine saved{};            // the CPU engine while the other is in its place
std::string shortened;     // the operand whose range ends a byte early
std::mutex one_at_a_time;  // the simulator has no threads
// Values as a device holds them, where nobody checks: they take the place of what the operator was given. Null: they do
// not. As many as there are experts.
struct {
  int32_t const* offsets;
  int64_t const *b_pointers, *sfb_pointers;
} unchecked{};

// What a problem's pointers cover, and nothing beside it, is the simulator's memory for the time of a call.
class Ranges {
 public:
  Ranges() : session_(simulator_active()) {}
  Ranges(Ranges const&) = delete;
  ~Ranges() {
    for (auto const& [begin, range] : ranges_) simulator_remove_range(session_, begin);
  }

  void input(char const* name, void const* p, int64_t bytes) { add(name, const_cast<void*>(p), bytes, false); }
  void accumulator(char const* name, void* p, int64_t bytes) { add(name, p, bytes, true); }
  // Written whole: what is not shows as NaN.
  void output(char const* name, void* p, int64_t bytes) {
    if (p && bytes > 0) std::memset(p, 0xff, size_t(bytes));
    add(name, p, bytes, true);
  }

  // Makes the ranges known, calls, and tells what the simulator found in place of the error that it led to.
  template <class Call>
  void run(Call const& call) {
    for (auto const& [begin, range] : ranges_) simulator_add_range(session_, begin, range.bytes, range.writable);
    std::string error;
    try {
      call();
    } catch (std::exception const& e) {
      error = e.what();
    }
    std::string const category = simulator_category(session_), map_problem = simulator_map_problem(session_);
    if (!category.empty()) error = "[" + category + "] " + simulator_text(session_);
    if (category.empty() && !map_problem.empty()) error = "[tensor_map] " + map_problem;
    if (!error.empty()) throw std::runtime_error(error);
  }

 private:
  struct Range {
    unsigned long long bytes;
    bool writable;
  };
  // One tensor may be given twice (D by rows and by columns, alpha and beta): the longer range holds both.
  void add(char const* name, void* p, int64_t bytes, bool writable) {
    if (name == shortened) --bytes;
    if (!p || bytes <= 0) return;
    Range& range = ranges_[p];
    range = {std::max<unsigned long long>(range.bytes, bytes), range.writable || writable};
  }

  void* session_;
  std::map<void*, Range> ranges_;
};

int64_t operand_bytes(OperandFormat format, int64_t count) {
  return format == OperandFormat::bf16 ? count * 2 : format == OperandFormat::e2m1 ? count / 2 : count;
}

int64_t scale_bytes(int64_t rows, int64_t blocks) { return ScaleLayout::of(rows, blocks).bytes(); }

bool has_rows(GroupedGemm const& p, int64_t expert) {
  if (unchecked.offsets) return true;
  if (p.m == 0 || p.single_group) return p.m > 0;
  return p.offsets()[expert] > (expert ? p.offsets()[expert - 1] : 0);
}

// A dense tensor, or the tensors of the experts that have rows: the others' need not be there.
void weights(Ranges& ranges, GroupedGemm const& p, char const* name, void const* dense, int64_t stride,
             std::vector<int64_t> const& list, int64_t bytes) {
  if (dense) return ranges.input(name, dense, p.experts ? (p.experts - 1) * stride + bytes : 0);
  for (size_t g = 0; g < list.size(); ++g) {
    if (has_rows(p, int64_t(g))) ranges.input(name, reinterpret_cast<void const*>(list[g]), bytes);
  }
}

void inputs(Ranges& r, GroupedGemm const& p) {
  if (p.operation == Operation::dact) {
    r.input("a", p.a, p.m * p.n * bytes_of(p.a_dtype));
  } else {
    int64_t const blocks = p.block_scaled() ? ceil_div(p.k, p.sf_vec_size) : 0;
    r.input("a", p.a, operand_bytes(p.operands, p.m * p.k));
    r.input("sfa", p.sfa, scale_bytes(p.m, blocks));
    weights(r, p, "b", p.b, p.b_expert_bytes, p.b_list, operand_bytes(p.weights, p.n * p.k));
    weights(r, p, "sfb", p.sfb, p.sfb_expert_bytes, p.sfb_list, scale_bytes(p.n, blocks));
  }
  r.input("b_ptrs", unchecked.b_pointers ? unchecked.b_pointers : p.b_pointers, p.experts * 8);
  r.input("sfb_ptrs", unchecked.sfb_pointers ? unchecked.sfb_pointers : p.sfb_pointers, p.experts * 8);
  if (!p.forward()) r.input("c", p.c, (p.c_per_expert ? p.experts : p.m) * p.c_columns() * bytes_of(p.c_dtype));
  if (!p.single_group) {
    r.input("padded_offsets", unchecked.offsets ? unchecked.offsets : p.padded_offsets, p.experts * 4);
  }
  r.input("alpha", p.alpha, p.experts * 4);
  r.input("beta", p.beta, p.experts * 4);
  r.input("prob", p.prob, p.m * 4);
  r.input("norm_const", p.norm_const, 4);
  r.input("bias", p.bias, p.experts * p.n * bytes_of(p.bias_dtype));
}

void outputs(Ranges& r, GroupedGemm const& p) {
  int64_t const columns = p.d_columns();
  if (p.forward()) r.output("c", p.c, p.m * p.c_columns() * bytes_of(p.c_dtype));
  r.output("d_row", p.d_row, p.m * columns * bytes_of(p.d_dtype));
  r.output("d_col", p.d_col, p.m * columns * bytes_of(p.d_dtype));
  r.output("sfd_row", p.sfd_row, scale_bytes(p.m, ceil_div(columns, kQuantBlock)));
  r.output("sfd_col", p.sfd_col, scale_bytes(columns, ceil_div(p.m, kQuantBlock)));
  r.accumulator("amax", p.amax, p.experts * p.amax_width() * 4);
  if (p.dprob_slots) {  // in place of dprob and dbias, which are left alone
    r.accumulator("dprob_workspace", p.dprob_slots, p.m * grid_n(p.n, p.tile_n, p.cluster_n) * 4);
    r.accumulator("dbias_workspace", p.dbias_slots, p.m / kDbiasSlotRows * columns * 2);
    return;
  }
  auto const sum = p.sums_are_new && p.m > 0 ? &Ranges::output : &Ranges::accumulator;  // without rows, nothing is done
  (r.*sum)("dprob", p.dprob, p.m * 4);
  (r.*sum)("dbias", p.dbias, p.experts * columns * 2);
}

// The problem as it is on a device: no values on the host.
GroupedGemm on_device(GroupedGemm const& given) {
  GroupedGemm p = given;
  p.device = {Device::Type::cuda, simulator_device()};
  if (unchecked.offsets) p.padded_offsets = unchecked.offsets;
  if (unchecked.b_pointers) p.b_pointers = unchecked.b_pointers;
  if (unchecked.sfb_pointers) p.sfb_pointers = unchecked.sfb_pointers;
  p.checked_offsets.clear();
  if (p.b_pointers) p.b_list.clear();
  if (p.sfb_pointers) p.sfb_list.clear();
  return p;
}

int64_t workspace_bytes(GroupedGemm const& p, int) { return shipped().workspace_bytes(on_device(p), 1); }

void run(GroupedGemm const& p, Launch const& given) {
  std::lock_guard<std::mutex> const lock(one_at_a_time);
  Launch launch;
  launch.workspace = given.workspace;
  Ranges ranges;
  inputs(ranges, p);
  outputs(ranges, p);
  ranges.output("workspace", launch.workspace, workspace_bytes(p, 1));
  ranges.run([&] { shipped().run(on_device(p), launch); });
}

WeightGradient on_device(WeightGradient const& given) {
  WeightGradient p = given;
  p.device = {Device::Type::cuda, simulator_device()};
  if (unchecked.offsets) p.padded_offsets = unchecked.offsets;
  p.checked_offsets.clear();
  return p;
}

int64_t weight_gradient_workspace_bytes(WeightGradient const& p, int) {
  return shipped().weight_gradient_workspace_bytes(on_device(p), 1);
}

void weight_gradient(WeightGradient const& given, Launch const& launch) {
  std::lock_guard<std::mutex> const lock(one_at_a_time);
  WeightGradient const p = on_device(given);
  Ranges ranges;
  for (auto const& [operand, name, scales] : {std::tuple{p.a, "a", "sfa"}, std::tuple{p.b, "b", "sfb"}}) {
    ranges.input(name, operand.data, operand_bytes(p.operands, operand.rows * p.tokens));
    if (p.block_scaled()) ranges.input(scales, operand.scales, scale_bytes(operand.rows, p.tokens / p.sf_vec_size));
  }
  ranges.input("padded_offsets", p.padded_offsets, p.experts * 4);
  ranges.input("global_scale_a", p.global_scale_a, p.experts * 4);
  ranges.input("global_scale_b", p.global_scale_b, p.experts * 4);
  for (void* out : p.out) {
    int64_t const bytes = p.a.rows * p.b.rows * bytes_of(p.out_dtype);
    p.accumulate ? ranges.accumulator("out", out, bytes) : ranges.output("out", out, bytes);
  }
  ranges.output("workspace", launch.workspace, weight_gradient_workspace_bytes(p, 1));
  Launch here;
  here.workspace = launch.workspace;
  ranges.run([&] { shipped().weight_gradient(p, here); });
}

void quantize(QuantizeProblem p, bool back) {
  std::lock_guard<std::mutex> const lock(one_at_a_time);
  Ranges ranges;
  int64_t const x = p.batch * p.rows * p.columns * bytes_of(p.x_dtype);
  int64_t const scales = p.batch * scale_bytes(p.scale_rows(), p.scale_blocks());
  if (back) {
    ranges.output("x", p.x, x);
    ranges.input("data", p.data, p.data_bytes());
    ranges.input("scales", p.scales, scales);
  } else {
    ranges.input("x", p.x, x);
    ranges.output("data", p.data, p.data_bytes());
    ranges.output("scales", p.scales, scales);
  }
  ranges.input("norm_const", p.norm_const, 4);
  ranges.input("padded_offsets", p.padded_offsets, p.experts * 4);
  p.device = {Device::Type::cuda, simulator_device()};
  ranges.run([&] { (back ? shipped().dequantize : shipped().quantize)(p, Launch()); });
}

void reduce_dbias(DbiasReduction const& given, Launch const&) {
  std::lock_guard<std::mutex> const lock(one_at_a_time);
  DbiasReduction p = given;
  p.device = {Device::Type::cuda, simulator_device()};
  Ranges ranges;
  ranges.input("slots", p.slot_values, p.slots * p.columns * 2);
  ranges.input("padded_offsets", p.padded_offsets, p.experts * 4);
  ranges.accumulator("dbias", p.dbias, p.experts * p.columns * 2);
  ranges.run([&] { shipped().reduce_dbias(p, Launch()); });
}

}  // namespace

// 0: the engines have changed places. 1: they had before. 2: there is no engine.
// name: of the operand whose range ends a byte early, for tests of the checks.
extern "C" CG_API int simulated_engine_enter(char const* name) {
  if (!shipped().name) return 2;
  if (saved.name) return 1;
  Engine& entry = cpu_entry();
  saved = entry;
  shortened = name;
  entry.workspace_bytes = workspace_bytes;
  entry.run = run;
  entry.weight_gradient_workspace_bytes = weight_gradient_workspace_bytes;
  entry.weight_gradient = shipped().weight_gradient ? weight_gradient : nullptr;
  entry.quantize = [](QuantizeProblem const& p, Launch const&) { quantize(p, false); };
  entry.dequantize = [](QuantizeProblem const& p, Launch const&) { quantize(p, true); };
  entry.reduce_dbias = reduce_dbias;
  entry.missing = [](GroupedGemm const& p) { return shipped().check(on_device(p)); };
  entry.missing_weight_gradient = shipped().missing_weight_gradient;
  return 0;
}

extern "C" CG_API int simulated_engine_unchecked(int32_t const* offsets, int64_t const* b, int64_t const* sfb) {
  unchecked = {offsets, b, sfb};
  return 0;
}

extern "C" CG_API int simulated_engine_leave() {
  unchecked = {};
  cpu_entry() = saved;
  saved = Engine{};
  return 0;
}
