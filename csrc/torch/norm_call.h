// The norms as Python calls them in eager mode.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace memkit {

void bind_norms(pybind11::module_& m);
void bind_channel_norms(pybind11::module_& m);

}  // namespace memkit
