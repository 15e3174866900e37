// LayerNorm and RMSNorm over the last dimensions of a tensor: what a call asks for, and its passes below autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "../formulas/norm.h"
#include "optional.h"

namespace torch::autograd {
struct Node;
}

namespace memkit {

struct SavedNode;

struct RowNorm {
  int64_t dims;  // how many dimensions, from the last one but `behind`
  double eps;
  bool centered;         // LayerNorm; else RMSNorm
  at::ScalarType dtype;  // of the output
  int64_t behind = 0;
  Denominator denominator = Denominator::root;

  // Of the function of memkit.functional.
  std::string_view name() const {
    return centered ? "layer_norm" : denominator == Denominator::norm ? "normalize" : "rms_norm";
  }
  // Where those dimensions start and end.
  int64_t first(int64_t dim) const { return dim - behind - dims; }
  int64_t last(int64_t dim) const { return dim - behind; }
  // Their sizes, of an input's.
  template <class T>
  c10::ArrayRef<T> shape(c10::ArrayRef<T> sizes) const {
    return sizes.slice(first(sizes.size()), dims);
  }
};

// By its name, "root", "deviation", "sample_deviation" or "norm"; `op` asks.
Denominator denominator_of(std::string_view name, std::string_view op = "norm");
std::string_view name_of(Denominator denominator);

// Raises on what the kernels do not take.
void check_row_norm(const RowNorm& norm, const at::Tensor& input, const OptionalTensor& residual,
                    const OptionalTensor& weight, const OptionalTensor& bias);

// What is computed in: float64 for float64, else float32.
inline at::ScalarType compute_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// float32, unless autocast says otherwise for this input.
at::ScalarType norm_output_dtype(const at::Tensor& input);

// What backward needs of each row: from an output it starts without the mean.
enum class Statistics { none, rstd, mean_and_rstd };

struct RowNormed {
  at::Tensor out, sum, mean, rstd;  // undefined where not wanted; sum: of input and residual
};

// into: memory for the result, where there is some: with a residual for the sum, else for the output.
RowNormed row_norm_forward(const RowNorm& norm, const at::Tensor& input, const OptionalTensor& residual,
                           const OptionalTensor& weight, const OptionalTensor& bias, Statistics statistics,
                           at::Tensor into = {});

struct RowNormGradients {
  at::Tensor input, weight, bias;  // undefined where not wanted
};

// saved: the input (with a residual, the sum), of dtype input_dtype, or the output. reuse: the memory of grad, or of
// grad_sum, may be taken.
RowNormGradients row_norm_backward(const RowNorm& norm, const at::Tensor& grad, const OptionalTensor& grad_sum,
                                   const at::Tensor& saved, const OptionalTensor& weight, const OptionalTensor& bias,
                                   const at::Tensor& mean, const at::Tensor& rstd, bool from_output,
                                   at::ScalarType input_dtype, std::array<bool, 3> wanted, at::Tensor into = {});

// The same in ATen's own operators, for function transforms and derivatives of derivatives.
std::vector<int64_t> normalised_dims(const RowNorm& norm);
// A weight, bias or statistic, ready to broadcast.
at::Tensor along_columns(const RowNorm& norm, at::Tensor parameter);
at::Tensor stock_row_norm(const RowNorm& norm, const at::Tensor& input, const OptionalTensor& weight,
                          const OptionalTensor& bias);
RowNormGradients stock_row_norm_backward(const RowNorm& norm, const at::Tensor& grad, const OptionalTensor& grad_sum,
                                         const at::Tensor& x_hat, const OptionalTensor& weight, const at::Tensor& rstd,
                                         at::ScalarType input_dtype, std::array<bool, 3> wanted);
// The same of the input; with a residual, of the sum. With one derivative, or `again` with more.
RowNormGradients composed_row_norm_backward(const RowNorm& norm, const at::Tensor& grad, const OptionalTensor& grad_sum,
                                            const at::Tensor& input, const OptionalTensor& weight,
                                            std::array<bool, 3> wanted, bool again);
// An input that gives the result and the gradients that this one gave: where a mean was taken off, without it.
at::Tensor stock_input(const RowNorm& norm, const at::Tensor& out, const OptionalTensor& weight,
                       const OptionalTensor& bias, const at::Tensor& rstd, at::ScalarType input_dtype);

// In place, for plain tensors in eager mode: the output in the input's memory, or the sum in the residual's.
at::Tensor& row_norm_(const RowNorm& norm, at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias);
std::tuple<at::Tensor, at::Tensor> add_row_norm_(const RowNorm& norm, const at::Tensor& input, at::Tensor& residual,
                                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                                 std::string_view save);

// "input" or "output" where autograd recorded the tensor as the result of one of these norms, else "".
std::string_view row_norm_saves(const at::Tensor& x);
// The node, if it is of a norm over rows.
const SavedNode* row_norm_of(const torch::autograd::Node& node);

}  // namespace memkit
