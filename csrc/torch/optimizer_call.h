// The lists of an optimizer's step, kept from step to step; the part of it that Python would do a tensor at a time.
#pragma once

#include <pybind11/pybind11.h>

namespace memkit {

void bind_optimizers(pybind11::module_& m);

}  // namespace memkit
