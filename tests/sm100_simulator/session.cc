#include "session.h"

#include <atomic>
#include <cstdlib>
#include <ctime>

namespace simulator {
namespace {

u64 processor_time() {  // of this thread, in nanoseconds: other work on the machine does not count
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return u64(t.tv_sec) * 1000000000ull + u64(t.tv_nsec);
}

std::atomic<int> devices{0};

}  // namespace

Session::Session(Settings const& settings) : number(devices++), machine(settings) {}

Session::~Session() {
  for (auto& [address, p] : blocks_) free(p);
}

void* Session::allocate(u64 bytes) {
  u64 const size = (std::max<u64>(bytes, 1) + 255) / 256 * 256;
  void* p = aligned_alloc(256, size);
  if (!p) return nullptr;
  memset(p, 0xff, size);
  blocks_[u64(p)] = p;
  machine.memory.add(u64(p), bytes, true);
  return p;
}

bool Session::release(void* p) {
  if (!p) return true;
  auto found = blocks_.find(u64(p));
  if (found == blocks_.end()) return false;
  machine.memory.remove(u64(p));
  free(p);
  blocks_.erase(found);
  return true;
}

Session::Loaded& Session::load(LoadedKernel& kernel) {
  std::string const key = kernel.name + "@" + std::to_string(u64(kernel.module.get()));
  if (auto found = programs_.find(key); found != programs_.end()) return *found->second;
  Module const& module = *kernel.module;
  auto& globals = globals_[&module];
  if (globals.empty()) {
    for (auto const* list : {&module.global, &module.constant}) {
      for (Variable const& v : *list) {
        u8* p = static_cast<u8*>(allocate(v.bytes));
        if (!p) fail("launch", "no memory for the %llu bytes of %s", (unsigned long long)v.bytes, v.name.c_str());
        memset(p, 0, v.bytes);
        memcpy(p, v.initial.data(), v.initial.size());
        globals[v.name] = u64(p);
      }
    }
  }
  for (Kernel const& k : module.kernels) {
    if (k.name != kernel.name) continue;
    auto loaded = std::make_unique<Loaded>();
    Decoder(module, k, loaded->program, globals).run();
    return *(programs_[key] = std::move(loaded));
  }
  fail("launch", "no kernel %s in its module", kernel.name.c_str());
}

// CUDA Programming Guide, "Technical Specifications per Compute Capability", 10.x.
void Session::launch(LoadedKernel& kernel, u32 const (&grid)[3], u32 const (&block)[3], u32 const (&cluster)[3],
                     u64 dynamic_shared, void** arguments) {
  Program const& program = load(kernel).program;
  Kernel const& k = *program.kernel;
  KernelLimits const limits = this->limits[&kernel];
  Launch l;
  l.program = &program;
  auto bad = [&](char const* format, auto... values) {
    char text[512];
    snprintf(text, sizeof text, format, values...);
    throw Failure("launch", kernel.name + ": " + text);
  };
  for (int i = 0; i < 3; ++i) {
    l.grid[i] = grid[i];
    l.block[i] = block[i];
    l.cluster[i] = k.cluster[i] ? k.cluster[i] : cluster[i];
    if (k.cluster[i] && cluster[i] != 1 && cluster[i] != k.cluster[i])
      bad("a cluster of %u in dimension %d, and the kernel was compiled for %u", cluster[i], i, k.cluster[i]);
    if (grid[i] == 0 || block[i] == 0 || l.cluster[i] == 0) bad("dimension %d of the grid, block or cluster is 0", i);
    if (grid[i] % l.cluster[i])
      bad("a grid of %u is no multiple of the cluster's %u in dimension %d", grid[i], l.cluster[i], i);
    if (k.exact_threads && block[i] != k.max_threads[i])
      bad("%u threads in dimension %d, and the kernel was compiled for %u", block[i], i, k.max_threads[i]);
  }
  if (grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
    bad("a grid of %u x %u x %u: at most 2^31 - 1 x 65535 x 65535", grid[0], grid[1], grid[2]);
  if (block[0] > 1024 || block[1] > 1024 || block[2] > 64)
    bad("a CTA of %u x %u x %u threads: at most 1024 x 1024 x 64", block[0], block[1], block[2]);
  if (u64(grid[0]) * grid[1] * grid[2] >= 1ull << 32) bad("a grid of 2^32 CTAs and more is not known to the simulator");
  u32 const threads = block[0] * block[1] * block[2], size = l.cluster[0] * l.cluster[1] * l.cluster[2];
  u32 const allowed = k.max_threads[0] ? k.max_threads[0] * k.max_threads[1] * k.max_threads[2] : 1024;
  if (threads > 1024 || threads > allowed) bad("%u threads a CTA: at most %u", threads, std::min(allowed, 1024u));
  if (size > (limits.large_clusters ? 16u : 8u))
    bad("a cluster of %u CTAs: at most %u", size, limits.large_clusters ? 16u : 8u);
  if (k.max_registers * ((threads + kLanes - 1) / kLanes * kLanes) > 65536)
    bad("%u threads of %u registers: the CTA may have 65536", threads, k.max_registers);
  if (program.shared_bytes > 48 * 1024) bad("%u bytes of static shared memory: at most 49152", program.shared_bytes);
  if (dynamic_shared + program.shared_bytes > kMaxShared)
    bad("%llu bytes of shared memory: at most %u", (unsigned long long)dynamic_shared + program.shared_bytes,
        kMaxShared);
  if (dynamic_shared > limits.dynamic_shared)
    bad("%llu bytes of dynamic shared memory, and cudaFuncAttributeMaxDynamicSharedMemorySize is %u",
        (unsigned long long)dynamic_shared, limits.dynamic_shared);
  l.dynamic_shared = u32(dynamic_shared);
  l.parameters.resize(program.parameter_bytes);
  for (size_t i = 0; i < k.parameters.size(); ++i)
    memcpy(&l.parameters[program.parameter_offsets[i]], arguments[i], k.parameters[i].bytes);
  machine.memory.add(u64(l.parameters.data()), program.parameter_bytes, false);
  machine.counts.clear();
  Traffic const before = machine.traffic;
  u64 const start = processor_time();
  KernelCounts& into = counts[kernel.name];
  auto finish = [&] {
    machine.memory.remove(u64(l.parameters.data()));
    into.nanoseconds += processor_time() - start;
  };
  try {
    machine.run(l);
  } catch (...) {
    finish();
    throw;
  }
  finish();
  ++into.launches;
  into.cluster = size;
  Traffic const& t = machine.traffic;
  into.traffic.loads += t.loads - before.loads;
  into.traffic.load_bytes += t.load_bytes - before.load_bytes;
  into.traffic.stores += t.stores - before.stores;
  into.traffic.store_bytes += t.store_bytes - before.store_bytes;
  into.traffic.reductions += t.reductions - before.reductions;
  into.traffic.reduction_bytes += t.reduction_bytes - before.reduction_bytes;
  into.traffic.multiplications += t.multiplications - before.multiplications;
  into.traffic.multiply_cycles += t.multiply_cycles - before.multiply_cycles;
  into.traffic.instructions += t.instructions - before.instructions;
  into.traffic.clusters += t.clusters - before.clusters;
  count(into, program, (threads + kLanes - 1) / kLanes);
}

void Session::count(KernelCounts& into, Program const& program, u32 warps) {
  for (u32 s = 0; s < machine.counts.size(); ++s) {
    KernelCounts::Executed& warp = into.warps[{s / warps, s % warps}];
    for (size_t i = 0; i < machine.counts[s].size(); ++i) {
      u64 const n = machine.counts[s][i];
      if (!n) continue;
      bool const last = i >= program.kernel->statements.size();
      warp.opcodes[last ? "ret" : program.kernel->statements[i].opcode] += n;
      warp.classes[kClassNames[int(program.classes[i])]] += n;
    }
  }
}

std::string Session::report() const {
  std::string out = "{";
  auto number = [](double x) {
    char text[32];
    snprintf(text, sizeof text, "%.17g", x);
    return std::string(text);
  };
  auto table = [&](std::map<std::string, u64> const& m) {
    std::string t = "{";
    for (auto const& [name, n] : m) t += (t.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(n);
    return t + "}";
  };
  for (auto const& [name, k] : counts) {
    out += (out.size() > 1 ? ", \"" : "\"") + name + "\": {\"launches\": " + std::to_string(k.launches) +
           ", \"cluster\": " + std::to_string(k.cluster) + ", \"clusters\": " + std::to_string(k.traffic.clusters) +
           ", \"instructions\": " + std::to_string(k.traffic.instructions) +
           ", \"seconds\": " + number(double(k.nanoseconds) * 1e-9) +
           ", \"loads\": " + std::to_string(k.traffic.loads) +
           ", \"load_bytes\": " + std::to_string(k.traffic.load_bytes) +
           ", \"stores\": " + std::to_string(k.traffic.stores) +
           ", \"store_bytes\": " + std::to_string(k.traffic.store_bytes) +
           ", \"reductions\": " + std::to_string(k.traffic.reductions) +
           ", \"reduction_bytes\": " + std::to_string(k.traffic.reduction_bytes) +
           ", \"multiplications\": " + std::to_string(k.traffic.multiplications) +
           ", \"multiply_cycles\": " + number(k.traffic.multiply_cycles) + ", \"warps\": [";
    for (auto const& [place, w] : k.warps)
      out += std::string(out.back() == '[' ? "" : ", ") + "{\"rank\": " + std::to_string(place.first) +
             ", \"warp\": " + std::to_string(place.second) + ", \"opcodes\": " + table(w.opcodes) +
             ", \"classes\": " + table(w.classes) + "}";
    out += "]}";
  }
  return out + "}";
}

}  // namespace simulator
