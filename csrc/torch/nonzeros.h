// A tensor with many zeros as its other elements and a bit each: less memory from forward to backward, to the bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace memkit {

struct Nonzeros {
  at::Tensor values;  // in the order of memory
  at::Tensor bits;    // int64 [elements / 64, rounded up]: bit k of word w is set where element 64 w + k is not zero

  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> starts;  // how many there are before each unit of cpu/nonzeros.h, and of all
  int64_t version = 0;          // of the tensor when they were taken from it
  bool negative_zero = false;   // whether -0.0 is among them

  int64_t count() const { return starts.back(); }
  int64_t words() const;
  // Whether the bits are of as many elements as there were; others would have `spread` go beyond the memory.
  bool fits() const;
  // The tensor, in new memory of the same order.
  at::Tensor spread() const;
};

// Nothing where that is no tensor on the CPU in one piece, it is small, or more than three quarters of the bytes would be
// left.
std::optional<Nonzeros> nonzeros_of(const at::Tensor& x);

// Finds them again as long as somebody keeps their memory.
class NonzerosRef {
 public:
  explicit NonzerosRef(Nonzeros nonzeros);
  std::optional<Nonzeros> lock() const;

 private:
  using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

  Nonzeros frame_;  // without its tensors
  Memory values_, bits_;
};

}  // namespace memkit
