// Types and the one kind of error of the simulator.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace simulator {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 32;
constexpr u32 kAllLanes = ~0u;

// What a check found. `category` is the check's name, one of those in docs/sm100_simulator.md.
struct Failure : std::runtime_error {
  Failure(char const* category, std::string const& text) : std::runtime_error(text), category(category) {}
  char const* category;
};

[[noreturn]] void fail(char const* category, char const* format, ...) __attribute__((format(printf, 2, 3)));

template <class To, class From>
inline To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace simulator
