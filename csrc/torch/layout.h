// Which tensors the kernels can walk as a flat array, and in which order.
#pragma once

#include <ATen/core/Tensor.h>

namespace memkit {

// Without a bias any dense memory order will do; with one, the bias's dimension must be found from the flat index.
inline bool is_walkable(const at::Tensor& x, bool biased, int64_t dim) {
  if (!biased) return x.is_non_overlapping_and_dense();
  const bool channels = dim == 1 || dim == 1 - x.dim();
  return x.is_contiguous() || (channels && (x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
                                            x.is_contiguous(at::MemoryFormat::ChannelsLast3d)));
}

// The strides of the order the kernels walk x in: its own, or those of the contiguous copy made of it.
inline c10::SymDimVector walk_strides(const at::Tensor& x, bool biased, int64_t dim) {
  if (is_walkable(x, biased, dim)) return c10::SymDimVector(x.sym_strides().begin(), x.sym_strides().end());
  c10::SymDimVector strides(x.dim());
  c10::SymInt step = 1;
  for (int64_t d = x.dim() - 1; d >= 0; --d) {
    strides[d] = step;
    step = step * x.sym_size(d).max(1);
  }
  return strides;
}

// Whether two tensors of these sizes lie in one order of memory: a stride along one element says nothing.
inline bool same_order(c10::SymIntArrayRef sizes, c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a == b) return true;
  if (a.size() != b.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d].maybe_as_int() != 1 && a[d] != b[d]) return false;
  return true;
}
inline bool same_order(const at::Tensor& a, const at::Tensor& b) {
  return same_order(a.sym_sizes(), a.sym_strides(), b.sym_strides());
}

}  // namespace memkit
