// memkit.plan's compiled half: the recorder of a step's allocations, and the planner.
#pragma once

namespace pybind11 {
class module_;
}

namespace memkit {

// Adds `Recorder`, `solve_plan` and `check_plan` to the module.
void bind_planning(pybind11::module_& module);

}  // namespace memkit
