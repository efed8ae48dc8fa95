// Places in the caller's workspace; with no workspace it only counts.
#pragma once

#include "portable.h"

namespace cudnn_grouped {

class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    char* const at = base_ ? base_ + used_ : nullptr;
    used_ += ceil_div<int64_t>(count * int64_t(sizeof(T)), 256) * 256;
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace cudnn_grouped
