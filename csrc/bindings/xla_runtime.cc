#include "xla_runtime.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>

namespace cudnn_grouped::bindings {
namespace {

constexpr int64_t kAlignment = 256;  // of a workspace, see Launch

// Items of one parallel_for. Helpers on XLA's threads and the caller claim items until none is left. A helper that XLA
// starts late, or never, finds none: the caller waits only for items that are being worked on, so that handlers which
// occupy all of XLA's threads cannot wait for each other.
class SharedWork {
 public:
  SharedWork(int64_t count, std::function<void(int64_t)> const& body) : count_(count), body_(body) {}

  void help() {
    for (int64_t i = next_++; i < count_; i = next_++) {
      try {
        body_(i);
      } catch (...) {
        std::lock_guard const lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
      std::lock_guard const lock(mutex_);
      if (++done_ == count_) finished_.notify_all();
    }
  }

  void wait() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done_ == count_; });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  int64_t const count_;
  std::function<void(int64_t)> const& body_;  // not touched once all items are claimed
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  int64_t done_ = 0;
  std::exception_ptr failure_;
};

}  // namespace

Runtime Runtime::cpu(ffi::ThreadPool& threads) {
  Runtime result;
  result.launch_.workers = int(std::max<int64_t>(1, threads.num_threads()));
  result.launch_.parallel_for = [&threads](int64_t count, std::function<void(int64_t)> const& body) {
    auto const work = std::make_shared<SharedWork>(count, body);
    for (int64_t i = 1; i < count; ++i) threads.Schedule([work] { work->help(); });
    work->help();
    work->wait();
  };
  result.allocate_ = [](int64_t bytes) {
    return std::shared_ptr<void>(::operator new(size_t(bytes), std::nothrow), [](void* p) { ::operator delete(p); });
  };
  return result;
}

Runtime Runtime::cuda(int device_ordinal, void* stream, ffi::ScratchAllocator& scratch) {
  Runtime result;
  result.device_ = {Device::Type::cuda, device_ordinal};
  result.launch_.stream = stream;
  // XLA frees it when the handler returns: its allocator reuses memory in the order of the stream.
  result.allocate_ = [&scratch](int64_t bytes) {
    return std::shared_ptr<void>(scratch.Allocate(size_t(bytes)).value_or(nullptr), [](void*) {});
  };
  return result;
}

Engine const& Runtime::engine() {
  std::string why;
  Engine const* const found = engine_for(device_, why);
  if (!found) misfit("device", why);
  return *found;
}

Launch const& Runtime::launch(int64_t workspace_bytes) {
  if (workspace_bytes > 0) {
    memory_ = allocate_(workspace_bytes + kAlignment);  // XLA aligns to 16 bytes at most
    if (!memory_) {
      misfit("workspace", "expected " + std::to_string(workspace_bytes) + " bytes of scratch memory, got none");
    }
    auto const address = reinterpret_cast<uintptr_t>(memory_.get());
    launch_.workspace = reinterpret_cast<void*>(ceil_div<uintptr_t>(address, kAlignment) * kAlignment);
  }
  return launch_;
}

}  // namespace cudnn_grouped::bindings
