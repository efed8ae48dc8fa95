// Between the LibTorch stable ABI and the core's plain descriptions.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/engine.h"
#include "../core/last_error.h"

namespace cudnn_grouped::bindings {

using TorchTensor = torch::stable::Tensor;
using MaybeTensor = std::optional<TorchTensor>;

DType dtype_of_code(int32_t code);
int32_t code_of(DType dtype);
Tensor describe(TorchTensor const& tensor);
Tensor describe(MaybeTensor const& tensor);
std::vector<Tensor> describe(std::vector<TorchTensor> const& tensors);

// Raises RuntimeError with the error's text and leaves the error for the Python layers.
[[noreturn]] void raise(Error error);

TorchTensor empty_strided(std::vector<int64_t> const& sizes, std::vector<int64_t> const& strides, DType dtype,
                          Device device);
TorchTensor empty(std::vector<int64_t> const& sizes, DType dtype, Device device);
// The documented 6-D view of a new contiguous scale buffer.
TorchTensor empty_scales(int64_t rows, int64_t blocks, int64_t batch, DType dtype, Device device);

// An operator's arguments in schema order, and its results.
class Stack {
 public:
  Stack(StableIValue* stack, uint64_t count) : at_(stack), stack_(stack), end_(stack + count) {}
  template <class T>
  T next() {
    if (at_ == end_) throw std::logic_error("an operator read more arguments than its schema has");
    return torch::stable::detail::to<T>(*at_++);
  }
  DType next_dtype() { return dtype_of_code(next<int32_t>()); }
  DType next_optional_dtype() {
    auto const code = next<std::optional<int32_t>>();
    return code ? dtype_of_code(*code) : DType::none;
  }
  void finish() const {
    if (at_ != end_) throw std::logic_error("an operator read fewer arguments than its schema has");
  }
  void give(std::vector<TorchTensor> const& results) {
    for (size_t i = 0; i < results.size(); ++i) stack_[i] = torch::stable::detail::from(results[i]);
  }

 private:
  StableIValue *at_, *stack_, *end_;
};

// The engine of a device, torch's memory, stream and threads for it.
class Session {
 public:
  explicit Session(Device device);
  Engine const& engine() const { return *engine_; }
  // Raises where the engine has no kernel for a problem.
  template <class Problem>
  void check(Problem const& problem) const {
    if (auto error = engine_->check(problem)) raise(*error);
  }
  Launch& launch(int64_t workspace_bytes);
  int workers() const { return launch_.workers; }

 private:
  Device device_;
  Engine const* engine_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  MaybeTensor workspace_;
  Launch launch_;
};

}  // namespace cudnn_grouped::bindings
