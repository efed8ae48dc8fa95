// What an engine is, and which engine serves a device.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "problem.h"
#include "quantize_problem.h"
#include "weight_gradient.h"

namespace cudnn_grouped {

// How an engine meets the caller's runtime: memory, stream, threads.
struct Launch {
  void* workspace = nullptr;  // workspace_bytes() of the engine, 256-byte aligned
  void* stream = nullptr;     // CUDA engines
  int workers = 1;            // CPU engine: threads it may use
  std::function<void(int64_t count, std::function<void(int64_t)> const& body)> parallel_for;
};

struct Engine {
  char const* name;  // "cpu", "sm90", "sm100"
  Device::Type device;
  // CUDA compute capabilities served, as major * 10 + minor; empty for the CPU.
  std::vector<int> capabilities;
  int64_t (*workspace_bytes)(GroupedGemm const&, int workers);
  void (*run)(GroupedGemm const&, Launch const&);
  int64_t (*weight_gradient_workspace_bytes)(WeightGradient const&, int workers);
  void (*weight_gradient)(WeightGradient const&, Launch const&);
  void (*quantize)(QuantizeProblem const&, Launch const&);
  void (*dequantize)(QuantizeProblem const&, Launch const&);
  void (*reduce_dbias)(DbiasReduction const&, Launch const&);
  // What of the contract this engine has no kernel for, asked before anything is allocated. Null: it has all.
  std::optional<Error> (*missing)(GroupedGemm const&) = nullptr;
  std::optional<Error> (*missing_weight_gradient)(WeightGradient const&) = nullptr;

  std::optional<Error> check(GroupedGemm const& p) const { return missing ? missing(p) : std::nullopt; }
  std::optional<Error> check(WeightGradient const& p) const {
    return missing_weight_gradient ? missing_weight_gradient(p) : std::nullopt;
  }
};

// A CUDA library adds its engines when it is loaded, with functions that read a device's capability and fill its memory
// on a stream.
CG_API void register_engine(Engine const& engine);
CG_API void register_capability_query(int (*capability)(int device_index));
CG_API void register_fill(void (*fill)(void* to, uint32_t pattern, int64_t count, void* stream));
CG_API std::deque<Engine> const& engines();  // references to them stay valid

// The engine that serves a device, or null and the reason.
CG_API Engine const* engine_for(Device device, std::string& why);
CG_API Engine const* engine_for_capability(int capability);

// count copies of a 32-bit pattern, on the stream of the launch: how a caller without a framework's operators clears
// the accumulators. The device is one that an engine serves.
CG_API void fill(Device device, void* to, uint32_t pattern, int64_t count, Launch const& launch);

}  // namespace cudnn_grouped
