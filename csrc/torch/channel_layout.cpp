#include "channel_layout.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace memkit {
namespace {

constexpr int64_t kRowsOfColumns = 4;  // the fewest that pay for terms for every element of a row
constexpr int64_t kShortRow = 512;     // elements of rows of columns that are walked as one

}  // namespace

ChannelCall by_groups(ChannelCall call) {
  if (call.groups) {
    call.args.inner *= call.args.channels / call.groups;
    call.args.channels = call.groups;
    call.args.sets = call.args.planes();
  }
  return call;
}

ChannelCall by_columns(ChannelCall call, int64_t small) {
  ChannelArgs& args = call.args;
  if (call.groups == 0 && args.inner < small && args.outer >= std::max(kRowsOfColumns, args.inner)) {
    call.together = args.inner;
    args.channels = args.sets = args.channels * args.inner;
    args.inner = 1;
  }
  return call;
}

ChannelCall by_long_rows(ChannelCall call) {
  ChannelArgs& args = call.args;
  if (!args.columns()) return call;
  while (2 * args.channels <= kShortRow && args.outer % 2 == 0 && args.outer >= 2 * kRowsOfColumns)
    args.outer /= 2, args.channels *= 2, args.sets *= 2, call.repeat *= 2;
  return call;
}

ChannelParts parts_of(const ChannelCall& call) {
  const ChannelArgs& args = call.args;
  if (!args.columns()) return {1, args.planes()};
  const int64_t most = std::max<int64_t>(1, args.numel() / kChannelGrain);
  const int64_t ways = std::max<int64_t>(1, std::min<int64_t>({at::get_num_threads(), most, args.outer}));
  return {ways, ways * args.channels};
}

}  // namespace memkit
