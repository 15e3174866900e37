// Other Python threads go on while this one waits, or has pages made; it may hold the lock of the interpreter or not.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace memkit {

class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace memkit
