// A tensor argument as the core sees it: plain metadata and an address. No torch, no CUDA.
#pragma once

#include <cstdint>
#include <string>

#include "portable.h"

namespace cudnn_grouped {

enum class DType : uint8_t {
  none,  // the argument is absent
  float32,
  float16,
  bfloat16,
  float8_e4m3fn,
  float8_e5m2,
  float8_e8m0fnu,
  float4_e2m1fn_x2,
  uint8,
  int32,
  int64,
  float64,
  int8,
  int16,
  boolean,
  other
};

CG_API char const* name_of(DType dtype);
CG_API DType dtype_named(std::string const& name);  // DType::other for a name outside the enumeration
CG_API int64_t bytes_of(DType dtype);               // per storage element: an FP4 pair is one byte

struct Device {
  enum class Type : uint8_t { cpu, cuda, other } type = Type::cpu;
  int index = 0;
  bool operator==(Device const& o) const { return type == o.type && (type == Type::cpu || index == o.index); }
  CG_API std::string text() const;
};

struct Tensor {
  static constexpr int kMaxRank = 6;

  void* data = nullptr;
  DType dtype = DType::none;
  std::string dtype_name;  // as the caller's framework says it, for messages; empty: name_of(dtype)
  Device device;
  bool freed = false;  // a tensor of the framework whose storage has no memory any more
  int rank = 0;
  int64_t size[kMaxRank] = {}, stride[kMaxRank] = {};

  bool present() const { return dtype != DType::none; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < rank && i < kMaxRank; ++i) count *= size[i];
    return count;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace cudnn_grouped
