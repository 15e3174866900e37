#include "fast_call.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "activation_ops.h"
#include "checks.h"
#include "eager.h"
#include "spec.h"

namespace memkit {
namespace {

using at::Tensor;
using namespace eager;

// 0 op, 1 input, 2 bias or None, 3 dim, 4 params (tuple of float), 5 inplace, 6 save
PyObject* activation_entry(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 7, "activation: expected 7 arguments, got ", count);
  const std::string_view op = text(args[0], "activation");
  std::string_view save = text(args[6], op);
  const bool biased = args[2] != Py_None;
  if (stands_for_tensor(args[1], op, "input") || (biased && stands_for_tensor(args[2], op, "bias")) ||
      !THPVariable_CheckExact(args[1]) || (biased && !THPVariable_CheckExact(args[2])) || mode_listens() ||
      torch::jit::tracer::isTracing()) {
    Py_RETURN_NONE;
  }
  const Tensor& input = THPVariable_Unpack(args[1]);
  const std::optional<Tensor> bias = biased ? std::optional<Tensor>(THPVariable_Unpack(args[2])) : std::nullopt;
  const int64_t dim = integer(args[3], op);
  c10::SmallVector<double, 2> params;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[4]); ++i) params.push_back(number(PyTuple_GET_ITEM(args[4], i), op));
  const Inplace inplace = inplace_of(args[5], op);
  Way way = Way::fresh;
  if (inplace != Inplace::never) {
    check_arguments(op, input, bias, dim);  // a sparse tensor has no strides to look at
    const auto without_input =
        inplace == Inplace::automatic ? ActivationSpec(op, params).save_without_input(save) : std::nullopt;
    way = resolve_inplace(inplace, op, input, without_input.has_value());
    if (way == Way::fresh_keeping_output) save = *without_input;
  }
  if (way == Way::overwrite) {
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

PyMethodDef kCallMethods[] = {
    {"activation", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(activation_entry)), METH_FASTCALL,
     "activation(op, input, bias, dim, params, inplace, save) -> Tensor or None"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_fast_call(pybind11::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), kCallMethods) != 0) throw pybind11::error_already_set();
}

}  // namespace memkit
