// Runs the norms' kernels on the device their tensors live on.
#pragma once

#include <memory>

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
  // As far as known: what the last measurement that is done has found.
  int flaws();

 private:
  int flaws_ = kIllConditioned;
  struct Pending;
  std::shared_ptr<Pending> pending_;
};

}  // namespace memkit
