// What every autograd node of memkit has: saved tensors that hooks see, released with the graph, under a lock.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "node.h"
#include "parameters.h"

namespace memkit {

class NonzerosRef;

// Whether lean() took the tensor that this thread saved last: it then keeps a recipe, and each unpacking makes it anew.
inline thread_local bool packed_recipe = false;

// Whether lean(), with nothing around it, is to pack the tensor, and would keep it as it is: to ask it takes Python 1.4 µs.
bool lean_keeps(const at::Tensor& x);
// Whether what the node keeps was packed by lean() alone or with hooks around it that may be asked again, in this thread and
// not long ago.
bool lean_packed(const torch::autograd::Node& node);
void note_lean_packed(uint64_t sequence_nr);

// The result that a node of this thread is saving, which hooks are given detached.
inline thread_local const at::Tensor* saved_result = nullptr;

struct SavedNode : torch::autograd::Node {
  // How many operators run to rebuild the result, one after the other; 0: not known yet. See lean.cpp.
  mutable std::atomic<int> depth{0};
  // Of the result, where lean() has packed them: in one thread's forward, while another runs backward.
  std::shared_ptr<const NonzerosRef> nonzeros() const { return std::atomic_load(&nonzeros_); }
  void set_nonzeros(std::shared_ptr<const NonzerosRef> found) const { std::atomic_store(&nonzeros_, std::move(found)); }

  // Keeps an input, or with is_output a result of the operator; undefined tensors are kept as such.
  void save(const at::Tensor& x, bool is_output = false, bool is_inplace_on_view = false) {
    if (!is_output && lean_keeps(x)) {
      const WithoutHooks unasked;
      saved_.emplace_back(x, false);
      note_lean_packed(sequence_nr());
      made_in_lean_ = true;
      return;
    }
    const bool outer = std::exchange(packed_recipe, false);
    const Saving saving(is_output ? &x : nullptr);
    saved_.emplace_back(x, is_output, is_inplace_on_view);
    made_in_lean_ = made_in_lean_ || lean_packed(*this);
    if (std::exchange(packed_recipe, outer) && saved_.size() <= 64) recipes_ |= uint64_t(1) << (saved_.size() - 1);
    if (!is_output) return;
    kept_outputs_ |= uint64_t(1) << x.output_nr();
    kept_version_ = x._version();
  }
  void save(const std::optional<at::Tensor>& x) { save(x.value_or(at::Tensor())); }
  // Of what can_rebuild, and is saved after its input.
  void save_parameter(const std::optional<at::Tensor>& x) {
    save(x);
    if (x && copies_parameters && made_in_lean_ && may_be_freed(*x))
      copies_.emplace_back(saved_.size() - 1, x->detach().clone());
  }
  // Whether what it saved was packed by lean(), alone or with hooks around it that may be asked again.
  bool made_in_lean() const { return made_in_lean_; }

  // Whether backward needs this result of the operator as it was.
  bool keeps_output(uint32_t number) const { return number < 64 && kept_outputs_ >> number & 1; }

  // This result is on record as the node's; if it can be rebuilt, its version is followed from now on.
  void watch(const at::Tensor& result) {
    if (can_rebuild(result.output_nr())) result_version_ = torch::autograd::impl::version_counter(result);
  }
  // Whether the result that can be rebuilt has been changed in place by nobody so far.
  bool is_result_unchanged() const { return result_version_.enabled() && result_version_.current_version() == 0; }

  // Whether many elements of the result are expected to be zero.
  virtual bool makes_zeros() const { return false; }

  // Whether this result of the operator can be computed again, to the bit, from what is saved; see lean.cpp.
  virtual bool can_rebuild([[maybe_unused]] uint32_t output) const { return false; }
  at::Tensor rebuild() {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    const int task = torch::autograd::get_current_graph_task_id();
    if (task < 0 || task != unpacked_in_) unpacked_.clear();
    unpacked_in_ = task;
    if (task >= 0) unpacked_.resize(saved_.size());
    return recompute();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    for (at::Tensor& grad : grads)  // a view that negates: kernels read its memory
      if (grad.defined() && grad.is_neg()) grad = grad.resolve_neg();
    const auto has_tangent = [](const at::Tensor& x) { return x.defined() && x._fw_grad(0).defined(); };
    if (std::any_of(grads.begin(), grads.end(), has_tangent) && !at::GradMode::is_enabled())
      return with_tangents(std::move(grads));
    return with_saved([&] { return backward(std::move(grads)); });
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (torch::autograd::SavedVariable& each : saved_) each.reset_data();
    unpacked_.clear();
    copies_.clear();
    released_ = true;
  }

 protected:
  // One gradient an input edge, undefined where none is asked for or none arrived.
  virtual torch::autograd::variable_list backward(torch::autograd::variable_list&& grads) = 0;

  // Of gradients with forward-mode tangents, which kernels would leave out: as for a derivative of them.
  torch::autograd::variable_list with_tangents(torch::autograd::variable_list&& grads);

  // What work finds, with what is saved to itself.
  template <class Work>
  torch::autograd::variable_list with_saved(const Work& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    if (unpacked_in_ != torch::autograd::get_current_graph_task_id()) unpacked_.clear();
    torch::autograd::variable_list result = work();
    unpacked_.clear();
    return result;
  }

  // Of the result when it was kept, where it was.
  int64_t kept_version() const { return kept_version_; }

  // The result again; called where can_rebuild, without autograd.
  virtual at::Tensor recompute() { return {}; }

  // As if nothing had been saved.
  void forget() {
    saved_.clear();
    recipes_ = 0;
  }

  // What was saved i-th.
  at::Tensor unpack(size_t i) {
    if (i < unpacked_.size() && unpacked_[i].defined()) return unpacked_[i];
    at::Tensor x = saved_[i].unpack(getptr());
    if (i < unpacked_.size() && !is_recipe(i)) unpacked_[i] = x;
    return x;
  }

  // As unpack for a recompute. A tensor that lean() had to rebuild belongs to nobody else: `is_own` says so.
  at::Tensor unpack_for_rebuild(size_t i, bool& is_own) {
    is_own = is_recipe(i);
    return unpack(i);
  }

  // What save_parameter saved, for a recompute; undefined as such.
  at::Tensor unpack_parameter(size_t i) {
    for (const auto& [place, copy] : copies_)
      if (place == i) return copy;
    at::Tensor x = unpack(i);
    if (x.defined()) check_there(x);
    return x;
  }

  // As unpack; where the graph is not kept, the node lets go of it, so that the result may be its memory's sole owner.
  // What hooks handed back has a Python object, and that a handle: another tensor of the same memory takes its place.
  at::Tensor take(size_t i) {
    at::Tensor x = unpack(i);
    if (torch::autograd::get_current_graph_task_keep_graph()) return x;
    saved_[i].reset_data();
    if (i < unpacked_.size()) unpacked_[i].reset();
    return x.use_count() > 1 && is_plain(x) && !at::GradMode::is_enabled() ? x.tensor_data() : x;
  }

 private:
  struct Saving {
    explicit Saving(const at::Tensor* result) : outer(std::exchange(saved_result, result)) {}
    ~Saving() { saved_result = outer; }
    const at::Tensor* outer;
  };

  struct WithoutHooks {
    ~WithoutHooks() { at::SavedTensorDefaultHooks::set_tracing(outer); }
    const bool outer = at::SavedTensorDefaultHooks::set_tracing(true);
  };

  bool is_recipe(size_t i) const { return i < 64 && recipes_ >> i & 1; }

  // In the node itself, as most nodes live until backward: each piece of theirs is one more hole in the heap then.
  c10::SmallVector<torch::autograd::SavedVariable, 4> saved_;
  // Which of them, of the first 64; known from the packing, as an unpacking may run a checkpoint, which unpacks others.
  uint64_t recipes_ = 0;
  // From a rebuild to this node's turn in the same backward: hooks may cost, and a checkpoint's allow one unpacking only. Not what
  // lean() rebuilds, which is made twice rather than kept meanwhile, but for concatenations.
  std::vector<at::Tensor> unpacked_;
  std::vector<std::pair<size_t, at::Tensor>> copies_;
  uint64_t kept_outputs_ = 0;  // bit k: the k-th result
  int64_t kept_version_ = -1;
  mutable std::shared_ptr<const NonzerosRef> nonzeros_;
  c10::VariableVersion result_version_;
  int unpacked_in_ = -1;  // the backward that filled unpacked_: in a later one what is saved is looked at again
  bool made_in_lean_ = false;
  bool released_ = false;
};

}  // namespace memkit
