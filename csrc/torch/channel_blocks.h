// Batch and group norm on the CPU, all passes over a part of the tensor while it is in the cache.
#pragma once

#include "channel_engine.h"

namespace memkit {

// Group norm where there are groups for all threads. A group's elements lie one behind the other: all passes are over some
// groups, which are in the cache after the first. One sample of planes of one element is columns, whose sums are over
// ranges of rows.
bool by_blocks(const ChannelCall& call);
void norm_by_blocks(const ChannelCall& call);
void gradients_by_blocks(const ChannelCall& call, double* dz, double* dz_x_hat);

// Batch norm of planes where there are channels for all threads: the gradients of some channels at a time. `last` is what
// the second pass is called with.
bool by_channels(const ChannelCall& call);
void gradients_by_channels(const ChannelCall& call, const ChannelCall& last, double* dz, double* dz_x_hat, double* c1,
                           double* c2);

}  // namespace memkit
