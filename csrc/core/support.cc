#include "support.h"

namespace cudnn_grouped {
namespace {

struct DTypeName {
  DType dtype;
  char const* name;
  int bytes;
};
constexpr DTypeName kDTypes[] = {
    {DType::none, "None", 0},
    {DType::float32, "float32", 4},
    {DType::float16, "float16", 2},
    {DType::bfloat16, "bfloat16", 2},
    {DType::float8_e4m3fn, "float8_e4m3fn", 1},
    {DType::float8_e5m2, "float8_e5m2", 1},
    {DType::float8_e8m0fnu, "float8_e8m0fnu", 1},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2", 1},
    {DType::uint8, "uint8", 1},
    {DType::int32, "int32", 4},
    {DType::int64, "int64", 8},
    {DType::float64, "float64", 8},
    {DType::int8, "int8", 1},
    {DType::int16, "int16", 2},
    {DType::boolean, "bool", 1},
    {DType::other, "another dtype", 1},
};

}  // namespace

char const* name_of(DType dtype) { return kDTypes[int(dtype)].name; }
int64_t bytes_of(DType dtype) { return kDTypes[int(dtype)].bytes; }

DType dtype_named(std::string const& name) {
  for (DTypeName const& entry : kDTypes) {
    if (name == entry.name) return entry.dtype;
  }
  return DType::other;
}

char const* name_of(Operation operation) {
  static constexpr char const* names[] = {"dsrelu", "dglu", "dact", "srelu", "glu", "mm"};
  return names[int(operation)];
}

// dGLU has one N tile in the documents.
std::vector<int64_t> const& tile_ns(Operation operation) {
  static std::vector<int64_t> const both = {128, 256}, one = {256};
  return operation == Operation::dglu ? one : both;
}

std::vector<std::string> const& activation_names(Operation operation) {
  using Names = std::vector<std::string>;
  static Names const none, forward = {"swiglu", "geglu", "situglu"}, backward = {"dswiglu", "dgeglu", "dsituglu"},
                           any = {"dsrelu", "dswiglu", "dgeglu", "dsituglu", "identity"};
  switch (operation) {
    case Operation::glu:
      return forward;
    case Operation::dglu:
      return backward;
    case Operation::dact:
      return any;
    default:
      return none;
  }
}

std::vector<SupportRow> const& support_rows() {
  using D = DType;
  static std::vector<SupportRow> const rows = [] {
    std::vector<D> const fp8 = {D::float8_e4m3fn, D::float8_e5m2}, fp4 = {D::float4_e2m1fn_x2, D::uint8};
    std::vector<D> const plain = {D::bfloat16, D::float16, D::float32};
    std::vector<D> const any = {D::float32, D::float16, D::bfloat16, D::float8_e4m3fn, D::float8_e5m2};
    std::vector<SupportRow> table;
    for (Operation o : {Operation::dsrelu, Operation::dglu, Operation::srelu, Operation::glu, Operation::mm}) {
      auto const& activations = activation_names(o);
      table.push_back({o, "BF16", {D::bfloat16}, {}, plain, plain, activations, {"k", "n"}, {}});
      table.push_back({o, "MXFP8", fp8, {{D::float8_e8m0fnu, 32}}, any, any, activations, {"k", "n"}, {D::bfloat16}});
      std::vector<std::pair<D, int>> const fp4_scales = {
          {D::float8_e4m3fn, 16}, {D::float8_e8m0fnu, 16}, {D::float8_e8m0fnu, 32}};
      table.push_back({o, "NVFP4, MXFP4", fp4, fp4_scales, any, plain, activations, {"k"}, {D::bfloat16}});
    }
    table.push_back(
        {Operation::dact, "the GEMM's value", plain, {}, any, plain, activation_names(Operation::dact), {}, {}});
    return table;
  }();
  return rows;
}

}  // namespace cudnn_grouped
