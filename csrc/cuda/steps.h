// The two directions. Work goes by chunks of 64 columns of C: two units of 32. A unit of the backward's GEMM meets
// kWidth units of C and gives as many of D; kWidth units of the forward's GEMM give one of D.
#pragma once

namespace cudnn_grouped::cuda {

inline constexpr int kUnit = 32;

template <class ActivationT>
struct Backward {
  using Activation = ActivationT;
  static constexpr bool kForward = false;
  static constexpr int kWidth = Activation::kWidth, kGroups = 2 / kWidth;
  static constexpr int kAccUnits = kGroups, kDUnits = 2;  // of a chunk
  static constexpr bool kHasBias = kWidth == 1;           // dglu has none
  static constexpr int kInputs = 1, kOutputs = kWidth;    // accumulators and values of D of one element
};

template <class ActivationT>
struct Forward {
  using Activation = ActivationT;
  static constexpr bool kForward = true;
  static constexpr int kWidth = Activation::kWidth, kGroups = 2 / kWidth;
  static constexpr int kAccUnits = 2, kDUnits = kGroups;
  static constexpr bool kHasBias = true;
  static constexpr int kInputs = kWidth, kOutputs = 1;
};

}  // namespace cudnn_grouped::cuda
