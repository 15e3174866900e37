#include "lean.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <variant>

#include "checks.h"
#include "joined.h"
#include "node_kind.h"
#include "nonzeros.h"
#include "padded.h"
#include "rebuild.h"
#include "saved_node.h"

namespace memkit {
namespace {

using at::Tensor;

using torch::autograd::Node;

// What a node made whole, where x is that or a view of it.
Tensor whole(const Tensor& x) { return x.is_view() ? Tensor(x._base()) : x; }

// Where in the memory of a node's result a tensor lies.
struct View {
  explicit View(const Tensor& x) : sizes(x.sizes()), strides(x.strides()), offset(x.storage_offset()) {}

  Tensor of(const Tensor& made) const {
    if (made.sizes() == at::IntArrayRef(sizes) && made.strides() == at::IntArrayRef(strides) &&
        made.storage_offset() == offset)
      return made;
    return made.as_strided(sizes, strides, offset);
  }

  at::DimVector sizes, strides;
  int64_t offset;
};

// The node that made the tensor whole. The consumer's node has the producer among its edges anyway, so a recipe keeps
// nothing alive that would not be.
struct Recipe {
  NodePtr node;
  at::DimVector made;  // the result's own strides
  View view;
  bool is_padded;
  Tensor fill;                            // what it was padded with
  std::shared_ptr<const Original> known;  // for concatenations with it, where versions do not say what was used
};

// A node's result that is mostly zeros; the same memory for all who keep it.
struct Sparse {
  Nonzeros nonzeros;
  View view;
};

// What was concatenated, and is kept in parts.
struct Concatenation {
  std::shared_ptr<const Joined> joined;
  at::DimVector made;  // the result's own strides
  View view;
};

// A tensor of no graph, as autograd keeps it without hooks: itself, so that nothing is put in its place meanwhile.
struct Leaf {
  Tensor tensor;
  uint32_t version;
};

using Packed = std::variant<Recipe, Concatenation, Sparse, Leaf, std::shared_ptr<const Original>>;

// Not where x sees its base's elements as others, as complex, conjugate or negated ones: `View` knows where they lie alone.
bool has_producer(const Tensor& x) {
  return x.requires_grad() && !x.is_leaf() && !x.is_nested() &&
         !x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !x.is_neg() && !x.is_conj() &&
         x.scalar_type() == whole(x).scalar_type();
}

// The tensor in the graph, where hooks are given a node's result without it.
const Tensor& result_of(const Tensor& x) { return saved_result && saved_result->is_alias_of(x) ? *saved_result : x; }

// asks_again: also of what PyTorch's nodes keep, each for itself.
std::optional<Recipe> recipe_of(const Tensor& x, bool asks_again) {
  if (!has_producer(x)) return std::nullopt;
  const Tensor made = whole(x);
  const NodePtr& node = made.grad_fn();
  // Written to since it was made: the node would rebuild another tensor.
  if (!node || made._version() != 0) return std::nullopt;
  const bool is_padded = pads_rebuildable(*node);
  if (!is_padded && !can_rebuild(made, asks_again)) return std::nullopt;
  packed_recipe = true;
  Recipe recipe{node, at::DimVector(made.strides()), View(x), is_padded, is_padded ? fill_of(*node, made) : Tensor(),
                {}};
  if (is_rebuilt_by_stock(*node)) {
    recipe.known = std::make_shared<const Original>(made, Tensor(), node);
    note_kept(made, recipe.known);
  }
  return recipe;
}

std::optional<Concatenation> concatenation_of(const Tensor& x, const Keeper& keeper) {
  if (!has_producer(x)) return std::nullopt;
  const Tensor made = whole(x);
  if (made._version() != 0) return std::nullopt;
  auto joined = joined_of(made, keeper);
  if (!joined) return std::nullopt;
  return Concatenation{std::move(joined), at::DimVector(made.strides()), View(x)};
}

// What wrote all of the tensor last, also where that was in place on a view.
const SavedNode* producer_of(const Tensor& made) {
  const Node* node = made.grad_fn().get();
  if (is_kind(node, NodeKind::slices)) {
    const auto& copy = static_cast<const torch::autograd::CopySlices&>(*node);
    node = copy.base.sym_numel() == copy.view.sym_numel() ? copy.fn.get() : nullptr;
  }
  return is_kind(node, NodeKind::own) ? static_cast<const SavedNode*>(node) : nullptr;
}

// Where the node that made it says that it may have many zeros, and it has.
std::optional<Sparse> sparse_of(const Tensor& x) {
  const Tensor& result = result_of(x);
  if (!has_producer(result)) return std::nullopt;
  const Tensor made = whole(result);
  const SavedNode* node = producer_of(made);
  if (!node || !node->makes_zeros() || made.storage_offset() != 0) return std::nullopt;
  const auto ref = node->nonzeros();
  std::optional<Nonzeros> found = ref ? ref->lock() : std::nullopt;
  if (!found || found->version != made._version()) {
    found = nonzeros_of(made);
    if (!found) return std::nullopt;
    node->set_nonzeros(std::make_shared<NonzerosRef>(*found));
  }
  return Sparse{std::move(*found), View(x)};
}

// Hooks inside this one may have handed a node its input in another order of memory.
Tensor in_order(const Tensor& made, at::IntArrayRef strides) {
  if (made.strides() == strides) return made;
  return at::empty_strided(made.sizes(), strides, made.options()).copy_(made);
}

Tensor made_again(const Recipe& recipe) {
  const pybind11::gil_scoped_release no_gil;
  const at::AutoGradMode off(false);
  const Tensor made = recipe.is_padded ? pad_again(*recipe.node, recipe.fill) : rebuild(*recipe.node);
  return recipe.view.of(in_order(made, recipe.made));
}

Tensor made_again(const Concatenation& concatenation) {
  const pybind11::gil_scoped_release no_gil;
  const at::AutoGradMode off(false);
  return concatenation.view.of(in_order(concatenation.joined->made_again(), concatenation.made));
}

Tensor made_again(const Sparse& sparse) {
  const pybind11::gil_scoped_release no_gil;
  const at::AutoGradMode off(false);
  return sparse.view.of(sparse.nonzeros.spread());
}

// -- for Python, which autograd calls once for each tensor that it saves: plain functions over objects of one type, of few
// allocations. In a model's step each finds the caches full of the layers' numbers.

struct PackedObject {
  PyObject_HEAD Packed packed;
};
static_assert(sizeof(PackedObject) <= 512, "Python's own memory serves no more");

void drop(PyObject* self) {
  std::destroy_at(&reinterpret_cast<PackedObject*>(self)->packed);
  PyObject_Free(self);
}

PyTypeObject packed_type = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "memkit._C.Packed";
  type.tp_basicsize = sizeof(PackedObject);
  type.tp_dealloc = drop;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  return type;
}();

PyObject* object_of(Packed&& packed) {
  PackedObject* object = PyObject_New(PackedObject, &packed_type);
  if (!object) throw python_error();
  new (&object->packed) Packed(std::move(packed));
  return reinterpret_cast<PyObject*>(object);
}

const Packed* packed_of(PyObject* object) {
  return Py_TYPE(object) == &packed_type ? &reinterpret_cast<PackedObject*>(object)->packed : nullptr;
}

// Numbers of the last nodes, and the place of another in it: a node is made before it keeps anything.
uint64_t& packed_for(uint64_t sequence_nr) {
  constexpr size_t many = 1024;
  static thread_local std::unique_ptr<uint64_t[]>
      numbers;  // on the heap: libraries have little room for what threads own
  if (!numbers) std::fill_n((numbers = std::make_unique<uint64_t[]>(many)).get(), many, UINT64_MAX);
  return numbers[sequence_nr % many];
}
void note_packing() { note_lean_packed(at::sequence_number::peek() - 1); }

const Tensor& tensor_of(PyObject* object, const char* name) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), name, ": expected a Tensor, got ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

PyObject* recipe(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 1 || count == 2,
                   "recipe: expected a tensor, and whether what is around lean() may be asked ", "again, got ", count,
                   " arguments");
  if (auto found = recipe_of(tensor_of(args[0], "recipe"), count == 2 && args[1] == Py_True))
    return object_of(std::move(*found));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Its nonzero elements and their bits go through the hooks around, and come back to `spread`.
PyObject* nonzeros(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  auto found = sparse_of(tensor_of(tensor, "nonzeros"));
  if (!found) Py_RETURN_NONE;
  const pybind11::object values = pybind11::cast(std::move(found->nonzeros.values));
  const pybind11::object bits = pybind11::cast(std::move(found->nonzeros.bits));
  const auto frame = pybind11::reinterpret_steal<pybind11::object>(object_of(std::move(*found)));
  return pybind11::make_tuple(frame, values, bits).release().ptr();
  END_HANDLE_TH_ERRORS
}

// The tensor itself would hold the graph that holds it.
Tensor without_graph(const Tensor& x, PyObject* object) {
  if (THPVariable_CheckExact(object)) return is_plain(x) ? x.tensor_data() : x.detach();
  // A subclass, which the tensor in C++ need not know of.
  return tensor_of(pybind11::handle(object).attr("detach")().ptr(), "pack");
}

PyObject* kept(const Tensor& x, std::shared_ptr<const Original> as) {
  note_kept(result_of(x), as);
  return object_of(std::move(as));
}

PyObject* pack(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const Tensor& x = tensor_of(tensor, "pack");
  note_packing();
  if (THPVariable_CheckExact(tensor) && !result_of(x).grad_fn()) return object_of(Leaf{x, uint32_t(x._version())});
  if (auto found = recipe_of(x, true)) return object_of(std::move(*found));
  const auto keep = [](const Tensor& part) { return std::make_shared<const Original>(part, part); };
  if (auto found = concatenation_of(x, {keep, {}})) return object_of(std::move(*found));
  if (auto found = sparse_of(x)) return object_of(std::move(*found));
  return kept(x, std::make_shared<const Original>(x, without_graph(x, tensor)));
  END_HANDLE_TH_ERRORS
}

// By the hooks around.
std::shared_ptr<const Original> kept_around(PyObject* tensor, PyObject* keep, PyObject* give_back) {
  const Tensor& x = tensor_of(tensor, "keep");
  Original made(x);
  made.packed = pybind11::handle(keep)(pybind11::handle(tensor));
  made.give_back = pybind11::reinterpret_borrow<pybind11::object>(give_back);
  // As it is, or that with something else.
  PyObject* packed = made.packed.ptr();
  if (PyTuple_Check(packed) && PyTuple_GET_SIZE(packed) > 0) packed = PyTuple_GET_ITEM(packed, 0);
  const auto is_it = [&](const Tensor& y) {
    return x.has_storage() && y.has_storage() && y.is_same_size(x) && y.is_alias_of(x);
  };
  if (THPVariable_CheckExact(packed) && is_it(THPVariable_Unpack(packed)))
    made.value = THPVariable_Unpack(packed).detach();
  return std::make_shared<const Original>(std::move(made));
}

PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "keep: expected a tensor and the hooks around, got ", count, " arguments");
  return kept(tensor_of(args[0], "keep"), kept_around(args[0], args[1], args[2]));
  END_HANDLE_TH_ERRORS
}

PyObject* concatenation(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "concatenation: expected a tensor and the hooks around, got ", count, " arguments");
  note_packing();
  const auto keep = [&](const Tensor& part) { return kept_around(pybind11::cast(part).ptr(), args[1], args[2]); };
  if (auto found = concatenation_of(tensor_of(args[0], "concatenation"), {keep, args[2]}))
    return object_of(std::move(*found));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const Packed* packed = packed_of(object);
  if (!packed) Py_RETURN_NONE;
  if (const auto* leaf = std::get_if<Leaf>(packed)) {
    check_unchanged(leaf->tensor, leaf->version, uint32_t(leaf->tensor._version()));
    return THPVariable_Wrap(leaf->tensor);
  }
  if (const auto* kept = std::get_if<std::shared_ptr<const Original>>(packed))
    return THPVariable_Wrap((*kept)->unpack());
  if (const auto* sparse = std::get_if<Sparse>(packed)) return THPVariable_Wrap(made_again(*sparse));
  if (const auto* joined = std::get_if<Concatenation>(packed)) return THPVariable_Wrap(made_again(*joined));
  return THPVariable_Wrap(made_again(std::get<Recipe>(*packed)));
  END_HANDLE_TH_ERRORS
}

PyObject* spread(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto* frame = count == 3 ? std::get_if<Sparse>(packed_of(args[0])) : nullptr;
  TORCH_CHECK_TYPE(frame, "spread: expected what `nonzeros` gave, values and bits");
  Sparse sparse = *frame;
  Nonzeros& nonzeros = sparse.nonzeros;
  const Tensor &values = tensor_of(args[1], "spread"), &bits = tensor_of(args[2], "spread");
  TORCH_CHECK(values.is_cpu() && bits.is_cpu() && values.scalar_type() == nonzeros.dtype &&
                  bits.scalar_type() == at::kLong && values.numel() == nonzeros.count() &&
                  bits.numel() == nonzeros.words(),
              "lean: expected back from the saved-tensor hooks around it ", nonzeros.count(), " elements of ",
              c10::toString(nonzeros.dtype), " and ", nonzeros.words(), " words of bits, got ", describe(values),
              " and ", describe(bits));
  nonzeros.values = values.contiguous(), nonzeros.bits = bits.contiguous();
  TORCH_CHECK(nonzeros.fits(), "lean: expected back from the saved-tensor hooks around it the bits of ",
              nonzeros.count(), " elements, got others");
  return THPVariable_Wrap(made_again(sparse));
  END_HANDLE_TH_ERRORS
}

PyObject* the_pack = nullptr;  // the module's function

PyMethodDef kLeanMethods[] = {{"recipe", reinterpret_cast<PyCFunction>(recipe), METH_FASTCALL, nullptr},
                              {"pack", pack, METH_O, nullptr},
                              {"unpack", unpack, METH_O, nullptr},
                              {"nonzeros", nonzeros, METH_O, nullptr},
                              {"keep", reinterpret_cast<PyCFunction>(keep), METH_FASTCALL, nullptr},
                              {"concatenation", reinterpret_cast<PyCFunction>(concatenation), METH_FASTCALL, nullptr},
                              {"spread", reinterpret_cast<PyCFunction>(spread), METH_FASTCALL, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool lean_packed(const Node& node) {
  return node.thread_id() == at::RecordFunction::currentThreadId() &&
         packed_for(node.sequence_nr()) == node.sequence_nr();
}

void note_lean_packed(uint64_t sequence_nr) { packed_for(sequence_nr) = sequence_nr; }

bool lean_keeps(const Tensor& x) {
  if (!x.defined() || (x.requires_grad() && !x.is_leaf())) return false;
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  return !hooks.empty() && hooks.top().first.ptr(getPyInterpreter()) == the_pack;
}

void bind_lean(pybind11::module_& m) {
  if (PyType_Ready(&packed_type) != 0 || PyModule_AddFunctions(m.ptr(), kLeanMethods) != 0)
    throw pybind11::error_already_set();
  the_pack = m.attr("pack").ptr();
  m.def("note_joined", note_joined);
  m.def("copy_parameters", [](bool copies) { copies_parameters = copies; });
}

}  // namespace memkit
