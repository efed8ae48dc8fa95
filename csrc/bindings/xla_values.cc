#include "xla_values.h"

#include <algorithm>

namespace cudnn_grouped::bindings {
namespace {

struct Code {
  ffi::DataType code;
  DType dtype;
  char const* name;
};

// The names are JAX's; dtypes that no operator takes are here for messages.
constexpr Code kCodes[] = {
    {ffi::F32, DType::float32, "float32"},
    {ffi::F16, DType::float16, "float16"},
    {ffi::BF16, DType::bfloat16, "bfloat16"},
    {ffi::F8E4M3FN, DType::float8_e4m3fn, "float8_e4m3fn"},
    {ffi::F8E5M2, DType::float8_e5m2, "float8_e5m2"},
    {ffi::F8E8M0FNU, DType::float8_e8m0fnu, "float8_e8m0fnu"},
    {ffi::U8, DType::uint8, "uint8"},
    {ffi::S32, DType::int32, "int32"},
    {ffi::S64, DType::int64, "int64"},
    {ffi::F64, DType::float64, "float64"},
    {ffi::S8, DType::int8, "int8"},
    {ffi::S16, DType::int16, "int16"},
    {ffi::PRED, DType::boolean, "bool"},
    {ffi::U16, DType::other, "uint16"},
    {ffi::U32, DType::other, "uint32"},
    {ffi::U64, DType::other, "uint64"},
    {ffi::F4E2M1FN, DType::other, "float4_e2m1fn"},
    {ffi::F8E4M3, DType::other, "float8_e4m3"},
    {ffi::F8E3M4, DType::other, "float8_e3m4"},
    {ffi::F8E4M3B11FNUZ, DType::other, "float8_e4m3b11fnuz"},
    {ffi::F8E5M2FNUZ, DType::other, "float8_e5m2fnuz"},
    {ffi::F8E4M3FNUZ, DType::other, "float8_e4m3fnuz"},
};

template <class T>
T read(ffi::Dictionary const& attributes, std::string_view name) {
  ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (value.has_error()) misfit(std::string(name), value.error().message());
  return value.value();
}

}  // namespace

void misfit(std::string const& argument, std::string const& text) {
  throw CallFailure{{Error::Kind::runtime, argument, text}};
}

std::vector<Entry> entries(std::string_view text) {
  std::vector<Entry> result;
  while (!text.empty()) {
    std::string_view const word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    Entry entry;
    size_t const end = std::min(word.find('['), word.find(':'));
    entry.name = std::string(word.substr(0, end));
    if (end < word.size() && word[end] == ':') {
      entry.bytes_of = dtype_named(std::string(word.substr(end + 1)));
    } else if (end < word.size()) {
      for (char letter : word.substr(end)) {
        if (letter >= '0' && letter <= '9') entry.axes.push_back(letter - '0');
      }
    }
    result.push_back(std::move(entry));
  }
  return result;
}

Tensor describe(Entry const& entry, ffi::AnyBuffer const& buffer, Device device) {
  Tensor result;
  result.dtype = DType::other;
  for (Code const& code : kCodes) {
    if (code.code == buffer.element_type()) result.dtype = code.dtype, result.dtype_name = code.name;
  }
  result.device = device;
  result.data = buffer.untyped_data();
  auto const sizes = buffer.dimensions();
  std::vector<int64_t> size(sizes.begin(), sizes.end()), stride(size.size(), 1);
  if (entry.bytes_of != DType::none && size.size() == 1) {
    result.dtype = entry.bytes_of;
    result.dtype_name = name_of(entry.bytes_of);
    size[0] /= bytes_of(entry.bytes_of);
  }
  for (size_t i = size.size(); i-- > 1;) stride[i - 1] = stride[i] * size[i];
  result.rank = int(size.size());
  if (!entry.axes.empty() && entry.axes.size() != size.size()) {
    misfit(entry.name,
           "expected " + std::to_string(entry.axes.size()) + " dimensions, got " + std::to_string(size.size()));
  }
  for (int i = 0; i < result.rank && i < Tensor::kMaxRank; ++i) {
    size_t const axis = entry.axes.empty() ? size_t(i) : size_t(entry.axes[i]);
    if (axis >= size.size()) misfit(entry.name, "expected axes of the buffer, got " + std::to_string(axis));
    result.size[i] = size[axis];
    result.stride[i] = stride[axis];
  }
  result.freed = !result.data && result.numel() > 0;
  return result;
}

std::string_view attribute(ffi::Dictionary const& attributes, std::string_view name) {
  return read<std::string_view>(attributes, name);
}

void read_option(ffi::Dictionary const& attributes, char const* name, bool& into) {
  if (attributes.contains(name)) into = read<bool>(attributes, name);
}
void read_option(ffi::Dictionary const& attributes, char const* name, int64_t& into) {
  if (attributes.contains(name)) into = read<int64_t>(attributes, name);
}
void read_option(ffi::Dictionary const& attributes, char const* name, double& into) {
  if (attributes.contains(name)) into = read<double>(attributes, name);
}
void read_option(ffi::Dictionary const& attributes, char const* name, std::string& into) {
  if (attributes.contains(name)) into = std::string(attribute(attributes, name));
}
void read_option(ffi::Dictionary const& attributes, char const* name, DType& into) {
  if (attributes.contains(name)) into = dtype_named(std::string(attribute(attributes, name)));
}
void read_option(ffi::Dictionary const& attributes, char const* name, std::vector<int64_t>& into) {
  if (!attributes.contains(name)) return;
  auto const values = read<ffi::Span<int64_t const>>(attributes, name);
  into.assign(values.begin(), values.end());
}

}  // namespace cudnn_grouped::bindings
