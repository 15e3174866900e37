// memkit::_softmax with its derivative: the output is kept, which the next operator mostly keeps too; it takes the input's memory
// where it may, and the gradient the incoming one's.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "derivative.h"
#include "eager.h"
#include "engine.h"
#include "fresh.h"
#include "named_ops.h"
#include "operators.h"
#include "optional.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit::softmax_op {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;

// What is asked for beside the input.
struct Request {
  int64_t dim;
  const OptionalTensor& mask;
  double scale;
  bool causal, log;

  const char* name() const { return log ? "log_softmax" : "softmax"; }
  bool masked() const { return mask || causal; }
  bool is_last(const Tensor& x) const { return x.dim() == 0 || at::maybe_wrap_dim(dim, x.dim()) == x.dim() - 1; }
};

Tensor call(const Tensor& x, const Request& r, at::ScalarType dtype) {
  return MEMKIT_CALL("memkit::_softmax", Tensor(const Tensor&, int64_t, const OptionalTensor&, double, bool, bool,
                                                at::ScalarType))(x, r.dim, r.mask, r.scale, r.causal, r.log, dtype);
}
Tensor& call_(Tensor& x, const Request& r) {
  return MEMKIT_CALL("memkit::_softmax_", Tensor & (Tensor&, int64_t, const OptionalTensor&, double, bool, bool))(
      x, r.dim, r.mask, r.scale, r.causal, r.log);
}
#define MEMKIT_CALL_BACKWARD(NAME, RESULT, GRAD) \
  MEMKIT_CALL_PAST_AUTOGRAD(NAME, RESULT(GRAD, const Tensor&, int64_t, double, bool, bool, bool))

// -- checks

void check(const Tensor& x, const Request& r) {
  check_float_tensor(r.name(), x);
  const int64_t dims = std::max<int64_t>(x.dim(), 1);
  TORCH_CHECK_INDEX(r.dim >= -dims && r.dim < dims, r.name(), ": expected dim in [", -dims, ", ", dims - 1, "], got ",
                    r.dim);
  TORCH_CHECK_VALUE(!r.causal || (x.dim() >= 2 && r.is_last(x)), r.name(),
                    ": expected, causal, an input of [..., queries, keys] and the last dim, got ", x.sym_sizes(),
                    " and dim ", r.dim);
  if (!r.mask) return;
  const Tensor& mask = *r.mask;
  if (mask.scalar_type() != at::kBool) check_float_tensor(r.name(), mask);
  TORCH_CHECK(mask.layout() == at::kStrided && mask.device() == x.device(), r.name(),
              ": expected a dense mask on the device of the input, ", x.device(), ", got ", mask.layout(), " on ",
              mask.device());
  bool fits = mask.dim() <= x.dim();
  for (int64_t d = 1; fits && d <= mask.dim(); ++d)
    fits = mask.sym_size(-d) == 1 || mask.sym_size(-d) == x.sym_size(-d);
  TORCH_CHECK_VALUE(fits, r.name(), ": expected a mask that expands to the input's ", x.sym_sizes(), ", got ",
                    mask.sym_sizes());
}

void check_own_mask(const Tensor& x, const Request& r) {
  TORCH_CHECK(!r.mask || !r.mask->has_storage() || !x.has_storage() || !r.mask->is_alias_of(x), r.name(),
              ": expected, in place, a mask in memory of its own, got one that shares the storage of the input");
}

// -- backends

// The mask as the kernels read it; `held` keeps its memory alive. x: what the kernels walk, its columns in the last dimension.
SoftmaxMask mask_of(Tensor mask, const Tensor& x, bool moved, int64_t dim, Tensor& held) {
  SoftmaxMask result;
  while (mask.dim() < x.dim()) mask = mask.unsqueeze(0);
  if (moved) mask = mask.movedim(dim, -1);
  const bool is_bool = mask.scalar_type() == at::kBool;
  if (!is_bool && (mask.scalar_type() == at::kDouble) != (x.scalar_type() == at::kDouble))
    mask = mask.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  if (x.size(-1) > 1 && (mask.size(-1) == 1 || mask.stride(-1) != 1)) {
    auto shape = mask.sizes().vec();
    shape.back() = x.size(-1);
    mask = mask.expand(shape).contiguous();
  }
  mask = mask.expand(x.sizes());
  for (bool copied = false;; copied = true) {
    int found = 0;  // dimensions beside the last, neighbours in one where they can be
    for (int64_t d = x.dim() - 2; d >= 0 && found <= 3; --d) {
      if (x.size(d) == 1) continue;
      const int inner = 3 - found;
      if (found && mask.stride(d) == result.strides[inner] * result.sizes[inner]) {
        result.sizes[inner] *= x.size(d);
      } else if (++found <= 3) {
        result.sizes[3 - found] = x.size(d), result.strides[3 - found] = mask.stride(d);
      }
    }
    if (found <= 3 || copied) break;
    mask = mask.contiguous();
    result = {};
  }
  held = mask;
  result.kind = is_bool ? SoftmaxMask::Kind::boolean : SoftmaxMask::Kind::additive;
  if (!is_bool) result.dtype = dtype_of(mask);
  result.data = mask.const_data_ptr();
  return result;
}

// How the kernels walk a contiguous tensor along a dimension.
SoftmaxArgs args_of(const Tensor& x, int64_t dim, double scale, bool causal, bool log, bool masked) {
  SoftmaxArgs args;
  args.dtype = dtype_of(x);
  const int64_t d = x.dim() ? at::maybe_wrap_dim(dim, x.dim()) : 0;
  args.columns = x.dim() ? x.size(d) : 1;
  for (int64_t i = d + 1; i < x.dim(); ++i) args.inner *= x.size(i);
  args.rows = args.columns ? x.numel() / args.columns : 0;
  args.log = log, args.masked = masked, args.scale = scale;
  if (causal) args.queries = x.size(-2);
  return args;
}

// What the forward works on: contiguous, and beside a mask with the dimension at the end.
Tensor walkable(const Tensor& x, const Request& r, bool& moved) {
  moved = r.mask && !r.is_last(x);
  return (moved ? x.movedim(r.dim, -1) : x).contiguous();
}

// x and y are walkable, and may be one.
void forward_into(const Tensor& x, const Tensor& y, const Request& r, bool moved) {
  if (x.is_meta() || x.numel() == 0) return;
  SoftmaxArgs args = args_of(x, moved ? -1 : r.dim, r.scale, r.causal, r.log, r.masked());
  Tensor held;
  if (r.mask) args.mask = mask_of(*r.mask, x, moved, r.dim, held);
  args.x = x.const_data_ptr();
  args.y = y.mutable_data_ptr();
  run_softmax(args, /*backward=*/false, x.device());
}

Tensor softmax(const Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal, bool log,
               at::ScalarType dtype) {
  const Request r{dim, mask, scale, causal, log};
  check(input, r);
  bool moved = false;
  const Tensor x = walkable(input.to(dtype), r, moved);
  check_float_tensor(r.name(), x);
  const Tensor y = x.is_alias_of(input) ? fresh_like(x) : x;  // a copy's memory serves
  forward_into(x, y, r, moved);
  return moved ? y.movedim(-1, dim).contiguous() : y;
}

Tensor& softmax_(Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal, bool log) {
  const Request r{dim, mask, scale, causal, log};
  check(input, r);
  check_inplace(r.name(), input, memory_blocker(input));
  check_own_mask(input, r);
  bool moved = false;
  const Tensor x = walkable(input, r, moved);
  forward_into(x, x, r, moved);
  if (!x.is_alias_of(input)) input.copy_(moved ? x.movedim(-1, dim) : x);
  return input;
}

void backward_into(const Tensor& grad, const Tensor& output, const Tensor& out, int64_t dim, double scale, bool causal,
                   bool log, bool masked) {
  // Saved-tensor hooks may hand back anything.
  TORCH_CHECK(grad.sym_sizes() == output.sym_sizes() && grad.scalar_type() == output.scalar_type() &&
                  grad.device() == output.device(),
              log ? "log_softmax" : "softmax", ": expected a gradient like the output, ", describe(output), " on ",
              output.device(), ", got ", describe(grad), " on ", grad.device());
  if (grad.is_meta() || grad.numel() == 0) return;
  const Tensor y = output.contiguous();
  SoftmaxArgs args = args_of(grad, dim, scale, causal, log, masked);
  args.grad = grad.const_data_ptr();
  args.y = const_cast<void*>(y.const_data_ptr());
  args.grad_input = out.mutable_data_ptr();
  run_softmax(args, /*backward=*/true, grad.device());
}

Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, double scale, bool causal, bool log,
                        bool masked) {
  const Tensor g = grad.contiguous(), out = g.is_alias_of(grad) ? fresh_like(g) : g;
  backward_into(g, output, out, dim, scale, causal, log, masked);
  return out;
}

Tensor& softmax_backward_(Tensor& grad, const Tensor& output, int64_t dim, double scale, bool causal, bool log,
                          bool masked) {
  check_inplace(log ? "log_softmax" : "softmax", grad, memory_blocker(grad));
  const Tensor g = grad.contiguous();
  backward_into(g, output, g, dim, scale, causal, log, masked);
  if (!g.is_alias_of(grad)) grad.copy_(g);
  return grad;
}

// -- autograd

at::ScalarType wide(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// By ATen's operators, for transforms and for masks that require grad.
Tensor by_stock(const Tensor& input, const Request& r, at::ScalarType dtype) {
  const double nothing = -std::numeric_limits<double>::infinity();
  Tensor z = input.to(dtype).to(wide(dtype)) * r.scale;
  if (r.mask) z = r.mask->scalar_type() == at::kBool ? z.masked_fill(r.mask->logical_not(), nothing) : z + *r.mask;
  if (r.causal) {
    const auto queries = at::arange(z.sym_size(-2).expect_int(), z.device()).unsqueeze(-1);
    z = z.masked_fill(at::arange(z.sym_size(-1).expect_int(), z.device()) > queries, nothing);
  }
  const auto of = [&](const Tensor& z) { return r.log ? at::log_softmax(z, r.dim) : at::softmax(z, r.dim); };
  if (!r.masked()) return of(z).to(dtype);
  const Tensor empty = (z == nothing).all(r.dim, /*keepdim=*/true);
  return of(z.masked_fill(empty, 0)).masked_fill(empty, r.log ? nothing : 0).to(dtype);
}

struct SoftmaxBackward : SavedNode {
  int64_t dim = -1;
  double scale = 1;
  bool causal = false, log = false, masked = false;
  at::ScalarType input_dtype = at::kFloat;

  std::string name() const override { return log ? "memkit::log_softmax_backward" : "memkit::softmax_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor()};
    const Tensor y = unpack(0);
    if (at::GradMode::is_enabled()) return {differentiable(grad, y)};
    if (is_sole_owner(grad) && is_plain(y)) {
      MEMKIT_CALL_BACKWARD("memkit::_softmax_backward_", Tensor&, Tensor&)
      (grad, y, dim, scale, causal, log, masked);
      return {grad.to(input_dtype)};
    }
    return {by_kernel(grad, y)};
  }

 private:
  // create_graph: the gradient itself needs a derivative.
  Tensor differentiable(const Tensor& grad, const Tensor& output) const {
    const auto composed = [dim = dim, scale = scale, log = log, masked = masked, dtype = input_dtype](
                              const autograd::variable_list& t, bool) {
      const Tensor y = t[1], g = t[0].to(y.scalar_type());
      Tensor dx = log ? at::_log_softmax_backward_data(g, y, dim, y.scalar_type())
                      : at::_softmax_backward_data(g, y, dim, y.scalar_type());
      if (scale != 1) dx = dx * scale;
      if (log && masked) dx = dx.masked_fill(y == -std::numeric_limits<double>::infinity(), 0);
      return autograd::variable_list{dx.to(dtype)};
    };
    const auto kernel = [&] { return autograd::variable_list{by_kernel(grad, output)}; };
    return differentiable_gradients({grad, output}, kernel, composed)[0];
  }

  Tensor by_kernel(const Tensor& grad, const Tensor& y) const {
    return MEMKIT_CALL_BACKWARD("memkit::_softmax_backward", Tensor, const Tensor&)(grad, y, dim, scale, causal, log,
                                                                                    masked)
        .to(input_dtype);
  }
};

bool takes_stock(const Tensor& x, const Request& r) {
  return needs_stock(x, r.mask) || autograd::compute_requires_grad(r.mask);
}

auto new_node(const Tensor& x, const Request& r) {
  auto node = make_node<SoftmaxBackward>();
  node->set_next_edges(autograd::collect_next_edges(x));
  node->dim = r.dim;
  node->scale = r.scale;
  node->causal = r.causal;
  node->log = r.log;
  node->masked = r.masked();
  node->input_dtype = x.scalar_type();
  return node;
}

Tensor softmax_autograd(const Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal,
                        bool log, at::ScalarType dtype) {
  const Request r{dim, mask, scale, causal, log};
  check(input, r);
  if (takes_stock(input, r)) return by_stock(input, r, dtype);
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = call(input, r, dtype);
  }
  if (!autograd::compute_requires_grad(input)) return y;
  auto node = new_node(input, r);
  autograd::set_history(y, node);
  node->save(y, /*is_output=*/true);
  return y;
}

Tensor& softmax_autograd_(Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal, bool log) {
  const Request r{dim, mask, scale, causal, log};
  check(input, r);
  check_inplace(r.name(), input, inplace_blocker(input));
  check_own_mask(input, r);
  if (takes_stock(input, r)) return input.copy_(by_stock(input.clone(), r, input.scalar_type()));
  const bool requires_grad = autograd::compute_requires_grad(input);
  autograd::check_inplace(input, requires_grad);
  decltype(make_node<SoftmaxBackward>()) node;
  if (requires_grad) node = new_node(input, r);
  {
    const at::AutoDispatchBelowAutograd below;  // the ADInplaceOrView kernel bumps the version
    call_(input, r);
  }
  if (!requires_grad) return input;
  const bool on_view = input.is_view();
  autograd::rebase_history(input, NodePtr(node));
  node->save(input, /*is_output=*/true, /*is_inplace_on_view=*/on_view);
  return input;
}

Tensor& bumping_(Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal, bool log) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_(input, {dim, mask, scale, causal, log});
  }
  autograd::impl::bump_version(input);  // afterwards: where the kernel raises, nothing was written
  return input;
}

Tensor& backward_bumping_(Tensor& grad, const Tensor& output, int64_t dim, double scale, bool causal, bool log,
                          bool masked) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    MEMKIT_CALL_BACKWARD("memkit::_softmax_backward_", Tensor&, Tensor&)
    (grad, output, dim, scale, causal, log, masked);
  }
  autograd::impl::bump_version(grad);
  return grad;
}

// Functionalization turns a write into a value.
Tensor& functional_(Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal, bool log) {
  return input.copy_(call(input, {dim, mask, scale, causal, log}, input.scalar_type()));
}
Tensor& backward_functional_(Tensor& grad, const Tensor& output, int64_t dim, double scale, bool causal, bool log,
                             bool masked) {
  return grad.copy_(MEMKIT_CALL_BACKWARD("memkit::_softmax_backward", Tensor, const Tensor&)(grad, output, dim, scale,
                                                                                             causal, log, masked));
}

Tensor softmax_batched(const Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal,
                       bool log, at::ScalarType dtype) {
  return by_stock(input, {dim, mask, scale, causal, log}, dtype);
}

// -- the eager entry

// The logarithm is float32 under CUDA's autocast, as in stock; softmax keeps its dtype, which the next product rounds to anyway.
at::ScalarType output_dtype(const Tensor& x, bool log, std::optional<at::ScalarType> dtype) {
  if (dtype) return *dtype;
  const bool widens =
      log && x.scalar_type() != at::kDouble && x.is_cuda() && at::autocast::is_autocast_enabled(at::kCUDA);
  return widens ? at::kFloat : x.scalar_type();
}

Tensor softmax_entry(const Tensor& input, int64_t dim, const OptionalTensor& mask, double scale, bool causal, bool log,
                     std::optional<at::ScalarType> dtype, Inplace inplace) {
  const Request r{dim, mask, scale, causal, log};
  const auto to = output_dtype(input, log, dtype);
  bool overwrite = false;
  if (inplace != Inplace::never) {
    check(input, r);
    const bool same = to == input.scalar_type();
    TORCH_CHECK_TYPE(same || inplace == Inplace::automatic, r.name(),
                     ": expected, in place, an input of the output's dtype ", to, ", got ", describe(input));
    const bool own_mask = !mask || !mask->has_storage() || !input.has_storage() || !mask->is_alias_of(input);
    overwrite = eager::resolve_inplace(inplace, r.name(), input, same && own_mask) == eager::Way::overwrite;
  }
  const pybind11::gil_scoped_release no_gil;
  if (!overwrite) return call(input, r, to);
  Tensor self = input;
  return call_(self, r);
}

constexpr char kEntry[] = "softmax";

void register_softmax(torch::Library& m) {
  m.impl("_softmax", softmax);
  m.impl("_softmax_", softmax_);
  m.impl("_softmax_backward", softmax_backward);
  m.impl("_softmax_backward_", softmax_backward_);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_softmax(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_softmax(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_softmax(m); }
TORCH_LIBRARY_IMPL(memkit, Autograd, m) {
  m.impl("_softmax", softmax_autograd);
  m.impl("_softmax_", softmax_autograd_);
}
TORCH_LIBRARY_IMPL(memkit, ADInplaceOrView, m) {
  m.impl("_softmax_", bumping_);
  m.impl("_softmax_backward_", backward_bumping_);
}
TORCH_LIBRARY_IMPL(memkit, Functionalize, m) {
  m.impl("_softmax_", functional_);
  m.impl("_softmax_backward_", backward_functional_);
}
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) { m.impl("_softmax", softmax_batched); }

}  // namespace memkit::softmax_op

void memkit::bind_softmax(pybind11::module_& m) { eager::bind<softmax_op::softmax_entry, softmax_op::kEntry>(m); }
