// Runs the norms' kernels on the device their tensors live on.
#pragma once

#include <memory>
#include <optional>

#include "../formulas/norm.h"
#include "row_norm.h"

namespace memkit {

void run_row_norm_forward(const RowNormArgs& args, c10::Device device);

// args.partial is set here, if the gradient of weight or bias is wanted: where those are defined.
void run_row_norm_backward(RowNormArgs args, const at::Tensor& grad, at::Tensor& grad_weight, at::Tensor& grad_bias);

// A measurement of weights (WeightCheck in formulas/norm.h). On CUDA it runs beside the program.
class WeightMeasurement {
 public:
  void start(const RowNorm& norm, const at::Tensor& weight, const OptionalTensor& bias);
  bool done();
  // What runs is done then, unless a graph is captured, while which nobody may wait.
  void wait();
  // What the last measurement that is done has found; nothing where there is none yet.
  std::optional<int> flaws();

 private:
  std::optional<int> flaws_;
  struct Pending;
  std::shared_ptr<Pending> pending_;
};

}  // namespace memkit
