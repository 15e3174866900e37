// A pool seen from Python.
#pragma once

#include <pybind11/pybind11.h>

#include "pool.h"

namespace memkit {

// Adds Pool and PoolBase to the module.
void bind_pool(pybind11::module_& m);

// Functions with the pool bound to them, by name: empty(*size, ...), empty_strided(size, stride, ...), empty_op, which is
// empty through the dispatcher as the registered operator; zeros, ones and full.
pybind11::dict pool_functions(const std::shared_ptr<Pool>& pool);

// A base class: what its instances hold as `_empty`, `_zeros`, `_ones` and `_full` is found under the names without the
// line, whatever its subclasses define there.
pybind11::object make_pool_base();

}  // namespace memkit
