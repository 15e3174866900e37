// What a call that backward makes again keeps of its arguments.
#pragma once

#include <pybind11/pybind11.h>

namespace memkit {

// Adds to the module:
//   SavedTensor(tensor)    a tensor as autograd saves one: by the saved-tensor hooks around
//     .tensor()            it, or autograd's error where it was changed in place in between
void bind_saved_tensor(pybind11::module_& m);

}  // namespace memkit
