// Batch and group norm on a CUDA stream. What lies between the passes is kernels too, three launches each way, or all of it
// one kernel, a block for each statistic.
#pragma once

#include "channel_engine.h"

namespace memkit {

// Statistics alone; with the result and running statistics.
void moments_on_stream(const ChannelCall& call);
void norm_on_stream(const ChannelCall& call);
void move_running_on_stream(const cuda::Running& running, const double* mean, const double* variance, int64_t channels,
                            c10::Device device);
// With statistics that are given.
void forward_on_stream(const ChannelCall& call);

void sums_on_stream(const ChannelCall& call, double* dz, double* dz_x_hat, double* c1, double* c2);
void backward_on_stream(const ChannelCall& call, const double* c1, const double* c2);
// Both, with the parameters' gradients in whatever dtype they have, where they are wanted.
void gradients_on_stream(const ChannelCall& call, const cuda::Numbers& weight, const cuda::Numbers& bias);

}  // namespace memkit
