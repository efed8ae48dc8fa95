// A list in memory that somebody else holds: how a short list is passed without taking memory for it.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <vector>

namespace cudnn_grouped {

template <class T>
class View {
 public:
  View(T const* data, size_t size) : data_(data), size_(size) {}
  View(std::initializer_list<T> list) : View(list.begin(), list.size()) {}  // for the length of the call
  View(std::vector<T> const& list) : View(list.data(), list.size()) {}
  template <size_t kSize>
  View(T const (&list)[kSize]) : View(list, kSize) {}

  T const* begin() const { return data_; }
  T const* end() const { return data_ + size_; }
  T const* data() const { return data_; }
  size_t size() const { return size_; }
  T const& operator[](size_t i) const { return data_[i]; }

 private:
  T const* data_;
  size_t size_;
};

}  // namespace cudnn_grouped
