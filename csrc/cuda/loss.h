// Cross entropy on a CUDA stream.
#pragma once

#include <algorithm>

#include "../formulas/loss.h"

struct CUstream_st;

namespace memkit::cuda {

// Returns a cudaError_t. A class index out of range stops the kernel, as PyTorch's own does.
int cross_entropy(LossPass pass, const LossArgs& args, CUstream_st* stream);

// Where the sums over all rows go.
struct LossResult {
  void* total = nullptr;  // wide: what the losses' sum is divided by; null: by nothing
  void* loss = nullptr;   // of `dtype`; null: not asked for
  Dtype dtype = Dtype::float32;
  LossSum* parts = nullptr;  // of more than one block, a sum each
};

// Blocks that share out the rows: a function of their number alone, as is the order of the sums.
inline int reducing_blocks(int64_t rows) {
  constexpr int64_t alone = 16384, each = 8192, most = 1024;
  return rows <= alone ? 1 : int(std::min((rows + each - 1) / each, most));
}
int reduce_losses(const LossArgs& args, const LossResult& result, CUstream_st* stream);

}  // namespace memkit::cuda
