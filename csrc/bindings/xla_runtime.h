// How an XLA handler meets the core: memory, stream and threads of one call.
#pragma once

#include <functional>
#include <memory>

#include "xla_values.h"

namespace cudnn_grouped::bindings {

class Runtime {
 public:
  // The CPU platform: XLA's threads, memory of the heap.
  static Runtime cpu(ffi::ThreadPool& threads);
  // The CUDA platform: XLA's stream and its allocator for scratch memory on that stream.
  static Runtime cuda(int device_ordinal, void* stream, ffi::ScratchAllocator& scratch);

  Device device() const { return device_; }
  void* stream() const { return launch_.stream; }
  int workers() const { return launch_.workers; }
  // The engine that serves the device; a CallFailure where none does.
  Engine const& engine();
  Launch const& launch(int64_t workspace_bytes);

 private:
  Device device_;
  Launch launch_;
  std::function<std::shared_ptr<void>(int64_t bytes)> allocate_;
  std::shared_ptr<void> memory_;
};

}  // namespace cudnn_grouped::bindings
