// memkit.lean(): saved tensors that are results of memkit's cheap operators are dropped and computed again in backward.
#pragma once

#include <pybind11/pybind11.h>

namespace memkit {

// Adds to the module:
//   recipe(tensor) -> capsule | None    how to make the tensor again; None where it has to be kept
//   pack(tensor) -> capsule             the recipe, or the tensor
//   unpack(capsule) -> Tensor | None    what either came from; None for anything else
void bind_lean(pybind11::module_& m);

}  // namespace memkit
