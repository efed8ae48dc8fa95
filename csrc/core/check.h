// The vocabulary of argument checks. Each names the argument, what was expected and what came.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "problem.h"
#include "view.h"

namespace cudnn_grouped {

// A failed check leaves the validator through this; validate() returns the Error in it.
struct CheckFailure {
  Error error;
};

[[noreturn]] void fail(std::string const& argument, std::string const& text);
[[noreturn]] void fail(std::string const& argument, std::string const& expected, std::string const& got,
                       std::string const& hint = "");

using Shape = View<int64_t>;
std::string text_of(Shape values);
std::string text_of(DType dtype);
std::string text_of(View<DType> dtypes);
std::string text_of(std::vector<std::string> const& values);
std::string text_of(double value);
std::string shape_text(Tensor const& tensor);
// "b[3]", or "b" where the index is negative.
std::string item_name(char const* list, int index);

// One tensor under check: its name, and the device that all tensors share.
class TensorCheck {
 public:
  TensorCheck(std::string name, Tensor const& tensor, Device device) : name_(std::move(name)), tensor_(tensor) {
    if (tensor.present() && !(tensor.device == device)) {
      fail(name_, "a tensor on " + device.text(), tensor.device.text());
    }
    if (tensor.freed) fail(name_, "a tensor with memory", "one whose storage was freed");
  }
  TensorCheck const& dtype(View<DType> allowed) const;
  // Strides of dimensions of size one are not looked at.
  TensorCheck const& shape(Shape expected, std::string_view symbols, std::string_view hint = "") const;
  TensorCheck const& strides(Shape expected, std::string_view meaning) const;
  TensorCheck const& contiguous() const;
  TensorCheck const& aligned(int64_t bytes) const;
  // padded_offsets: (L,) int32, contiguous, 1 to 1024 experts.
  TensorCheck const& experts() const;
  // One float32 value, whatever the rank.
  TensorCheck const& scalar() const;
  // (rows, columns, 1) or (rows, columns), columns contiguous.
  TensorCheck const& matrix(int64_t rows, int64_t columns, std::string_view symbols) const;
  // (rows, 1, 1) or (rows,), contiguous.
  TensorCheck const& column(int64_t rows, std::string_view symbols) const;
  bool has_strides(Shape expected) const;
  bool has_shape(Shape expected) const;

 private:
  std::string const name_;
  Tensor const& tensor_;
};

// Scale factors of (rows, blocks) x batch: the documented 6-D view, its contiguous physical form, or a flat buffer.
void check_scales(TensorCheck const& check, std::string const& name, Tensor const& tensor, int64_t rows, int64_t blocks,
                  int64_t batch);
// No output may overlap another tensor. The first `outputs` of the tensors are the outputs; absent ones are skipped.
struct NamedTensor {
  char const* name;
  Tensor const& tensor;
  int index = -1;  // in a list of that name

  std::string text() const { return item_name(name, index); }
};
void check_overlaps(View<NamedTensor> tensors, size_t outputs);
// norm_const as a value: a finite number above 0.
void check_norm_value(float const* norm, Device device);
// Offsets as values: multiples of kRowAlignment, non-decreasing, at most m.
std::vector<int32_t> checked_offset_values(Tensor const& offsets, int64_t m);

}  // namespace cudnn_grouped
