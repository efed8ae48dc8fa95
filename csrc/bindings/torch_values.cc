#include "torch_values.h"

#include <dlfcn.h>

#include <atomic>

#include "../core/device_values.h"
#include "../core/scale_layout.h"

namespace cudnn_grouped::bindings {
namespace {

struct Code {
  int32_t code;
  DType dtype;
  char const* name;
};

std::vector<Code> const& codes() {
  static std::vector<Code> const table = {
      {aoti_torch_dtype_float32(), DType::float32, "float32"},
      {aoti_torch_dtype_float16(), DType::float16, "float16"},
      {aoti_torch_dtype_bfloat16(), DType::bfloat16, "bfloat16"},
      {aoti_torch_dtype_float8_e4m3fn(), DType::float8_e4m3fn, "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), DType::float8_e5m2, "float8_e5m2"},
      {torch_dtype_float8_e8m0fnu(), DType::float8_e8m0fnu, "float8_e8m0fnu"},
      {torch_dtype_float4_e2m1fn_x2(), DType::float4_e2m1fn_x2, "float4_e2m1fn_x2"},
      {aoti_torch_dtype_uint8(), DType::uint8, "uint8"},
      {aoti_torch_dtype_int32(), DType::int32, "int32"},
      {aoti_torch_dtype_int64(), DType::int64, "int64"},
      {aoti_torch_dtype_float64(), DType::float64, "float64"},
      {aoti_torch_dtype_int8(), DType::int8, "int8"},
      {aoti_torch_dtype_int16(), DType::int16, "int16"},
      {aoti_torch_dtype_bool(), DType::boolean, "bool"},
      {aoti_torch_dtype_uint16(), DType::other, "uint16"},
      {aoti_torch_dtype_uint32(), DType::other, "uint32"},
      {aoti_torch_dtype_uint64(), DType::other, "uint64"},
      {aoti_torch_dtype_float8_e4m3fnuz(), DType::other, "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2fnuz(), DType::other, "float8_e5m2fnuz"},
  };
  return table;
}

std::vector<int64_t> contiguous_strides(std::vector<int64_t> const& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

// libtorch_cuda has this symbol; looked up by name, so that one library serves builds of torch without CUDA. Python
// loads torch's libraries out of the global scope: the library is found by its own name.
void* current_cuda_stream(int device_index) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static std::atomic<Getter> found{nullptr};
  Getter getter = found.load(std::memory_order_relaxed);
  if (!getter) {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    getter = reinterpret_cast<Getter>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
    if (!getter) throw std::runtime_error("torch's current CUDA stream: expected libtorch_cuda.so to be loaded");
    found.store(getter, std::memory_order_relaxed);
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device_index, &stream));
  return stream;
}

bool const registered = [] {
  device_reader().current_stream = current_cuda_stream;
  return true;
}();

}  // namespace

DType dtype_of_code(int32_t code) {
  for (Code const& entry : codes()) {
    if (entry.code == code) return entry.dtype;
  }
  return DType::other;
}

int32_t code_of(DType dtype) {
  for (Code const& entry : codes()) {
    if (entry.dtype == dtype) return entry.code;
  }
  throw std::logic_error("a dtype that torch does not have");
}

Tensor describe(TorchTensor const& tensor) {
  Tensor result;
  int32_t code = 0, type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  result.dtype = dtype_of_code(code);
  for (Code const& entry : codes()) {
    if (entry.code == code) result.dtype_name = entry.name;
  }
  result.device.type = type == aoti_torch_device_type_cpu()    ? Device::Type::cpu
                       : type == aoti_torch_device_type_cuda() ? Device::Type::cuda
                                                               : Device::Type::other;
  result.device.index = result.device.type == Device::Type::cpu ? 0 : int(tensor.get_device_index());
  result.rank = int(tensor.dim());
  auto const sizes = tensor.sizes(), strides = tensor.strides();
  for (int i = 0; i < result.rank && i < Tensor::kMaxRank; ++i) {
    result.size[i] = sizes[i];
    result.stride[i] = strides[i];
  }
  result.data = tensor.data_ptr();
  result.freed = !result.data && tensor.numel() > 0;
  return result;
}

Tensor describe(MaybeTensor const& tensor) { return tensor ? describe(*tensor) : Tensor{}; }

std::vector<Tensor> describe(std::vector<TorchTensor> const& tensors) {
  std::vector<Tensor> result;
  for (TorchTensor const& tensor : tensors) result.push_back(describe(tensor));
  return result;
}

void raise(Error error) {
  std::string const text = error.message();
  set_last_error(std::move(error));
  throw std::runtime_error(text);
}

TorchTensor empty_strided(std::vector<int64_t> const& sizes, std::vector<int64_t> const& strides, DType dtype,
                          Device device) {
  AtenTensorHandle handle = nullptr;
  int32_t const type = device.type == Device::Type::cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code_of(dtype),
                                                  type, device.index, &handle));
  return TorchTensor(handle);
}

TorchTensor empty(std::vector<int64_t> const& sizes, DType dtype, Device device) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, device);
}

TorchTensor empty_scales(int64_t rows, int64_t blocks, int64_t batch, DType dtype, Device device) {
  ScaleLayout const layout = ScaleLayout::of(rows, blocks);
  return empty_strided({32, 4, layout.row_atoms, 4, layout.block_atoms, batch},
                       {16, 4, layout.block_atoms * kAtomBytes, 1, kAtomBytes, layout.bytes()}, dtype, device);
}

Session::Session(Device device) : device_(device) {
  std::string why;
  engine_ = engine_for(device, why);
  if (!engine_) raise({Error::Kind::runtime, "device", why});
  if (device.type == Device::Type::cuda) {
    guard_.emplace(device.index);
    launch_.stream = current_cuda_stream(device.index);
  } else {
    launch_.workers = int(torch::stable::get_num_threads());
    launch_.parallel_for = [](int64_t count, std::function<void(int64_t)> const& body) {
      torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) body(i);
      });
    };
  }
}

Launch& Session::launch(int64_t workspace_bytes) {
  constexpr int64_t kAlignment = 256;
  if (workspace_bytes > 0) {
    workspace_ = empty({workspace_bytes + kAlignment}, DType::uint8, device_);
    auto const address = reinterpret_cast<uintptr_t>(workspace_->data_ptr());
    launch_.workspace = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }
  return launch_;
}

}  // namespace cudnn_grouped::bindings
