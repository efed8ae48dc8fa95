#include <algorithm>

#include "engine.h"

namespace cudnn_grouped {
namespace {

std::deque<Engine>& registry() {
  static std::deque<Engine> engines;
  return engines;
}

int (*capability_query)(int) = nullptr;
void (*device_fill)(void*, uint32_t, int64_t, void*) = nullptr;

std::string built_names() {
  std::string names;
  for (Engine const& engine : registry()) names += (names.empty() ? "" : ", ") + std::string(engine.name);
  return names;
}

}  // namespace

std::string Device::text() const {
  if (type == Type::cpu) return "cpu";
  return (type == Type::cuda ? "cuda:" : "device ") + std::to_string(index);
}

void register_engine(Engine const& engine) { registry().push_back(engine); }
void register_capability_query(int (*capability)(int)) { capability_query = capability; }
void register_fill(void (*fill)(void*, uint32_t, int64_t, void*)) { device_fill = fill; }
std::deque<Engine> const& engines() { return registry(); }

Engine const* engine_for_capability(int capability) {
  for (Engine const& engine : registry()) {
    for (int served : engine.capabilities) {
      if (served == capability) return &engine;
    }
  }
  return nullptr;
}

Engine const* engine_for(Device device, std::string& why) {
  if (device.type == Device::Type::cuda && capability_query) {
    int const capability = capability_query(device.index);
    if (Engine const* engine = engine_for_capability(capability)) return engine;
    why = "expected a device that a built engine serves (" + built_names() + "), got compute capability " +
          std::to_string(capability / 10) + "." + std::to_string(capability % 10);
    return nullptr;
  }
  for (Engine const& engine : registry()) {
    if (engine.device == device.type && device.type == Device::Type::cpu) return &engine;
  }
  why = "expected a device that a built engine serves (" + built_names() + "), got " + device.text();
  return nullptr;
}

void fill(Device device, void* to, uint32_t pattern, int64_t count, Launch const& launch) {
  if (device.type == Device::Type::cpu) {
    std::fill_n(static_cast<uint32_t*>(to), count, pattern);
  } else if (count > 0) {
    device_fill(to, pattern, count, launch.stream);
  }
}

}  // namespace cudnn_grouped
