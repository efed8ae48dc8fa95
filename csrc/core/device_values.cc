#include "device_values.h"

#include <cstdlib>

namespace cudnn_grouped {

DeviceReader& device_reader() {
  static DeviceReader reader;
  return reader;
}

static thread_local std::optional<void*> reading_stream;

ReadingStream::ReadingStream(void* stream) { reading_stream = stream; }
ReadingStream::~ReadingStream() { reading_stream.reset(); }

bool values_are_checked(Device device) {
  if (device.type == Device::Type::cpu) return true;
  char const* const wanted = std::getenv("CUDNN_GROUPED_VALIDATE");
  return wanted && std::string(wanted) == "1" && device.type == Device::Type::cuda && device_reader().read;
}

void read_values(void* to, void const* from, int64_t bytes, Device device) {
  if (device.type == Device::Type::cpu) {
    std::memcpy(to, from, size_t(bytes));
    return;
  }
  DeviceReader const& reader = device_reader();
  void* const stream = reading_stream          ? *reading_stream
                       : reader.current_stream ? reader.current_stream(device.index)
                                               : nullptr;
  if (!reader.read(to, from, bytes, device.index, stream)) {
    throw CheckFailure{{Error::Kind::runtime, "CUDNN_GROUPED_VALIDATE",
                        "expected a stream that is not being captured, got one (checking values reads device memory)"}};
  }
}

}  // namespace cudnn_grouped
