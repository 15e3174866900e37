// Group norm of channels last on the CPU: each sample is rows of its channels, whose moments and sums are put together by
// groups.
#pragma once

#include "channel_engine.h"

namespace memkit {

void moments_by_samples(const ChannelCall& call);
void forward_by_samples(const ChannelCall& call);
void sums_by_samples(const ChannelCall& call, double* dz, double* dz_x_hat, double* c1, double* c2);
void backward_by_samples(const ChannelCall& call, const double* c1, const double* c2);

}  // namespace memkit
