// What cross_entropy and linear_cross_entropy share: options, checks, and the way from tensors to the kernels.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string_view>
#include <utility>

#include "../formulas/loss.h"
#include "optional.h"

namespace memkit {

// As the operators take them.
struct LossOptions {
  int64_t reduction = 1;  // at::Reduction
  int64_t ignore_index = -100;
  double smoothing = 0, z = 0, cap = 0;
};

// As Tensor::to, without a call where nothing changes.
at::Tensor in_dtype(const at::Tensor& x, at::ScalarType dtype);

int64_t reduction_of(std::string_view op, std::string_view name);
double softcap_of(std::string_view op, std::optional<double> softcap);

// The dtype that the loss of logits of this dtype is computed in, and that of the result.
at::ScalarType wide_dtype(at::ScalarType dtype);
at::ScalarType loss_dtype(const at::Tensor& logits);

// Refuses what does not belong together: logits of this shape, on the device of the target.
void check_loss(std::string_view op, c10::SymIntArrayRef logits, c10::Device device, const at::Tensor& target,
                const OptionalTensor& weight, const LossOptions& options);

// The shape of the losses, one a row: without the class dimension.
c10::SymDimVector rows_shape(c10::SymIntArrayRef logits);

// Target and class weights as the kernels read them, for logits of [outer, classes, inner].
class LossCall {
 public:
  // channels_last: the class dimension lies last in memory though not in shape.
  LossCall(std::string_view op, const at::Tensor& target, const OptionalTensor& weight, const LossOptions& options,
           at::ScalarType dtype, int64_t rows, int64_t classes, int64_t inner, bool channels_last);

  // The kernel's arguments for rows [first, first + count) of rows whose classes are neighbours, or for all.
  LossArgs rows(int64_t first, int64_t count) const;
  LossArgs all() const { return args_; }

  // The dtype that the kernels write losses in which are wanted in `dtype`.
  at::ScalarType losses_dtype(at::ScalarType dtype) const;
  // Where the numbers a row go: losses of that dtype (may be undefined), stats [2, rows].
  void set_results(const at::Tensor& losses, const at::Tensor& stats);
  // The incoming gradient: one number or one a row; total as below.
  void set_grad(const at::Tensor& grad, const at::Tensor& total);
  void set_grad(double grad, const at::Tensor& total);

  // What the losses' sum is divided by, [] in wide dtype; [0] where by nothing.
  at::Tensor total() const;
  // The losses as they are wanted, in `dtype`, and the total.
  std::pair<at::Tensor, at::Tensor> reduce(at::ScalarType dtype) const;

 private:
  at::Tensor empty_total() const;
  // On CUDA: into the total, unless it is empty, and the loss, unless it is undefined.
  void reduce_into(const at::Tensor& total, const at::Tensor& loss) const;

  LossArgs args_;
  at::ScalarType dtype_, wide_;
  int64_t reduction_;
  at::Tensor target_, weight_, weight_sum_, losses_, grad_, total_;
};

void run_loss(LossPass pass, const LossArgs& args, c10::Device device);

// The same loss in ATen's own differentiable operators, for logits of a wide dtype: where memkit's kernels do not apply.
at::Tensor stock_cross_entropy(const at::Tensor& logits, const at::Tensor& target, const OptionalTensor& weight,
                               const LossOptions& options);

}  // namespace memkit
