// Eager calls from Python straight into C++: METH_FASTCALL entries over plain functions. They go through the dispatcher
// like everyone else; what they leave out is the 3 us in which torch.ops parses its arguments.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace memkit {

enum class Inplace { never, forced, automatic };

namespace eager {

// An argument that is no tensor, or a TypeError that says what `op` expected.
std::string_view text(PyObject* object, std::string_view op);
double number(PyObject* object, std::string_view op);
int64_t integer(PyObject* object, std::string_view op);

// Whether the object is no tensor but takes tensors' functions over, as torch.fx.Proxy does. Raises for anything else.
bool stands_for_tensor(PyObject* object, std::string_view op, const char* argument);

// Whether a torch function mode wants to see the calls. `torch.set_default_device` is one that looks at constructors alone.
bool mode_listens();

Inplace inplace_of(PyObject* object, std::string_view op);

// is_sole_owner for a tensor that may have been Python's: its object keeps a handle although no code can reach it.
bool is_dead(const at::Tensor& x);

// Where a result goes. Out of place keeping the output: in place autograd would record a copy into the base of a view, whose
// backward takes two more tensors of its size; this way a layer's result is as short-lived as in place (Linear makes such
// views).
enum class Way { fresh, fresh_keeping_output, overwrite };

// x is the caller's own handle. Forced: refuses what reference counts show would corrupt a gradient. Automatic: overwrites
// where that is `possible` and reference counts prove that nobody can read what is overwritten.
Way resolve_inplace(Inplace inplace, std::string_view op, const at::Tensor& x, bool possible = true);

template <class T>
constexpr bool kSequence = false;
template <class T>
constexpr bool kSequence<std::vector<T>> = true;
template <class T>
constexpr bool kSequence<c10::List<T>> = true;

// An argument of an entry: `listens` where a tensor subclass wants the call for itself.
template <class T>
struct Argument {
  static bool listens(PyObject* object, std::string_view op) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return stands_for_tensor(object, op, "a tensor argument") || !THPVariable_CheckExact(object);
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      return object != Py_None && Argument<at::Tensor>::listens(object, op);
    } else if constexpr (kSequence<T>) {
      TORCH_CHECK_TYPE(PyTuple_Check(object) || PyList_Check(object), op, ": expected a tuple or list of ",
                       std::is_arithmetic_v<typename T::value_type> ? "numbers" : "tensors", ", got ",
                       Py_TYPE(object)->tp_name);
      if constexpr (!std::is_arithmetic_v<typename T::value_type>)
        for (const pybind11::handle value : pybind11::handle(object))
          if (Argument<typename T::value_type>::listens(value.ptr(), op)) return true;
      return false;
    } else {
      return false;
    }
  }
  static decltype(auto) get(PyObject* object, [[maybe_unused]] std::string_view op) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return THPVariable_Unpack(object);  // a reference to the caller's own handle
    } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
      return object == Py_None ? T() : T(THPVariable_Unpack(object));
    } else if constexpr (std::is_same_v<T, bool>) {
      TORCH_CHECK_TYPE(PyBool_Check(object), op, ": expected a bool, got ", Py_TYPE(object)->tp_name);
      return object == Py_True;
    } else if constexpr (std::is_same_v<T, double>) {
      return number(object, op);
    } else if constexpr (std::is_same_v<T, int64_t>) {
      return integer(object, op);
    } else if constexpr (std::is_same_v<T, std::optional<double>>) {
      return object == Py_None ? T() : T(number(object, op));
    } else if constexpr (kSequence<T>) {
      T values;
      for (const pybind11::handle value : pybind11::handle(object))
        values.push_back(Argument<typename T::value_type>::get(value.ptr(), op));
      return values;
    } else if constexpr (std::is_same_v<T, std::string_view>) {
      return text(object, op);
    } else if constexpr (std::is_same_v<T, Inplace>) {
      return inplace_of(object, op);
    } else if constexpr (std::is_same_v<T, std::optional<at::Generator>>) {
      TORCH_CHECK_TYPE(object == Py_None || THPGenerator_Check(object), op,
                       ": expected a torch.Generator or None, got ", Py_TYPE(object)->tp_name);
      return object == Py_None ? T() : T(reinterpret_cast<THPGenerator*>(object)->cdata);
    } else if constexpr (std::is_same_v<T, std::optional<at::ScalarType>>) {
      TORCH_CHECK_TYPE(object == Py_None || THPDtype_Check(object), op, ": expected a torch.dtype or None, got ",
                       Py_TYPE(object)->tp_name);
      return object == Py_None ? T() : T(reinterpret_cast<THPDtype*>(object)->scalar_type);
    } else {
      return pybind11::cast<T>(pybind11::handle(object));
    }
  }
};

inline PyObject* result(at::Tensor&& x) { return THPVariable_Wrap(std::move(x)); }
inline PyObject* result(std::optional<at::Tensor>&& x) {
  if (!x) Py_RETURN_NONE;
  return THPVariable_Wrap(*std::move(x));
}
template <class... Ts>
PyObject* result(std::tuple<Ts...>&& xs) {
  return pybind11::cast(std::move(xs)).release().ptr();
}

template <auto function, const char* name, class Signature = decltype(function)>
struct Entry;
template <auto function, const char* name, class R, class... Args>
struct Entry<function, name, R (*)(Args...)> {
  static PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == sizeof...(Args), name, ": expected ", sizeof...(Args), " arguments, got ", count);
    return call(args, std::index_sequence_for<Args...>{});
    END_HANDLE_TH_ERRORS
  }

 private:
  template <size_t... i>
  static PyObject* call(PyObject* const* args, std::index_sequence<i...>) {
    if ((Argument<std::decay_t<Args>>::listens(args[i], name) || ...) || mode_listens()) Py_RETURN_NONE;
    return result(function(Argument<std::decay_t<Args>>::get(args[i], name)...));
  }
};

// Adds `name` to the module: takes the function's arguments by position and returns its result, or None where a tensor
// subclass or a mode wants the call for itself, or the function returned nothing; then torch.ops is the way. The function
// releases the GIL where it works.
template <auto function, const char* name>
void bind(pybind11::module_& m) {
  using Call = Entry<function, name>;
  static PyMethodDef method[] = {
      {name,
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(
           static_cast<PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t)>(&Call::call))),
       METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), method) != 0) throw pybind11::error_already_set();
}

}  // namespace eager
}  // namespace memkit
