// Values of tensors, for checks. Those on the CPU are always checked. Those on a GPU only with
// CUDNN_GROUPED_VALIDATE=1: reading them waits for the device, and a stream that is being captured has none (decisions
// A2).
#pragma once

#include <vector>

#include "check.h"

namespace cudnn_grouped {

// Copies device memory to the host after what the current stream has to do; false where that stream is being captured.
struct DeviceReader {
  void* (*current_stream)(int device_index) = nullptr;  // the framework's
  bool (*read)(void* to, void const* from, int64_t bytes, int device_index, void* stream) = nullptr;
};
CG_API DeviceReader& device_reader();

// While it lives, this thread reads on the given stream and not on the framework's current one: for callers whose
// runtime hands them a stream.
class CG_API ReadingStream {
 public:
  explicit ReadingStream(void* stream);
  ~ReadingStream();
  ReadingStream(ReadingStream const&) = delete;
};

bool values_are_checked(Device device);
void read_values(void* to, void const* from, int64_t bytes, Device device);

template <class T>
std::vector<T> values_of(void const* from, int64_t count, Device device) {
  std::vector<T> values(count);
  read_values(values.data(), from, count * int64_t(sizeof(T)), device);
  return values;
}

}  // namespace cudnn_grouped
