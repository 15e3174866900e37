#include "torch/saved_tensor.h"

#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/parameters.h"

namespace memkit {
namespace {

class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor) : saved_(tensor, /*is_output=*/false) {}
  at::Tensor tensor() const {
    at::Tensor x = saved_.unpack();
    check_there(x);
    return x;
  }

 private:
  torch::autograd::SavedVariable saved_;
};

}  // namespace

void bind_saved_tensor(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<SavedTensor>(m, "SavedTensor", "A tensor as autograd saves one.")
      .def(py::init<const at::Tensor&>())
      .def("tensor", &SavedTensor::tensor);
}

}  // namespace memkit
