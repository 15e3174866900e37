// How the elements of a call are walked on the CPU: as planes or columns, in how many parts.
#pragma once

#include "channel_engine.h"

namespace memkit {

constexpr int64_t kChannelGrain = 32768;  // elements below which one thread is faster than two
// A loop over a plane costs as much as some elements do: smaller planes are columns, if there are as many rows as a plane
// has elements, which pays for terms for every element of a row. Sums over a plane, which end in adding up partial sums,
// cost more.
constexpr int64_t kSmallPlane = 32, kSmallPlaneOfSums = 128;

// What moments and sums are taken of, `count` in all: in the layout of columns each channel in `ways` ranges of rows, else
// planes.
struct ChannelParts {
  int64_t ways, count;
};

ChannelParts parts_of(const ChannelCall& call);

// The moments of a group are those of a plane of all its channels; on CUDA as well.
ChannelCall by_groups(ChannelCall call);

// Batch norm of small planes: the elements of a plane become channels of their own, with the same terms.
ChannelCall by_columns(ChannelCall call, int64_t small);

// Columns of few channels: some rows become one, whose channels are theirs one after the other. Not for
// moments, whose parts have to be of known sizes.
ChannelCall by_long_rows(ChannelCall call);

}  // namespace memkit
