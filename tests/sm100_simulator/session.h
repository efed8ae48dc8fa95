// What one simulated device holds: loaded modules, memory, the last failure, and the counts of what ran.
#pragma once
#include <memory>

#include "machine.h"

namespace simulator {

// A kernel of a loaded library, by the address that the host code launches.
struct LoadedKernel {
  std::string name;
  std::shared_ptr<Module> module;
};

// What cudaFuncSetAttribute allows.
struct KernelLimits {
  u32 dynamic_shared = 48 * 1024;
  bool large_clusters = false;
};

struct KernelCounts {
  u64 launches = 0;
  u32 cluster = 1;
  struct Executed {
    std::map<std::string, u64> opcodes, classes;
  };
  std::map<std::pair<u32, u32>, Executed> warps;  // by rank and number
  Traffic traffic;
  u64 nanoseconds = 0;
};

class Session {
 public:
  explicit Session(Settings const& settings);
  ~Session();

  void* allocate(u64 bytes);
  bool release(void* p);
  // Throws Failure.
  void launch(LoadedKernel& kernel, u32 const (&grid)[3], u32 const (&block)[3], u32 const (&cluster)[3],
              u64 dynamic_shared, void** arguments);
  std::string report() const;  // JSON

  // Of the device: each has its own, for launchers that remember which devices they have set up.
  int const number;
  Machine machine;
  std::string category, text;  // of the first failure
  int last_error = 0;          // what cudaGetLastError returns: a device that comes later must not hear of it
  std::string map_problem;     // why the last tensor map was refused
  std::map<std::string, KernelCounts> counts;
  std::map<LoadedKernel const*, KernelLimits> limits;

 private:
  struct Loaded {
    Program program;
    std::unordered_map<std::string, u64> globals;
  };
  Loaded& load(LoadedKernel& kernel);
  void count(KernelCounts& into, Program const& program, u32 warps);

  std::map<std::string, std::unique_ptr<Loaded>> programs_;
  std::map<Module const*, std::unordered_map<std::string, u64>> globals_;
  std::map<u64, void*> blocks_;
};

Session* active();

}  // namespace simulator
