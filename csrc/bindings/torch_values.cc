#include "torch_values.h"

#include <dlfcn.h>

#include <algorithm>
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

Code const* entry_of(int32_t code) {
  for (Code const& entry : codes()) {
    if (entry.code == code) return &entry;
  }
  return nullptr;
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
  Code const* const entry = entry_of(code);
  return entry ? entry->dtype : DType::other;
}

int32_t code_of(DType dtype) {
  for (Code const& entry : codes()) {
    if (entry.dtype == dtype) return entry.code;
  }
  throw std::logic_error("a dtype that torch does not have");
}

void* address_of(TorchTensor const& tensor) {
  void* address = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &address));
  return address;
}

Tensor describe(TorchTensor const& tensor) {
  Tensor result;
  if (!tensor) return result;
  AtenTensorHandle const handle = tensor.get();
  int32_t code = 0, type = 0, index = 0;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &code));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &rank));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  Code const* const entry = entry_of(code);
  result.dtype = entry ? entry->dtype : DType::other;
  if (entry && entry->dtype == DType::other) result.dtype_name = entry->name;
  result.device.type = type == aoti_torch_device_type_cpu()    ? Device::Type::cpu
                       : type == aoti_torch_device_type_cuda() ? Device::Type::cuda
                                                               : Device::Type::other;
  result.device.index = result.device.type == Device::Type::cpu ? 0 : index;
  result.rank = int(rank);
  std::copy_n(sizes, std::min(result.rank, Tensor::kMaxRank), result.size);
  std::copy_n(strides, std::min(result.rank, Tensor::kMaxRank), result.stride);
  result.data = address_of(tensor);
  if (!result.data) {
    int64_t count = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle, &count));
    result.freed = count > 0;
  }
  return result;
}

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

std::string Stack::text_of(StringHandle handle) {  // torch::stable's own conversion leaks
  size_t length = 0;
  char const* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

TorchTensor empty_strided(View<int64_t> sizes, View<int64_t> strides, DType dtype, Device device) {
  AtenTensorHandle handle = nullptr;
  int32_t const type = device.type == Device::Type::cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code_of(dtype),
                                                  type, device.index, &handle));
  return TorchTensor(handle);
}

TorchTensor empty(View<int64_t> sizes, DType dtype, Device device) {
  int64_t strides[Tensor::kMaxRank], stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) strides[i] = stride;
  return empty_strided(sizes, {strides, sizes.size()}, dtype, device);
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
    auto const address = reinterpret_cast<uintptr_t>(address_of(workspace_));
    launch_.workspace = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }
  return launch_;
}

}  // namespace cudnn_grouped::bindings
