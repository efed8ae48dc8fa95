#include "check.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "device_values.h"
#include "scale_layout.h"

namespace cudnn_grouped {

void fail(std::string const& argument, std::string const& text) {
  throw CheckFailure{{Error::Kind::value, argument, text}};
}

void fail(std::string const& argument, std::string const& expected, std::string const& got, std::string const& hint) {
  fail(argument, "expected " + expected + ", got " + got + (hint.empty() ? "" : " (" + hint + ")"));
}

template <class T>
static std::string joined(View<T> values, char const* separator) {
  std::ostringstream out;
  for (size_t i = 0; i < values.size(); ++i) out << (i ? separator : "") << values[i];
  return out.str();
}

std::string text_of(Shape values) { return "(" + joined(values, ", ") + (values.size() == 1 ? ",)" : ")"); }
std::string text_of(DType dtype) { return name_of(dtype); }
std::string text_of(View<DType> dtypes) {
  std::vector<std::string> names;
  for (DType dtype : dtypes) names.push_back(name_of(dtype));
  return joined<std::string>(names, " or ");
}
std::string text_of(std::vector<std::string> const& values) {
  std::vector<std::string> quoted;
  for (std::string const& value : values) quoted.push_back('"' + value + '"');
  return joined<std::string>(quoted, " or ");
}
std::string text_of(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}
static Shape sizes_of(Tensor const& t) { return {t.size, size_t(std::min(t.rank, Tensor::kMaxRank))}; }
static Shape strides_of(Tensor const& t) { return {t.stride, size_t(std::min(t.rank, Tensor::kMaxRank))}; }
std::string shape_text(Tensor const& tensor) {
  if (tensor.rank > Tensor::kMaxRank) return "a tensor of rank " + std::to_string(tensor.rank);
  return "shape " + text_of(sizes_of(tensor));
}

std::string item_name(char const* list, int index) {
  return index < 0 ? list : std::string(list) + "[" + std::to_string(index) + "]";
}

TensorCheck const& TensorCheck::dtype(View<DType> allowed) const {
  for (DType dtype : allowed) {
    if (tensor_.dtype == dtype) return *this;
  }
  fail(name_, "dtype " + text_of(allowed), tensor_.dtype_name.empty() ? text_of(tensor_.dtype) : tensor_.dtype_name);
}

bool TensorCheck::has_shape(Shape expected) const {
  return tensor_.rank == int(expected.size()) && std::equal(expected.begin(), expected.end(), tensor_.size);
}

bool TensorCheck::has_strides(Shape expected) const {
  if (tensor_.numel() == 0) return true;
  for (int i = 0; i < std::min(tensor_.rank, int(expected.size())); ++i) {
    if (tensor_.size[i] != 1 && tensor_.stride[i] != expected[i]) return false;
  }
  return true;
}

TensorCheck const& TensorCheck::shape(Shape expected, std::string_view symbols, std::string_view hint) const {
  if (!has_shape(expected)) {
    std::string const text = "shape " + std::string(symbols) + " = " + text_of(expected);
    fail(name_, text, shape_text(tensor_), std::string(hint));
  }
  return *this;
}

TensorCheck const& TensorCheck::strides(Shape expected, std::string_view meaning) const {
  if (!has_strides(expected)) {
    std::string const text = "strides " + text_of(expected) + " (" + std::string(meaning) + ")";
    fail(name_, text, text_of(strides_of(tensor_)));
  }
  return *this;
}

TensorCheck const& TensorCheck::contiguous() const {
  int64_t expected[Tensor::kMaxRank], stride = 1;
  int const rank = std::min(tensor_.rank, Tensor::kMaxRank);
  for (int i = rank; i-- > 0; stride *= tensor_.size[i]) expected[i] = stride;
  return strides({expected, size_t(rank)}, "contiguous");
}

TensorCheck const& TensorCheck::aligned(int64_t bytes) const {
  int64_t const past = int64_t(reinterpret_cast<uintptr_t>(tensor_.data) % uintptr_t(bytes));
  if (past) {
    fail(name_, "an address that is a multiple of " + std::to_string(bytes) + " bytes",
         "one that is " + std::to_string(past) + " bytes past a multiple",
         "a slice of a larger buffer may start at an odd place");
  }
  return *this;
}

TensorCheck const& TensorCheck::experts() const {
  dtype({DType::int32});
  if (tensor_.rank != 1) fail(name_, "shape (L,)", shape_text(tensor_));
  int64_t const experts = tensor_.size[0];
  if (experts < 1 || experts > kMaxExperts) fail(name_, "1 to 1024 experts", std::to_string(experts));
  return contiguous().aligned(4);
}

TensorCheck const& TensorCheck::scalar() const {
  if (tensor_.rank > Tensor::kMaxRank || tensor_.numel() != 1) fail(name_, "shape (1,)", shape_text(tensor_));
  return dtype({DType::float32}).aligned(4);
}

TensorCheck const& TensorCheck::matrix(int64_t rows, int64_t columns, std::string_view symbols) const {
  int64_t const expected[] = {rows, columns, 1};
  if (!has_shape({expected, 2}) && !has_shape(expected)) shape(expected, "(" + std::string(symbols) + ", 1)");
  return strides({columns, 1, rows * columns}, "the second dimension contiguous").aligned(16);
}

TensorCheck const& TensorCheck::column(int64_t rows, std::string_view symbols) const {
  int64_t const expected[] = {rows, 1, 1};
  if (!has_shape({expected, 1}) && !has_shape(expected)) shape(expected, "(" + std::string(symbols) + ", 1, 1)");
  return strides({1, 1, 1}, "contiguous").aligned(bytes_of(tensor_.dtype));
}

void check_scales(TensorCheck const& check, std::string const& name, Tensor const& tensor, int64_t rows, int64_t blocks,
                  int64_t batch) {
  ScaleLayout const layout = ScaleLayout::of(rows, blocks);
  int64_t const r = layout.row_atoms, b = layout.block_atoms;
  int64_t const view[] = {32, 4, r, 4, b, batch}, physical[] = {batch, r, b, 32, 4, 4};
  int64_t const view_strides[] = {16, 4, b * 512, 1, 512, layout.bytes()}, flat[] = {batch * layout.bytes()};
  if (check.has_shape(flat) || check.has_shape(physical)) {
    check.contiguous();
  } else if (!check.has_shape(view)) {
    fail(name,
         "scale factors of shape " + text_of(view) + " with strides " + text_of(view_strides) +
             ", or contiguous of shape " + text_of(physical) + " or " + text_of(flat),
         shape_text(tensor), "pack_scales makes this layout from a plain (rows, blocks) tensor");
  } else if (!check.has_strides(view_strides)) {
    check.strides(view_strides, "the permuted view of a contiguous " + text_of(physical) + " buffer");
  }
  check.aligned(16);
}

void check_overlaps(View<NamedTensor> tensors, size_t outputs) {
  struct Range {
    size_t index;
    char const *begin, *end;
  };
  std::vector<Range> ranges;
  ranges.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    Tensor const& t = tensors[i].tensor;
    if (!t.present() || t.numel() == 0) continue;
    int64_t extent = 1;
    for (int d = 0; d < t.rank; ++d) extent += (t.size[d] - 1) * t.stride[d];
    char const* begin = static_cast<char const*>(t.data);
    ranges.push_back({i, begin, begin + extent * bytes_of(t.dtype)});
  }
  std::sort(ranges.begin(), ranges.end(), [](Range const& x, Range const& y) { return x.begin < y.begin; });
  // Of the ranges so far, the one that reaches furthest; and of the outputs among them.
  Range const *any = nullptr, *output = nullptr;
  for (Range const& range : ranges) {
    bool const is_output = range.index < outputs;
    Range const* before = is_output ? any : output;
    if (before && range.begin < before->end) {
      auto const [first, second] = std::minmax(range.index, before->index);
      fail(tensors[first].text(), "memory of its own", "memory that overlaps " + tensors[second].text());
    }
    if (!any || range.end > any->end) any = &range;
    if (is_output && (!output || range.end > output->end)) output = &range;
  }
}

void check_norm_value(float const* at, Device device) {
  float const norm = values_of<float>(at, 1, device)[0];
  if (!(std::isfinite(norm) && norm > 0.f)) fail("norm_const", "a finite number above 0", text_of(double(norm)));
}

std::vector<int32_t> checked_offset_values(Tensor const& offsets, int64_t m) {
  std::vector<int32_t> const ends = values_of<int32_t>(offsets.data, offsets.size[0], offsets.device);
  int64_t previous = 0;
  for (size_t g = 0; g < ends.size(); ++g) {
    int64_t const end = ends[g];
    auto refuse = [&](std::string const& expected, std::string const& hint = "") {
      fail(item_name("padded_offsets", int(g)), expected, std::to_string(end), hint);
    };
    if (end % kRowAlignment) {
      refuse("a multiple of " + std::to_string(kRowAlignment),
             "each expert's rows are padded to a multiple of 256: see padded_offsets_from_counts");
    }
    if (end < previous) {
      refuse("at least the end of the expert before, " + std::to_string(previous),
             "padded_offsets are cumulative ends, not counts");
    }
    if (end > m) refuse("at most M = " + std::to_string(m));
    previous = end;
  }
  return ends;
}

}  // namespace cudnn_grouped
