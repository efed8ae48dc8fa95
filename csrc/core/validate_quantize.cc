// The checks of quantize, dequantize and reduce_dbias.
#include "device_values.h"
#include "quantize_problem.h"
#include "scale_layout.h"

namespace cudnn_grouped {
namespace {

void check_format(DType data, DType scale, int64_t block, char const* data_name, char const* scale_name) {
  bool const fp4 = data == DType::float4_e2m1fn_x2;
  if (!is_fp8(data) && !fp4) {
    fail(data_name, "dtype float8_e4m3fn or float8_e5m2 or float4_e2m1fn_x2", text_of(data));
  }
  if (scale != DType::float8_e8m0fnu && !(fp4 && scale == DType::float8_e4m3fn)) {
    fail(scale_name, fp4 ? "dtype float8_e8m0fnu or float8_e4m3fn" : "dtype float8_e8m0fnu with FP8 data",
         text_of(scale));
  }
  bool const fits = is_fp8(data) ? block == 32 : block == 16 || (block == 32 && scale == DType::float8_e8m0fnu);
  if (!fits) {
    fail("sf_vec_size", is_fp8(data) ? "32 with FP8 data" : "16, or 32 with float8_e8m0fnu", std::to_string(block));
  }
}

// (R, C), (R, C, 1) or (R, C, L), C contiguous.
void check_matrix(TensorCheck const& check, char const* name, Tensor const& t) {
  if (t.rank != 2 && t.rank != 3) fail(name, "shape (R, C) or (R, C, L)", shape_text(t));
  check.strides({t.size[1], 1, t.size[0] * t.size[1]}, "C contiguous, then R, then L");
}

void run(QuantizeArguments const& in, QuantizeProblem& out) {
  Tensor const& given = in.dequantize ? in.data : in.x;
  char const* name = in.dequantize ? "data" : "x";
  auto check = [&](char const* n, Tensor const& t) { return TensorCheck(n, t, given.device); };
  bool const reads_values = in.values_readable && values_are_checked(given.device);
  if (!given.present()) fail(name, "a tensor", "None");
  if (in.axis != "row" && in.axis != "col") fail("axis", "\"row\" or \"col\"", '"' + in.axis + '"');
  out.by_column = in.axis == "col";
  out.block = in.sf_vec_size;
  out.data_dtype = in.dequantize ? in.data.dtype : in.dtype;
  if (out.data_dtype == DType::uint8) out.data_dtype = DType::float4_e2m1fn_x2;
  out.scale_dtype = in.dequantize ? in.scales.dtype : in.sf_dtype;
  if (in.dequantize && !in.scales.present()) fail("scales", "a tensor", "None");
  check_format(out.data_dtype, out.scale_dtype, out.block, in.dequantize ? "data" : "dtype",
               in.dequantize ? "scales" : "sf_dtype");
  out.x_dtype = in.dequantize ? (in.dtype == DType::none ? DType::float32 : in.dtype) : in.x.dtype;
  if (out.x_dtype != DType::float32 && out.x_dtype != DType::bfloat16 && out.x_dtype != DType::float16) {
    bool const unnamed = !in.dequantize && out.x_dtype == DType::other;
    fail(in.dequantize ? "dtype" : "x", "dtype float32 or bfloat16 or float16",
         unnamed ? in.x.dtype_name : text_of(out.x_dtype));
  }
  check_matrix(check(name, given), name, given);
  bool const fp4 = out.data_dtype == DType::float4_e2m1fn_x2, transposed = in.dequantize && fp4 && out.by_column;
  int64_t const columns = given.size[1] * (in.dequantize && fp4 ? 2 : 1);
  out.rows = transposed ? columns : given.size[0];
  out.columns = transposed ? given.size[0] : columns;
  out.batch = given.rank == 3 ? given.size[2] : 1;
  if (fp4 && (out.by_column ? out.rows : out.columns) % 2) {
    fail(name, "an even number of values along the blocks", std::to_string(out.by_column ? out.rows : out.columns),
         "FP4 is stored in pairs");
  }
  check(name, given).aligned(bytes_of(given.dtype));
  out.device = given.device;
  if (in.norm_const.present()) {
    check("norm_const", in.norm_const).scalar();
    out.norm_const = in.norm_const.as<float>();
    if (reads_values) check_norm_value(out.norm_const, given.device);
  }
  if (in.padded_offsets.present()) {
    TensorCheck const offsets = check("padded_offsets", in.padded_offsets);
    offsets.dtype({DType::int32});
    if (!out.by_column) fail("padded_offsets", "None with axis=\"row\"", "a tensor", "row scales have one form");
    if (out.batch != 1) fail("padded_offsets", "None with a batch", "a tensor");
    offsets.experts();
    if (out.rows % kRowAlignment) fail(name, "a number of rows that is a multiple of 256", std::to_string(out.rows));
    out.padded_offsets = in.padded_offsets.as<int32_t>();
    out.experts = in.padded_offsets.size[0];
    if (reads_values) checked_offset_values(in.padded_offsets, out.rows);
  }
  if (in.dequantize) {
    check_scales(check("scales", in.scales), "scales", in.scales, out.scale_rows(), out.scale_blocks(), out.batch);
    out.data = in.data.data;
    out.scales = in.scales.as<uint8_t>();
  } else {
    out.x = in.x.data;
  }
}

}  // namespace

std::optional<Error> validate(QuantizeArguments const& arguments, QuantizeProblem& problem) {
  problem = QuantizeProblem{};
  try {
    run(arguments, problem);
  } catch (CheckFailure const& failure) {
    return failure.error;
  }
  return std::nullopt;
}

std::optional<Error> validate(Tensor const& slots, Tensor const& padded_offsets, Tensor const& dbias,
                              DbiasReduction& reduction) {
  try {
    auto check = [&](char const* name, Tensor const& t) { return TensorCheck(name, t, slots.device); };
    if (slots.rank != 3 || slots.size[2] != 1) fail("slots", "shape (ceil(M/128), N, 1)", shape_text(slots));
    check("slots", slots).dtype({DType::bfloat16}).contiguous().aligned(2);
    check("padded_offsets", padded_offsets).dtype({DType::int32}).experts();
    int64_t const experts = padded_offsets.size[0], columns = slots.size[1];
    check("dbias", dbias).dtype({DType::bfloat16}).shape({experts, columns, 1}, "(L, N, 1)").contiguous().aligned(2);
    if (values_are_checked(slots.device)) checked_offset_values(padded_offsets, slots.size[0] * kDbiasSlotRows);
    reduction = {
        slots.device,        slots.size[0], columns, experts, slots.as<uint16_t>(), padded_offsets.as<int32_t>(),
        dbias.as<uint16_t>()};
  } catch (CheckFailure const& failure) {
    return failure.error;
  }
  return std::nullopt;
}

}  // namespace cudnn_grouped
