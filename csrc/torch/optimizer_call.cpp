#include "optimizer_call.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <unordered_map>

#include "checks.h"
#include "operators.h"
#include "optimizer_lists.h"
#include "optional.h"

namespace memkit {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;

// SGD's three lists beside parameters and gradients, or AdamW's six.
StepLists lists_of(std::string_view op, TensorList params, TensorList grads, const std::vector<Tensors>& s) {
  if (s.size() == 3) return {op, params, grads, s[0], {}, {}, s[1], {}, s[2]};
  return {op, params, grads, s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5)};
}

// Gradients of one device that are no longer their parameters'.
struct Gradients {
  c10::Device device;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // parameter, gradient
};

// The tensors of parameters on one device, in lists of one length or none.
struct StepTensors {
  std::string op;
  Tensors params;
  std::vector<Tensors> state;
};

// A step for those parameters whose gradients were collected. Threads that step at once have one each.
class Step {
 public:
  explicit Step(std::shared_ptr<const StepTensors> all) : all_(std::move(all)) {}

  void add(size_t i, const Tensor& grad) {
    const Tensor& param = all_->params.at(i);
    TORCH_CHECK(grad.layout() == at::kStrided, all_->op, ": expected dense gradients, got a ", grad.layout(),
                " one of ", describe(grad));
    TORCH_CHECK(grad.device() == param.device(), all_->op, ": expected a gradient on ", param.device(), ", got one on ",
                grad.device());
    grads_.push_back(grad.resolve_neg());
    picked_.push_back(i);
  }
  // After the last.
  Step& select() {
    if (is_whole()) return *this;
    params_ = select(all_->params);
    for (const Tensors& each : all_->state) state_.push_back(select(each));
    return *this;
  }
  size_t size() const { return picked_.size(); }

  // Raises where the step would.
  void check(int64_t block) const { check_step(lists_of(all_->op, params(), grads_, state()), block); }

  void adamw(double lr, const OptionalTensor& lr_tensor, double beta1, double beta2, double eps, double weight_decay,
             bool maximize, int64_t block_size, bool stochastic, const OptionalTensor& grad_scale,
             const OptionalTensor& found_inf) {
    const pybind11::gil_scoped_release free;
    const at::NoGradGuard no_grad;
    const auto& s = state();
    MEMKIT_CALL_PAST_AUTOGRAD("memkit::_adamw_",
                              void(TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, TensorList,
                                   TensorList, double, const OptionalTensor&, double, double, double, double, bool,
                                   int64_t, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&))
    (params(), grads_, s[0], s[1], s[2], s[3], s[4], s[5], lr, lr_tensor, beta1, beta2, eps, weight_decay, maximize,
     block_size, seed(stochastic), grad_scale, found_inf);
    grads_.clear();
  }

  void sgd(double lr, const OptionalTensor& lr_tensor, double momentum, double dampening, double weight_decay,
           bool nesterov, bool maximize, int64_t block_size, bool stochastic, const OptionalTensor& grad_scale,
           const OptionalTensor& found_inf) {
    const pybind11::gil_scoped_release free;
    const at::NoGradGuard no_grad;
    const auto& s = state();
    MEMKIT_CALL_PAST_AUTOGRAD(
        "memkit::_sgd_",
        void(TensorList, TensorList, TensorList, TensorList, TensorList, double, const OptionalTensor&, double, double,
             double, bool, bool, int64_t, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&))
    (params(), grads_, s[0], s[1], s[2], lr, lr_tensor, momentum, dampening, weight_decay, nesterov, maximize,
     block_size, seed(stochastic), grad_scale, found_inf);
    grads_.clear();
  }

 private:
  Tensors select(const Tensors& all) const {
    Tensors some;
    if (all.empty()) return some;
    for (const size_t i : picked_) some.push_back(all[i]);
    return some;
  }
  bool is_whole() const { return picked_.size() == all_->params.size(); }
  const Tensors& params() const { return is_whole() ? all_->params : params_; }
  const std::vector<Tensors>& state() const { return is_whole() ? all_->state : state_; }

  // Of the device's generator, which torch.manual_seed and captured graphs know.
  OptionalTensor seed(bool stochastic) const {
    using Limits = std::numeric_limits<int64_t>;
    if (!stochastic) return std::nullopt;
    return at::randint(Limits::min(), Limits::max(), {}, all_->params[0].options().dtype(at::kLong));
  }

  std::shared_ptr<const StepTensors> all_;
  Tensors grads_, params_;  // params_ and state_ where some of all have gradients
  std::vector<Tensors> state_;
  std::vector<size_t> picked_;
};

class StepList {
 public:
  StepList(std::string op, Tensors params, std::vector<Tensors> state)
      : all_(std::make_shared<StepTensors>(StepTensors{std::move(op), std::move(params), std::move(state)})) {
    for (size_t i = 0; i < all_->params.size(); ++i) places_[all_->params[i].unsafeGetTensorImpl()] = i;
  }

  // The step for those parameters that have a gradient. Raises where one cannot be used, before anything is written; so do
  // the next two.
  Step collect() const {
    Step step(all_);
    for (size_t i = 0; i < all_->params.size(); ++i)
      if (const Tensor& grad = all_->params[i].grad(); grad.defined()) step.add(i, grad);
    return std::move(step.select());
  }

  Step collect_one(size_t i) const {
    Step step(all_);
    step.add(i, all_->params.at(i).grad());
    return std::move(step.select());
  }

  // Takes out those that are of its parameters.
  Step collect_from(Gradients& gradients) const {
    Step step(all_);
    if (gradients.device != all_->params[0].device()) return step;
    auto& pairs = gradients.pairs;
    const auto ours = std::partition(pairs.begin(), pairs.end(), [&](const auto& pair) {
      return places_.find(pair.first.unsafeGetTensorImpl()) == places_.end();
    });
    std::vector<std::pair<size_t, Tensor>> found;
    for (auto pair = ours; pair != pairs.end(); ++pair)
      found.emplace_back(places_.at(pair->first.unsafeGetTensorImpl()), std::move(pair->second));
    pairs.erase(ours, pairs.end());
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [i, grad] : found) step.add(i, grad);
    return std::move(step.select());
  }

  // Whether the moments lie as their parameters do.
  bool lies_as_parameters() const {
    for (const Tensors& each : all_->state)
      for (size_t i = 0; i < each.size(); ++i) {
        const Tensor& param = all_->params[i];
        if (each[i].strides() != param.strides() && each[i].sizes() == param.sizes() && !lies_as(each[i], param))
          return false;
      }
    return true;
  }

 private:
  const std::shared_ptr<const StepTensors> all_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;
};

// A hook of the node that adds the parameter's gradient up would see it after the tensor's own hooks.
void check_arrived(const Tensor& param) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
  TORCH_CHECK(
      !node || node->post_hooks().empty(),
      "step_in_backward: expected a gradient that is whole when it arrives, got one of ", param.sizes(),
      " that DistributedDataParallel, or another hook of its AccumulateGrad node, takes afterwards: remove() the "
      "handle and call step() after backward, or shard with fully_shard");
}

// Gradients that arrive in backward and wait for each other, on the device where they are.
class Arrivals {
 public:
  enum Then { kNothing, kBegin, kStep, kAlone };

  explicit Arrivals(int64_t bytes) : bytes_(bytes) {}

  // Takes a gradient from its parameter, and says what is next:
  // kNothing, or that none was there, for a hook before may have used and freed it;
  // kBegin: it is the first of a backward, or of a stream's, and was not taken: see begin();
  // kStep: those that wait are many;
  // kAlone: it is none of those that wait, and was not taken.
  int take(const Tensor& param) {
    Tensor& grad = param.mutable_grad();
    if (!grad.defined()) return kNothing;
    check_arrived(param);
    // DTensors: FSDP2 hands gradients over in its own time, on its own streams.
    const bool plain = !param.key_set().has(c10::DispatchKey::Python) && grad.layout() == at::kStrided;
    const int task = torch::autograd::get_current_graph_task_id();
    if (!param.is_cuda() || !plain || task < 0) return kAlone;
    const auto found = queues_.find(param.device());
    if (found == queues_.end()) return kBegin;
    Queue& queue = found->second;
    if (queue.task != task || queue.stream != current_stream(param.device())) return kBegin;
    queue.bytes += int64_t(grad.nbytes());
    queue.pairs.emplace_back(param, std::move(grad));
    return queue.bytes < bytes_ ? kNothing : kStep;
  }

  // Those of the device that arrive in this backward, on this stream, wait from now on, until end().
  void begin(c10::Device device) {
    const int task = torch::autograd::get_current_graph_task_id();
    queues_.insert_or_assign(device, Queue{task, current_stream(device), {}, 0});
  }

  // Those that wait, to be used on the current stream.
  Gradients give(c10::Device device) {
    Gradients gradients{device, {}};
    const auto found = queues_.find(device);
    if (found == queues_.end()) return gradients;
    Queue& queue = found->second;
    gradients.pairs.swap(queue.pairs);
    queue.bytes = 0;
    const c10::Stream stream = current_stream(device);
    if (stream != queue.stream && !gradients.pairs.empty()) {
      c10::Event arrived(device.type());
      arrived.record(queue.stream);
      arrived.block(stream);
      for (const auto& pair : gradients.pairs) pair.second.record_stream(stream);
    }
    return gradients;
  }

  Gradients end(c10::Device device) {
    Gradients gradients = give(device);
    queues_.erase(device);
    return gradients;
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> all;
    for (const auto& each : queues_) all.push_back(each.first);
    return all;
  }

 private:
  struct Queue {
    int task;
    c10::Stream stream;
    std::vector<std::pair<Tensor, Tensor>> pairs;
    int64_t bytes;
  };

  static c10::Stream current_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  const int64_t bytes_;
  std::unordered_map<c10::Device, Queue> queues_;
};

// visit(object): of each parameter of the groups, and of each in the state with what it holds.
template <class Visit>
void visit_made_of(const pybind11::list& groups, const pybind11::dict& state, const Visit& visit) {
  for (const auto& group : groups) {
    for (const auto& param : pybind11::reinterpret_borrow<pybind11::sequence>(group)) visit(param.ptr());
    visit(Py_None);
  }
  PyObject *param, *entry, *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &entry);) {
    visit(param);
    if (!PyDict_Check(entry))
      visit(entry);
    else
      for (Py_ssize_t in = 0; PyDict_Next(entry, &in, &name, &value);) visit(name), visit(value);
  }
}

pybind11::list made_of(const pybind11::list& groups, const pybind11::dict& state) {
  pybind11::list all;
  visit_made_of(groups, state, [&](PyObject* object) { all.append(pybind11::handle(object)); });
  return all;
}

bool is_made_of(const pybind11::list& known, const pybind11::list& groups, const pybind11::dict& state) {
  const Py_ssize_t count = PyList_GET_SIZE(known.ptr());
  Py_ssize_t at = 0;
  bool same = true;
  visit_made_of(groups, state, [&](PyObject* object) {
    same = same && at < count && PyList_GET_ITEM(known.ptr(), at) == object;
    ++at;
  });
  return same && at == count;
}

}  // namespace

void bind_optimizers(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<Gradients>(m, "Gradients").def("__len__", [](const Gradients& all) { return all.pairs.size(); });
  py::class_<StepList>(m, "StepList")
      .def(py::init<std::string, Tensors, std::vector<Tensors>>())
      .def("collect", &StepList::collect)
      .def("collect_one", &StepList::collect_one)
      .def("collect_from", &StepList::collect_from)
      .def("lies_as_parameters", &StepList::lies_as_parameters);
  py::class_<Step>(m, "Step")
      .def("__len__", &Step::size)
      .def("check", &Step::check)
      .def("adamw", &Step::adamw)
      .def("sgd", &Step::sgd);
  py::class_<Arrivals> arrivals(m, "Arrivals");
  arrivals.def(py::init<int64_t>())
      .def("take", &Arrivals::take)
      .def("begin", &Arrivals::begin)
      .def("give", &Arrivals::give)
      .def("end", &Arrivals::end)
      .def("devices", &Arrivals::devices);
  arrivals.attr("BEGIN") = int(Arrivals::kBegin);
  arrivals.attr("STEP") = int(Arrivals::kStep);
  arrivals.attr("ALONE") = int(Arrivals::kAlone);
  m.def("check_arrived", check_arrived);
  m.def("check_step",
        [](std::string_view op, const Tensors& params, const Tensors& grads, const std::vector<Tensors>& state,
           int64_t block) { check_step(lists_of(op, params, grads, state), block); });
  m.def("lies_as", lies_as);
  m.def("made_of", made_of);
  m.def("is_made_of", is_made_of);
}

}  // namespace memkit
