// Weight and bias of a norm as its loops read them.
#pragma once

#include <memory>

#include "../formulas/norm.h"
#include "chunks.h"

namespace memkit::cpu {

// Arrays of T: converted once a call where they are not, and made up where there are none.
template <class Lanes, class T>
class Affine {
 public:
  MEMKIT_FN explicit Affine(const RowNormArgs& args) {
    weight = fill(args.weight, args, T(1), own_weight_);
    if (args.centered) bias = fill(args.bias, args, T(0), own_bias_);
  }

  // Of the weight 1 / w, from which the input follows.
  MEMKIT_FN const T* inverse(int64_t columns) {
    own_inverse_.reset(new T[columns]);
    for (int64_t i = 0; i < columns; ++i) own_inverse_[i] = inverse_weight(weight[i]);
    return own_inverse_.get();
  }

  const T* weight;
  const T* bias = nullptr;

 private:
  MEMKIT_FN static const T* fill(const void* from, const RowNormArgs& args, T missing, std::unique_ptr<T[]>& own) {
    if (from && size_of(args.weight_dtype) == sizeof(T)) return static_cast<const T*>(from);
    own.reset(new T[args.columns]);
    if (from) return read<Lanes>(from, args.weight_dtype, 0, args.columns, own.get());
    for (int64_t i = 0; i < args.columns; ++i) own[i] = missing;
    return own.get();
  }

  std::unique_ptr<T[]> own_weight_, own_bias_, own_inverse_;
};

}  // namespace memkit::cpu
