#include "fast_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "activation_ops.h"
#include "checks.h"
#include "spec.h"

namespace memkit {
namespace {

using at::Tensor;

enum class Inplace { never, forced, automatic };

std::string_view text(PyObject* object) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(object, &size);
  if (!data) throw python_error();
  return {data, static_cast<size_t>(size)};
}

Inplace inplace_of(PyObject* object, std::string_view op) {
  if (object == Py_False) return Inplace::never;
  if (object == Py_True) return Inplace::forced;
  TORCH_CHECK_VALUE(PyUnicode_Check(object) && text(object) == "auto", op,
                    ": expected inplace True, False or 'auto', got ", std::string(pybind11::repr(object)));
  return Inplace::automatic;
}

// A tensor that Python once held keeps its Python object, and that object a handle, for as long as C++ keeps the tensor.
// 1 where the base of the view x has such an object and no Python code can reach it any more, else 0.
size_t idle_base_handles(const Tensor& x) {
  if (!x.is_view() || x._base().use_count() != 2) return 0;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(x._base()));
  return x._base().use_count() == 2 && object.ref_count() == 2;  // the tensor's own reference and this one
}

// Whether autograd records that x is a view, and what is done to it.
bool is_recorded_view(const Tensor& x) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return false;
  const auto* view = torch::autograd::impl::get_view_autograd_meta(x);
  return view && view->has_bw_view();
}

// Whether the object is no tensor but takes tensors' functions over, as torch.fx.Proxy does. Raises for anything else.
bool stands_for_tensor(PyObject* object, std::string_view op, const char* argument) {
  if (THPVariable_Check(object)) return false;
  const bool stands = PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__torch_function__");
  TORCH_CHECK_TYPE(stands, op, ": expected ", argument, " to be a Tensor, got ", Py_TYPE(object)->tp_name);
  return true;
}

// 0 op, 1 input, 2 bias or None, 3 dim, 4 params (tuple of float), 5 inplace, 6 save
PyObject* activation(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 7, "activation: expected 7 arguments, got ", count);
  const std::string_view op = text(args[0]);
  std::string_view save = text(args[6]);
  const bool biased = args[2] != Py_None;
  if (stands_for_tensor(args[1], op, "input") || (biased && stands_for_tensor(args[2], op, "bias")) ||
      !THPVariable_CheckExact(args[1]) || (biased && !THPVariable_CheckExact(args[2])) ||
      at::impl::torch_function_mode_enabled()) {
    Py_RETURN_NONE;
  }
  const Tensor& input = THPVariable_Unpack(args[1]);
  const std::optional<Tensor> bias = biased ? std::optional<Tensor>(THPVariable_Unpack(args[2])) : std::nullopt;
  const int64_t dim = PyLong_AsLongLong(args[3]);
  if (dim == -1 && PyErr_Occurred()) throw python_error();
  c10::SmallVector<double, 2> params;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[4]); ++i) {
    params.push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(args[4], i)));
    if (PyErr_Occurred()) throw python_error();
  }
  Inplace inplace = inplace_of(args[5], op);
  if (inplace != Inplace::never) check_arguments(op, input, bias, dim);  // a sparse tensor has no strides to look at
  if (inplace == Inplace::automatic) {
    const bool possible = save != "input" && ActivationSpec(op, params).invertible() &&
                          !inplace_blocker_strict(input, idle_base_handles(input));
    inplace = possible ? Inplace::forced : Inplace::never;
    // Autograd would record a copy into the base, whose backward takes two more tensors of its size and time for both.
    // Out of place, keeping the output, the layer's result is as short-lived as in place (Linear makes such views).
    if (possible && is_recorded_view(input)) {
      inplace = Inplace::never;
      save = "output";
    }
  } else if (inplace == Inplace::forced) {
    check_inplace(op, input, saver_blocker(input));
  }
  if (inplace == Inplace::forced) {
    Tensor self = input;
    {
      const pybind11::gil_scoped_release no_gil;
      ops::activation_(self, bias, dim, op, params, save);
    }
    Py_INCREF(args[1]);
    return args[1];
  }
  Tensor out;
  {
    const pybind11::gil_scoped_release no_gil;
    out = ops::activation(input, bias, dim, op, params, save);
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

PyMethodDef kMethods[] = {{"activation", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(activation)),
                           METH_FASTCALL, "activation(op, input, bias, dim, params, inplace, save) -> Tensor or None"},
                          {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_fast_call(pybind11::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), kMethods) != 0) throw pybind11::error_already_set();
}

}  // namespace memkit
