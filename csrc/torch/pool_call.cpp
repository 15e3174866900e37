// How tensors of a pool are asked for: from Python by METH_FASTCALL, from graphs by registered operators.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "pool_python.h"

namespace memkit {
namespace {

namespace py = pybind11;
using Sizes = c10::SmallVector<std::int64_t, 6>;
using Format = std::optional<at::MemoryFormat>;

// -- operators

std::shared_ptr<Pool> pool_of(std::int64_t id, const char* op) {
  std::shared_ptr<Pool> pool = Pool::find(id);
  TORCH_CHECK_VALUE(pool, op, ": expected the id of a living pool, got ", id);
  return pool;
}

Pool::Tag tag_of(Pool& pool, std::string_view name) {
  return name.empty() ? Pool::Tag() : Pool::Tag(pool.arena().tag(name));
}

at::Tensor op_empty(std::int64_t id, c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, Format format,
                    std::string_view tag) {
  const auto pool = pool_of(id, "pool_empty");
  return pool->empty(C10_AS_INTARRAYREF_SLOW(size), dtype.value_or(c10::get_default_dtype_as_scalartype()), format,
                     tag_of(*pool, tag));
}

at::Tensor op_empty_strided(std::int64_t id, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::string_view tag) {
  const auto pool = pool_of(id, "pool_empty_strided");
  return pool->empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                             dtype.value_or(c10::get_default_dtype_as_scalartype()), tag_of(*pool, tag));
}

at::Tensor call_op(std::int64_t id, const Sizes& size, at::ScalarType dtype, Format format, std::string_view tag) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("memkit::pool_empty", "").typed<decltype(op_empty)>();
  return op.call(id, c10::fromIntArrayRefSlow(size), dtype, format, tag);
}

at::Tensor call_strided_op(std::int64_t id, const Sizes& size, const Sizes& stride, at::ScalarType dtype,
                           std::string_view tag) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("memkit::pool_empty_strided", "")
                             .typed<decltype(op_empty_strided)>();
  return op.call(id, c10::fromIntArrayRefSlow(size), c10::fromIntArrayRefSlow(stride), dtype, tag);
}

// A mode or a transform wants to see every tensor's making.
bool watched() {
  constexpr c10::DispatchKeySet keys(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonDispatcher, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return !(c10::impl::tls_local_dispatch_key_set().included_ & keys).empty();
}

// -- arguments

std::int64_t integer(PyObject* object, const char* name) {
  if (!PyLong_Check(object) || PyBool_Check(object)) {  // a bool is an int that nobody meant, for torch, too
    PyObject* index = PyBool_Check(object) ? nullptr : PyNumber_Index(object);
    if (!index) PyErr_Clear();
    TORCH_CHECK_TYPE(index, name, ": expected sizes as ints or one tuple of ints, got ", Py_TYPE(object)->tp_name);
    const py::object keep = py::reinterpret_steal<py::object>(index);
    return integer(index, name);
  }
  const std::int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    TORCH_CHECK_VALUE(false, name, ": expected sizes below 2^63, got ", std::string(py::str(object)));
  }
  return value;
}

void sequence(PyObject* object, const char* name, Sizes* out) {
  if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i)
      out->push_back(integer(PyTuple_GET_ITEM(object, i), name));
  } else if (PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) out->push_back(integer(PyList_GET_ITEM(object, i), name));
  } else {
    out->push_back(integer(object, name));
  }
}

struct Options {
  std::optional<at::ScalarType> given;
  Format format;
  bool requires_grad = false;
  std::string_view tag;
  PyObject *size = nullptr, *value = nullptr;

  at::ScalarType dtype() const { return given ? *given : c10::get_default_dtype_as_scalartype(); }
  void check(const char* name) const {
    TORCH_CHECK_VALUE(!requires_grad || at::isFloatingType(dtype()) || at::isComplexType(dtype()), name,
                      ": expected a floating-point or complex dtype for requires_grad=True, got ", dtype());
  }
};

bool named(PyObject* keyword, PyObject* name) { return keyword == name || PyUnicode_Compare(keyword, name) == 0; }

Options options_of(PyObject* const* values, PyObject* keywords, const char* name) {
  static PyObject* const kDtype = PyUnicode_InternFromString("dtype");
  static PyObject* const kFormat = PyUnicode_InternFromString("memory_format");
  static PyObject* const kGrad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const kTag = PyUnicode_InternFromString("tag");
  static PyObject* const kSize = PyUnicode_InternFromString("size");
  static PyObject* const kValue = PyUnicode_InternFromString("fill_value");
  Options options;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keywords); ++i) {
    PyObject *keyword = PyTuple_GET_ITEM(keywords, i), *value = values[i];
    const char* got = Py_TYPE(value)->tp_name;
    if (named(keyword, kDtype)) {
      if (value == Py_None) continue;
      TORCH_CHECK_TYPE(THPDtype_Check(value), name, ": expected dtype to be a torch.dtype, got ", got);
      options.given = reinterpret_cast<THPDtype*>(value)->scalar_type;
    } else if (named(keyword, kFormat)) {
      if (value == Py_None) continue;
      TORCH_CHECK_TYPE(THPMemoryFormat_Check(value), name, ": expected a torch.memory_format, got ", got);
      options.format = reinterpret_cast<THPMemoryFormat*>(value)->memory_format;
    } else if (named(keyword, kGrad)) {
      TORCH_CHECK_TYPE(PyBool_Check(value), name, ": expected requires_grad to be a bool, got ", got);
      options.requires_grad = value == Py_True;
    } else if (named(keyword, kTag)) {
      if (value == Py_None) continue;
      TORCH_CHECK_TYPE(PyUnicode_Check(value), name, ": expected tag to be a str, got ", got);
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &length);
      if (!text) throw python_error();
      options.tag = {text, static_cast<std::size_t>(length)};
    } else if (named(keyword, kSize)) {
      options.size = value;
    } else if (named(keyword, kValue)) {
      options.value = value;
    } else {
      TORCH_CHECK_TYPE(false, name, ": expected keywords among dtype, memory_format, requires_grad and tag, got ",
                       std::string(py::str(py::handle(keyword))));
    }
  }
  return options;
}

// What a tensor is made of at once. Of a value torch tells the dtype that it stands for, and anything that is not one of
// Python's numbers it makes a tensor of.
struct Value {
  at::Scalar scalar;
  at::Tensor tensor;
  at::ScalarType dtype = c10::get_default_dtype_as_scalartype();

  explicit Value(std::int64_t value) : scalar(value) {}
  // given: the dtype asked for, in which torch.full takes values that are not plain numbers.
  Value(PyObject* value, std::optional<at::ScalarType> given) {
    if (PyFloat_CheckExact(value)) {
      scalar = PyFloat_AS_DOUBLE(value);
    } else if (PyBool_Check(value)) {
      scalar = value == Py_True;
      dtype = at::kBool;
    } else if (int beyond = 0; PyLong_CheckExact(value) && (PyLong_AsLongLongAndOverflow(value, &beyond), !beyond)) {
      scalar = static_cast<std::int64_t>(PyLong_AsLongLong(value));
      dtype = at::kLong;
    } else {
      py::object asked = py::none();
      if (given) asked = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(*given)));
      const py::object made = py::module_::import("torch").attr("full")(
          py::tuple(), py::handle(value), py::arg("dtype") = asked, py::arg("device") = "cpu");
      tensor = THPVariable_Unpack(made.ptr());
      dtype = tensor.scalar_type();
    }
  }

  void fill(at::Tensor& made) const {
    if (tensor.defined()) {
      made.fill_(tensor);
    } else if (scalar.isIntegral(false) && scalar.toLong() == 0) {
      made.zero_();
    } else {
      made.fill_(scalar);
    }
  }
};

// -- functions, with a capsule of the pool as self

using Handle = std::shared_ptr<Pool>;

Pool& self_of(PyObject* capsule) { return **static_cast<Handle*>(PyCapsule_GetPointer(capsule, nullptr)); }

PyObject* finish(at::Tensor tensor, bool requires_grad) {
  if (requires_grad) tensor.set_requires_grad(true);
  return THPVariable_Wrap(std::move(tensor));
}

// In place of HANDLE_TH_ERRORS, which also gathers warnings; there are none here.
PyObject* raised() {
  torch::translate_exception_to_python(std::current_exception());
  return nullptr;
}

Sizes sizes_of(const Options& options, PyObject* const* args, Py_ssize_t count, const char* kName) {
  Sizes size;
  if (options.size) {
    TORCH_CHECK_TYPE(count == 0, kName, ": expected sizes once, got them by position and by name");
    sequence(options.size, kName, &size);
  } else if (count == 1) {
    sequence(args[0], kName, &size);
  } else {
    for (Py_ssize_t i = 0; i < count; ++i) size.push_back(integer(args[i], kName));
  }
  return size;
}

template <bool kDispatched>
PyObject* empty(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) try {
  constexpr const char* kName = "Pool.empty";
  Pool& pool = self_of(self);
  if (!kDispatched && !keywords && count == 1 && PyLong_CheckExact(args[0]) && !watched()) {  // the commonest, quicker
    const std::int64_t size = integer(args[0], kName);
    return THPVariable_Wrap(pool.empty({&size, 1}, c10::get_default_dtype_as_scalartype(), std::nullopt, std::nullopt));
  }
  const Options options = keywords ? options_of(args + count, keywords, kName) : Options();
  TORCH_CHECK_TYPE(!options.value, kName, ": expected keywords among dtype, memory_format, requires_grad and tag");
  options.check(kName);
  const Sizes size = sizes_of(options, args, count, kName);
  if (kDispatched || watched())
    return finish(call_op(pool.id(), size, options.dtype(), options.format, options.tag), options.requires_grad);
  return finish(pool.empty(size, options.dtype(), options.format, tag_of(pool, options.tag)), options.requires_grad);
} catch (...) {
  return raised();
}

PyObject* filled(Pool& pool, const Options& options, const Sizes& size, const Value& value) {
  at::Tensor made;
  if (watched()) {
    made = call_op(pool.id(), size, options.dtype(), options.format, options.tag);
    value.fill(made);
  } else {
    const at::AutoDispatchBelowADInplaceOrView quick;  // nobody can have seen the tensor yet
    made = pool.empty(size, options.dtype(), options.format, tag_of(pool, options.tag));
    value.fill(made);
  }
  return finish(std::move(made), options.requires_grad);
}

template <int kNumber>
PyObject* number(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) try {
  constexpr const char* kName = kNumber ? "Pool.ones" : "Pool.zeros";
  const Options options = keywords ? options_of(args + count, keywords, kName) : Options();
  TORCH_CHECK_TYPE(!options.value, kName, ": expected keywords among dtype, memory_format, requires_grad and tag");
  options.check(kName);
  return filled(self_of(self), options, sizes_of(options, args, count, kName), Value(std::int64_t{kNumber}));
} catch (...) {
  return raised();
}

PyObject* full(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) try {
  constexpr const char* kName = "Pool.full";
  Options options = keywords ? options_of(args + count, keywords, kName) : Options();
  TORCH_CHECK_TYPE((count > 0) != (options.size != nullptr) && (count > 1) != (options.value != nullptr) && count < 3,
                   kName, ": expected a size and a fill value, got ", count, " arguments by position");
  const Value value(options.value ? options.value : args[1], options.given);
  if (!options.given) options.given = value.dtype;
  options.check(kName);
  Sizes size;
  sequence(options.size ? options.size : args[0], kName, &size);
  return filled(self_of(self), options, size, value);
} catch (...) {
  return raised();
}

PyObject* empty_strided(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) try {
  constexpr const char* kName = "Pool.empty_strided";
  TORCH_CHECK_TYPE(count == 2, kName, ": expected sizes and strides, got ", count, " arguments");
  Pool& pool = self_of(self);
  const Options options = keywords ? options_of(args + count, keywords, kName) : Options();
  TORCH_CHECK_TYPE(!options.format && !options.size && !options.value, kName,
                   ": expected keywords among dtype, requires_grad and tag");
  options.check(kName);
  Sizes size, stride;
  sequence(args[0], kName, &size);
  sequence(args[1], kName, &stride);
  if (watched())
    return finish(call_strided_op(pool.id(), size, stride, options.dtype(), options.tag), options.requires_grad);
  return finish(pool.empty_strided(size, stride, options.dtype(), tag_of(pool, options.tag)), options.requires_grad);
} catch (...) {
  return raised();
}

using WithKeywords = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
PyCFunction plain(WithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr int kFlags = METH_FASTCALL | METH_KEYWORDS;
PyMethodDef kEmpty{"empty", plain(empty<false>), kFlags, "empty(*size, dtype=None, ...) -> Tensor"};
PyMethodDef kEmptyStrided{"empty_strided", plain(empty_strided), kFlags, "empty_strided(size, stride, ...) -> Tensor"};
PyMethodDef kEmptyOp{"empty_op", plain(empty<true>), kFlags, "empty, through the dispatcher"};
PyMethodDef kZeros{"zeros", plain(number<0>), kFlags, "zeros(*size, dtype=None, ...) -> Tensor"};
PyMethodDef kOnes{"ones", plain(number<1>), kFlags, "ones(*size, dtype=None, ...) -> Tensor"};
PyMethodDef kFull{"full", plain(full), kFlags, "full(size, fill_value, dtype=None, ...) -> Tensor"};

// -- the base class

// Eager calls find the C function here at once. A compiler that looks at the class finds a Python method it can trace.
constexpr int kQuick = 4;
struct PoolObject {
  PyObject_HEAD PyObject* functions[kQuick];
};

PyObject* get_attribute(PyObject* self, PyObject* name) {
  static PyObject* const names[kQuick] = {PyUnicode_InternFromString("empty"), PyUnicode_InternFromString("zeros"),
                                          PyUnicode_InternFromString("ones"), PyUnicode_InternFromString("full")};
  for (int i = 0; i < kQuick; ++i)
    if (PyObject* function = reinterpret_cast<PoolObject*>(self)->functions[i]; name == names[i] && function)
      return Py_NewRef(function);
  return PyObject_GenericGetAttr(self, name);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* function : reinterpret_cast<PoolObject*>(self)->functions) Py_VISIT(function);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  for (PyObject*& function : reinterpret_cast<PoolObject*>(self)->functions) Py_CLEAR(function);
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

constexpr Py_ssize_t offset(int i) { return offsetof(PoolObject, functions) + i * sizeof(PyObject*); }
PyMemberDef kMembers[] = {{"_empty", T_OBJECT_EX, offset(0), 0, nullptr},
                          {"_zeros", T_OBJECT_EX, offset(1), 0, nullptr},
                          {"_ones", T_OBJECT_EX, offset(2), 0, nullptr},
                          {"_full", T_OBJECT_EX, offset(3), 0, nullptr},
                          {nullptr, 0, 0, 0, nullptr}};
PyType_Slot kSlots[] = {{Py_tp_getattro, reinterpret_cast<void*>(get_attribute)},
                        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(clear)},
                        {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                        {Py_tp_members, kMembers},
                        {0, nullptr}};
PyType_Spec kSpec{"memkit._C.PoolBase", sizeof(PoolObject), 0,
                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, kSlots};

}  // namespace

py::dict pool_functions(const Handle& pool) {
  const py::capsule self(new Handle(pool), [](void* handle) { delete static_cast<Handle*>(handle); });
  py::dict functions;
  for (PyMethodDef* method : {&kEmpty, &kEmptyStrided, &kEmptyOp, &kZeros, &kOnes, &kFull})
    functions[method->ml_name] = py::reinterpret_steal<py::object>(PyCFunction_New(method, self.ptr()));
  return functions;
}

py::object make_pool_base() { return py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec)); }

TORCH_LIBRARY_IMPL(memkit, CompositeExplicitAutograd, m) {
  m.impl("pool_empty", TORCH_FN(op_empty));
  m.impl("pool_empty_strided", TORCH_FN(op_empty_strided));
}

}  // namespace memkit
