// A pool seen from Python.
#pragma once

#include <pybind11/pybind11.h>

#include "pool.h"

namespace memkit {

// Adds Pool and PoolBase to the module.
void bind_pool(pybind11::module_& m);

// Functions with the pool bound to them: empty(*size, ...), empty_strided(size, stride, ...), and empty once more, sent
// through the dispatcher as the registered operator.
pybind11::tuple pool_functions(const std::shared_ptr<Pool>& pool);

// A base class: what its instances hold as `_empty` is found under `empty`, whatever its subclasses define there.
pybind11::object make_pool_base();

}  // namespace memkit
