// memkit.lean(): saved tensors that are results of memkit's cheap operators are dropped and computed again in backward.
#pragma once

#include <pybind11/pybind11.h>

namespace memkit {

// Adds to the module:
//   pack(tensor) -> Recipe | None     a recipe that takes the tensor's place; None where it has to be kept
//   unpack(recipe) -> Tensor
void bind_lean(pybind11::module_& m);

}  // namespace memkit
