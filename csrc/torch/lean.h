// memkit.lean(): saved tensors that are results of memkit's cheap operators are dropped and computed again in backward,
// concatenations joined again; of those that are mostly zeros and have to be kept, the rest is.
#pragma once

#include <pybind11/pybind11.h>

namespace memkit {

// Adds to the module:
//   recipe(tensor, asks_again=False) -> packed | None    how to make the tensor again; None where it has to be kept
//   nonzeros(tensor) -> (packed, values, bits) | None    the part of it that is not zero; None where that is most of it
//   spread(packed, values, bits) -> Tensor               what it came from
//   keep(tensor, keep, give_back) -> packed              what the hooks around make of it
//   concatenation(tensor, keep, give_back) -> packed | None    its parts, where most are kept anyway
//   note_joined(tensor, tensors)        which tensors a concatenation was made of, for what is kept next
//   copy_parameters(copies)             whether memory of parameters may be gone when something is made again of them
//   pack(tensor) -> packed             the recipe, its parts, its nonzero elements, or the tensor
//   unpack(packed) -> Tensor | None    what any of these came from; None for anything else
void bind_lean(pybind11::module_& m);

}  // namespace memkit
