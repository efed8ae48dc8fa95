// The one problem description. Arguments is what a caller gave; validate() turns it into a GroupedGemm, which is what
// every engine receives: sizes, dtypes, pointers, options. Plain data.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "activation.h"
#include "tensor.h"

namespace cudnn_grouped {

// dsrelu, dglu: GEMM, then the derivative of the activation at a saved C. dact: the same with the GEMM's value given.
// srelu, glu: GEMM, then the activation. mm: GEMM alone.
enum class Operation : uint8_t { dsrelu, dglu, dact, srelu, glu, mm };
inline bool is_forward(Operation o) { return o == Operation::srelu || o == Operation::glu || o == Operation::mm; }
enum class OperandFormat : uint8_t { bf16, e4m3, e5m2, e2m1 };
enum class Activation : uint8_t { none, srelu, clamped_srelu, swiglu, geglu, geglu_by_value, situglu };

inline bool is_fp4(DType d) { return d == DType::float4_e2m1fn_x2 || d == DType::uint8; }
inline bool is_fp8(DType d) { return d == DType::float8_e4m3fn || d == DType::float8_e5m2; }
// The operand format that a supported dtype of A and B means.
inline OperandFormat operand_format(DType d) {
  return d == DType::float8_e4m3fn ? OperandFormat::e4m3
         : d == DType::float8_e5m2 ? OperandFormat::e5m2
         : is_fp4(d)               ? OperandFormat::e2m1
                                   : OperandFormat::bf16;
}

// Offsets are multiples of this (m_aligned), so no M tile of any engine straddles two experts.
inline constexpr int64_t kRowAlignment = 256;
inline constexpr int64_t kMaxExperts = 1024;
inline constexpr int64_t kMaxRows = (int64_t(1) << 31) - (1 << 17);  // offsets are int32, and so are loops over rows
inline constexpr int64_t kQuantBlock = 32;                           // block length of the quantised outputs
inline constexpr int64_t kInterleave = 32;      // gate and up alternate in blocks of this many columns
inline constexpr int64_t kDbiasSlotRows = 128;  // rows behind one slot of the documented dbias workspace

struct Arguments {
  Operation operation = Operation::dsrelu;
  bool has_outputs = false;     // destination-passing form
  bool values_readable = true;  // false: metadata alone (check_support)

  // a is the GEMM's value itself in dact. c is an input of the backward operations and an output of the forward ones.
  Tensor a, c, padded_offsets, alpha, beta, prob, bias, sfa, norm_const, b_ptrs, sfb_ptrs;
  std::vector<Tensor> b, sfb;  // one dense tensor, or one per expert
  std::optional<int64_t> n;
  DType b_dtype = DType::none, c_dtype = DType::none, d_dtype = DType::none;
  std::string b_major = "k";
  bool generate_dbias = false, generate_c = false;
  bool generate_d = true, c_per_expert = false;  // dact

  int64_t sf_vec_size = 16;
  bool discrete_col_sfd = false;
  std::optional<bool> deterministic;
  std::vector<int64_t> mma_tiler_mn = {256, 256};
  std::optional<std::vector<int64_t>> cluster_shape_mn;
  bool vector_f32 = false, use_dynamic_sched = false;

  std::string c_role = "grad_output";  // dsrelu
  std::optional<double> tanh_clamp_scale;

  std::string act_func = "dswiglu";  // dglu, dact; without the d in glu
  std::optional<double> linear_offset;
  double geglu_alpha = 1.702, glu_clamp_max = 7.0, glu_clamp_min = -7.0;
  std::string clamp_grad = "mask";
  double situ_beta1 = 4.0, situ_beta2 = 25.0;
  std::optional<std::string> epilogue_op;
  bool use_single_group_runtime_offsets = false;

  Tensor d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col, dprob_workspace, dbias_workspace;
};

struct GroupedGemm {
  Operation operation;
  int64_t m, n, k, experts;  // n: columns of the GEMM
  int64_t width;             // saved columns that one activation takes: 1, or 2 (gate, up)
  Device device;

  OperandFormat operands;
  OperandFormat weights;  // B: as operands, or bf16 where the caller has dequantised it
  DType scale_dtype;      // none for BF16 operands
  int64_t sf_vec_size;
  DType c_dtype, d_dtype;

  void const* a;  // dact: the value of the GEMM, of a_dtype
  DType a_dtype;
  uint8_t const* sfa;
  // Weights: a dense tensor with a stride per expert (in bytes), or a table of addresses.
  void const* b;
  uint8_t const* sfb;
  int64_t b_expert_bytes, sfb_expert_bytes;
  int64_t const *b_pointers, *sfb_pointers;
  std::vector<int64_t> b_list, sfb_list;  // addresses of a list of tensors, in host memory
  bool b_is_n_major;

  void* c;            // read by the backward operations; written by the forward ones, where it may be null
  bool c_per_expert;  // dact: c has a row for each expert, for all of the expert's rows
  int32_t const* padded_offsets;
  // On the CPU, the offsets as they were when they were checked: another thread may write to the caller's tensor.
  std::vector<int32_t> checked_offsets;
  bool single_group;                              // padded_offsets is not read: the one expert owns all m rows
  float const *alpha, *beta, *prob, *norm_const;  // alpha, beta, prob null: 1
  bool alpha_squared;
  void const* bias;  // (experts, n), added to the scaled accumulator; times prob in mm
  DType bias_dtype;

  Activation activation;
  SquaredReLU<false> srelu;
  SquaredReLU<true> clamped_srelu;
  GeGLU<false> geglu;
  GeGLU<true> geglu_by_value;
  SiTUGLU situglu;
  EpilogueOp epilogue_op;

  // Outputs; null when absent (D in dact alone). amax is accumulated onto, and so are dprob and dbias unless they are
  // new.
  void *d_row, *d_col;
  bool sums_are_new;
  float* dprob;
  uint16_t* dbias;
  float* amax;  // (experts, amax_width())
  uint8_t *sfd_row, *sfd_col;
  bool discrete_col_sfd;
  // The documented workspaces of the deterministic class API: one slot per (row, N tile) and per (128 rows, column).
  float* dprob_slots;
  uint16_t* dbias_slots;

  bool deterministic, vector_f32, use_dynamic_sched;
  int64_t tile_m, tile_n, cluster_m, cluster_n;

  int32_t const* offsets() const { return checked_offsets.empty() ? padded_offsets : checked_offsets.data(); }
  bool forward() const { return is_forward(operation); }
  int64_t c_columns() const { return forward() ? n : n * width; }
  int64_t d_columns() const { return forward() ? n / width : n * width; }
  bool quantised() const { return is_fp8(d_dtype); }
  bool block_scaled() const { return operands != OperandFormat::bf16; }
  bool scaled_weights() const { return weights != OperandFormat::bf16; }
  int64_t amax_width() const { return forward() ? 1 : width; }
  // amax is returned for block-scaled operands with a 16-bit D (decisions F9).
  bool has_amax() const { return block_scaled() && (d_dtype == DType::bfloat16 || d_dtype == DType::float16); }
};

// Slots of the documented dprob workspace: the scheduler counts whole clusters of N tiles (dsrelu.txt, "grid_n").
constexpr int64_t grid_n(int64_t n, int64_t tile_n, int64_t cluster_n) {
  return ceil_div(n, tile_n * cluster_n) * cluster_n;
}

struct Error {
  enum class Kind : uint8_t { value, not_implemented, runtime } kind;
  std::string argument, text;  // "expected X, got Y (hint)"
  std::string message() const { return argument + ": " + text; }
};

// Every check of every argument, before anything is allocated or written. Never throws an Error.
CG_API std::optional<Error> validate(Arguments const& arguments, GroupedGemm& problem);

}  // namespace cudnn_grouped
