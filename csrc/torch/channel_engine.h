// Runs the kernels of batch and group norm on the device their tensors live on.
#pragma once

#include <ATen/core/Tensor.h>

#include "../cuda/channel_norm.h"

namespace memkit {

// A call with all that its passes need; tensors that the pointers lead to are the caller's.
struct ChannelCall {
  ChannelArgs args;
  at::ScalarType computed;  // what terms are of; on the CPU weight and bias too, and statistics are double
  int64_t groups = 0;       // of group norm
  int64_t samples = 0;      // of group norm of channels last, whose args are of one; else 0
  // The engine may split channels and join rows: those of args are `repeat` times all channels, each `together` times in a row.
  int64_t together = 1, repeat = 1;
  double eps = 0;
  cuda::Numbers weight, bias, mean, variance;
  cuda::Running running;  // moved by run_channel_norm where they are given; CUDA
  void* dz = nullptr;     // where sums leave what the activation's slope made of grad, in grad's type; CPU
  c10::Device device = c10::kCPU;
};

void run_channel_moments(const ChannelCall& call);
void run_channel_forward(const ChannelCall& call);
// Into dz and dz_x_hat, one a channel, and c1 and c2, one a statistic.
void run_channel_sums(const ChannelCall& call, double* dz, double* dz_x_hat, double* c1, double* c2);
void run_channel_backward(const ChannelCall& call, const double* c1, const double* c2);

// Moments and what is made of them; sums and what is made of them. CUDA has gradients_on_stream.
void run_channel_norm(const ChannelCall& call);
void run_channel_gradients(const ChannelCall& call, double* dz, double* dz_x_hat);

}  // namespace memkit
