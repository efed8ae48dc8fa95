// Between the LibTorch stable ABI and the core's plain descriptions.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/engine.h"
#include "../core/last_error.h"
#include "../core/view.h"

namespace cudnn_grouped::bindings {

// A tensor of torch, or null for None. torch::stable::Tensor would keep a second reference count in memory of its own.
struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using TorchTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

DType dtype_of_code(int32_t code);
int32_t code_of(DType dtype);
void* address_of(TorchTensor const& tensor);
Tensor describe(TorchTensor const& tensor);
std::vector<Tensor> describe(std::vector<TorchTensor> const& tensors);

// Raises RuntimeError with the error's text and leaves the error for the Python layers.
[[noreturn]] void raise(Error error);

TorchTensor empty_strided(View<int64_t> sizes, View<int64_t> strides, DType dtype, Device device);
TorchTensor empty(View<int64_t> sizes, DType dtype, Device device);
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
  TorchTensor next_tensor() { return TorchTensor(next<AtenTensorHandle>()); }
  TorchTensor next_optional_tensor() { return TorchTensor(next<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
  std::vector<TorchTensor> next_list() { return owned(next<std::vector<AtenTensorHandle>>()); }
  std::vector<TorchTensor> next_optional_list() {
    return owned(next<std::optional<std::vector<AtenTensorHandle>>>().value_or(std::vector<AtenTensorHandle>()));
  }
  std::string next_string() { return text_of(next<StringHandle>()); }
  std::optional<std::string> next_optional_string() {
    auto const handle = next<std::optional<StringHandle>>();
    return handle ? std::optional(text_of(*handle)) : std::nullopt;
  }
  DType next_dtype() { return dtype_of_code(next<int32_t>()); }
  DType next_optional_dtype() {
    auto const code = next<std::optional<int32_t>>();
    return code ? dtype_of_code(*code) : DType::none;
  }
  void finish() const {
    if (at_ != end_) throw std::logic_error("an operator read fewer arguments than its schema has");
  }
  template <class... Tensors>
  void give(Tensors&... results) {
    StableIValue* to = stack_;
    ((*to++ = torch::stable::detail::from(results.release())), ...);
  }

 private:
  static std::vector<TorchTensor> owned(std::vector<AtenTensorHandle> const& handles) {
    return {handles.begin(), handles.end()};
  }
  static std::string text_of(StringHandle handle);

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
  TorchTensor workspace_;
  Launch launch_;
};

}  // namespace cudnn_grouped::bindings
