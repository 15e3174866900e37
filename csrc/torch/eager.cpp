#include "eager.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>

#include "checks.h"

namespace memkit::eager {
namespace {

using at::Tensor;

// A tensor that Python once held keeps its Python object, and that object a handle, for as long as C++ keeps the tensor.
// 1 where x, of which C++ has one handle beside, has such an object and no Python code can reach it any more, else 0.
size_t idle_handles(const at::TensorBase& x) {
  if (x.use_count() != 2) return 0;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(x));
  return x.use_count() == 2 && object.ref_count() == 2;  // the tensor's own reference and this one
}

// Raises what was expected in the place of Python's own error, if there is one.
void check_taken(PyObject* object, std::string_view op, const char* expected) {
  if (!PyErr_Occurred()) return;
  const bool large = PyErr_ExceptionMatches(PyExc_OverflowError);
  PyErr_Clear();
  TORCH_CHECK_VALUE(!large, op, ": expected ", expected, " of 64 bits, got a larger one");
  TORCH_CHECK_TYPE(false, op, ": expected ", expected, ", got ", Py_TYPE(object)->tp_name);
}

// Whether autograd records that x is a view, and what is done to it.
bool is_recorded_view(const Tensor& x) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return false;
  const auto* view = torch::autograd::impl::get_view_autograd_meta(x);
  return view && view->has_bw_view();
}

}  // namespace

std::string_view text(PyObject* object, std::string_view op) {
  TORCH_CHECK_TYPE(PyUnicode_Check(object), op, ": expected a str, got ", Py_TYPE(object)->tp_name);
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (!data) throw python_error();
  return {data, static_cast<size_t>(size)};
}

double number(PyObject* object, std::string_view op) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1) check_taken(object, op, "a number");
  return value;
}

int64_t integer(PyObject* object, std::string_view op) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1) check_taken(object, op, "an int");
  return value;
}

Inplace inplace_of(PyObject* object, std::string_view op) {
  if (object == Py_False) return Inplace::never;
  if (object == Py_True) return Inplace::forced;
  TORCH_CHECK_VALUE(PyUnicode_Check(object) && text(object, op) == "auto", op,
                    ": expected inplace True, False or 'auto', got ", std::string(pybind11::repr(object)));
  return Inplace::automatic;
}

bool stands_for_tensor(PyObject* object, std::string_view op, const char* argument) {
  if (THPVariable_Check(object)) return false;
  const bool stands = PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__torch_function__");
  TORCH_CHECK_TYPE(stands, op, ": expected ", argument, " to be a Tensor, got ", Py_TYPE(object)->tp_name);
  return true;
}

bool mode_listens() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  static const auto& default_device =
      *new pybind11::object(pybind11::module_::import("torch.utils._device").attr("DeviceContext"));
  for (int64_t i = 0; i < Modes::stack_len(); ++i) {
    PyObject* const mode = Modes::get_stack_at(i)->ptr(getPyInterpreter());
    if (!pybind11::type::handle_of(mode).is(default_device)) return true;
  }
  return false;
}

bool is_dead(const Tensor& x) {
  if (is_sole_owner(x)) return true;
  if (!is_sole_owner(x, 1)) return false;
  const pybind11::gil_scoped_acquire gil;
  return idle_handles(x) == 1;
}

Way resolve_inplace(Inplace inplace, std::string_view op, const Tensor& x, bool possible) {
  if (inplace == Inplace::forced) {
    check_inplace(op, x, saver_blocker(x));
    return Way::overwrite;
  }
  if (inplace == Inplace::never || !possible) return Way::fresh;
  // Out of place its result has other strides than x: see fresh_like.
  if (x.is_contiguous() && x.suggest_memory_format() != at::MemoryFormat::Contiguous) return Way::fresh;
  if (inplace_blocker_strict(x, x.is_view() ? idle_handles(x._base()) : 0)) return Way::fresh;
  return is_recorded_view(x) ? Way::fresh_keeping_output : Way::overwrite;
}

}  // namespace memkit::eager
