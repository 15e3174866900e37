// The eager entry of memkit.functional: a METH_FASTCALL function, because a torch.ops call costs 3 to 5 µs of argument
// matching where PyTorch's own activations take about 1 µs in all.
#pragma once

#include <pybind11/pybind11.h>

namespace memkit {

// Adds activation(op, input, bias, dim, params, inplace, save) -> Tensor | None to the module. None: not an ordinary
// eager tensor call; the caller takes torch.ops instead.
void bind_fast_call(pybind11::module_& m);

// Adds cross_entropy(input, target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap, inplace).
void bind_losses(pybind11::module_& m);

}  // namespace memkit
