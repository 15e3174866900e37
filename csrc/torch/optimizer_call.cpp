#include "optimizer_call.h"

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "checks.h"
#include "operators.h"
#include "optional.h"

namespace memkit {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::vector<Tensor>;

// The tensors of parameters on one device, in lists of one length or none.
class StepList {
 public:
  StepList(std::string op, Tensors params, std::vector<Tensors> state)
      : op_(std::move(op)), params_(std::move(params)), state_(std::move(state)) {}

  // Takes the gradients of those parameters that have one, of all or of those named, for the steps below. Says how many
  // there are. Raises where one cannot be used, before anything is written.
  int64_t collect(const std::optional<std::vector<size_t>>& some) {
    grads_.clear();
    picked_.clear();
    const size_t count = some ? some->size() : params_.size();
    for (size_t k = 0; k < count; ++k) {
      const size_t i = some ? (*some)[k] : k;
      if (take(params_.at(i))) picked_.push_back(i);
    }
    if (picked_.size() < params_.size()) {
      some_params_ = select(params_);
      some_state_.clear();
      for (const Tensors& each : state_) some_state_.push_back(select(each));
    }
    return int64_t(grads_.size());
  }

  void adamw(double lr, const OptionalTensor& lr_tensor, double beta1, double beta2, double eps, double weight_decay,
             bool maximize, int64_t block_size, bool stochastic, const OptionalTensor& grad_scale,
             const OptionalTensor& found_inf) {
    const pybind11::gil_scoped_release free;
    const auto& s = state();
    MEMKIT_CALL("memkit::_adamw_",
                void(TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, TensorList, TensorList,
                     double, const OptionalTensor&, double, double, double, double, bool, int64_t,
                     const OptionalTensor&, const OptionalTensor&, const OptionalTensor&))
    (params(), grads_, s[0], s[1], s[2], s[3], s[4], s[5], lr, lr_tensor, beta1, beta2, eps, weight_decay, maximize,
     block_size, seed(stochastic), grad_scale, found_inf);
    grads_.clear();
  }

  void sgd(double lr, const OptionalTensor& lr_tensor, double momentum, double dampening, double weight_decay,
           bool nesterov, bool maximize, int64_t block_size, bool stochastic, const OptionalTensor& grad_scale,
           const OptionalTensor& found_inf) {
    const pybind11::gil_scoped_release free;
    const auto& s = state();
    MEMKIT_CALL("memkit::_sgd_", void(TensorList, TensorList, TensorList, TensorList, TensorList, double,
                                      const OptionalTensor&, double, double, double, bool, bool, int64_t,
                                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&))
    (params(), grads_, s[0], s[1], s[2], lr, lr_tensor, momentum, dampening, weight_decay, nesterov, maximize,
     block_size, seed(stochastic), grad_scale, found_inf);
    grads_.clear();
  }

 private:
  bool take(const Tensor& param) {
    const Tensor& grad = param.grad();
    if (!grad.defined()) return false;
    TORCH_CHECK(grad.layout() == at::kStrided, op_, ": expected dense gradients, got a ", grad.layout(), " one of ",
                describe(grad));
    TORCH_CHECK(grad.device() == param.device(), op_, ": expected a gradient on ", param.device(), ", got one on ",
                grad.device());
    grads_.push_back(grad);
    return true;
  }
  Tensors select(const Tensors& all) const {
    Tensors some;
    if (all.empty()) return some;
    for (const size_t i : picked_) some.push_back(all[i]);
    return some;
  }
  const Tensors& params() const { return picked_.size() < params_.size() ? some_params_ : params_; }
  const std::vector<Tensors>& state() const { return picked_.size() < params_.size() ? some_state_ : state_; }

  // Of the device's generator, which torch.manual_seed and captured graphs know.
  OptionalTensor seed(bool stochastic) const {
    using Limits = std::numeric_limits<int64_t>;
    if (!stochastic) return std::nullopt;
    return at::randint(Limits::min(), Limits::max(), {}, params_[0].options().dtype(at::kLong));
  }

  const std::string op_;
  const Tensors params_;
  const std::vector<Tensors> state_;
  Tensors grads_, some_params_;
  std::vector<Tensors> some_state_;
  std::vector<size_t> picked_;
};

// Whether a hook of the node that adds the parameter's gradient up has yet to see it when the tensor's own hooks run.
bool gradient_is_awaited(const Tensor& param) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
  return node && !node->post_hooks().empty();
}

}  // namespace

void bind_optimizers(pybind11::module_& m) {
  pybind11::class_<StepList>(m, "StepList")
      .def(pybind11::init<std::string, Tensors, std::vector<Tensors>>())
      .def("collect", &StepList::collect)
      .def("adamw", &StepList::adamw)
      .def("sgd", &StepList::sgd);
  m.def("gradient_is_awaited", gradient_is_awaited);
}

}  // namespace memkit
