// Places in the caller's workspace; with no workspace it only counts.
#pragma once

#include "portable.h"

namespace cudnn_grouped {

class Arena {
 public:
  // No place is null, not even a counted one: what depends on a place counts the same.
  explicit Arena(void* base) : base_(base ? static_cast<char*>(base) : reinterpret_cast<char*>(kAlignment)) {}
  template <class T>
  T* take(int64_t count) {
    char* const at = base_ + used_;
    used_ += ceil_div<int64_t>(count * int64_t(sizeof(T)), kAlignment) * kAlignment;
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlignment = 256;
  char* base_;
  int64_t used_ = 0;
};

}  // namespace cudnn_grouped
