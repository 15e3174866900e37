// memkit::_max_pool2d: stock's max pooling, of which backward needs where in its window each maximum was, and the input's
// shape.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "eager.h"
#include "engine.h"
#include "fresh.h"
#include "named_ops.h"
#include "operators.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit::pooling {
namespace {

namespace autograd = torch::autograd;
using at::IntArrayRef;
using at::Tensor;
using c10::SymInt;
using Both = std::tuple<Tensor, Tensor>;
using Sizes = std::vector<int64_t>;

constexpr std::string_view kOp = "max_pool2d";

// As torch.nn.functional.max_pool2d takes it: one number or two each, none for the kernel's as stride.
struct Window {
  Sizes kernel, stride, padding, dilation;
  bool ceil_mode = false;
  static constexpr int64_t kMost = 1 << 20;  // places: what is worked out for each beforehand is small

  static int64_t at(const Sizes& sizes, int axis) { return axis ? sizes.back() : sizes.front(); }
  const Sizes& steps() const { return stride.empty() ? kernel : stride; }
  int64_t size() const { return at(kernel, 0) * at(kernel, 1); }
  bool wide() const { return size() > 256; }
  at::ScalarType places() const { return wide() ? at::kInt : at::kByte; }

  // The number of results along an axis of that size, as ATen's pooling_output_shape has it.
  SymInt results(const SymInt& size, int axis) const {
    const int64_t step = at(steps(), axis), pad = at(padding, axis);
    const SymInt room = size + (2 * pad - at(dilation, axis) * (at(kernel, axis) - 1) - 1);
    if (room < 0) return 0;
    const SymInt n = (room + (ceil_mode ? step - 1 : 0)) / step + 1;
    return ceil_mode && (n - 1) * step >= size + pad ? n - 1 : n;  // no window starts in the padding behind
  }
  std::vector<SymInt> results(c10::SymIntArrayRef picture) const {
    std::vector<SymInt> sizes = picture.vec();
    for (size_t axis : {0, 1}) sizes[sizes.size() - 2 + axis] = results(sizes[sizes.size() - 2 + axis], int(axis));
    return sizes;
  }

  // Whether it is one that stock computes on such an input; of all others stock says what is wrong.
  bool fits(const Tensor& x) const {
    for (const Sizes* sizes : {&kernel, &stride, &padding, &dilation})
      if (sizes->size() > 2 || (sizes->empty() && sizes != &stride)) return false;
    if (x.dim() != 3 && x.dim() != 4) return false;
    for (int axis : {0, 1}) {
      const int64_t k = at(kernel, axis), d = at(dilation, axis), pad = at(padding, axis);
      for (int64_t number : {k, at(steps(), axis), d})
        if (number <= 0 || number > std::numeric_limits<int32_t>::max()) return false;
      if (pad < 0 || pad > k / 2 || size() > kMost) return false;
      if (results(x.sym_size(axis - 2), axis) <= 0) return false;
      if (pad > 0 && x.sym_size(axis - 2) < d) return false;  // a window may step over all there is
    }
    for (int64_t i = x.dim() - 3; i < x.dim(); ++i)
      if (x.sym_size(i) == 0) return false;
    return true;
  }
};

Window window_of(IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return {kernel.vec(), stride.vec(), padding.vec(), dilation.vec(), ceil_mode};
}

#define MEMKIT_WINDOW IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool
#define MEMKIT_WINDOW_OF(W) W.kernel, W.stride, W.padding, W.dilation, W.ceil_mode

Both call(const Tensor& x, const Window& w) {
  return MEMKIT_CALL("memkit::_max_pool2d", Both(const Tensor&, MEMKIT_WINDOW))(x, MEMKIT_WINDOW_OF(w));
}
Tensor call_backward(const Tensor& grad, const Tensor& places, c10::SymIntArrayRef size, bool last, const Window& w) {
  return MEMKIT_CALL_PAST_AUTOGRAD("memkit::_max_pool2d_backward",
                                   Tensor(const Tensor&, const Tensor&, c10::SymIntArrayRef, bool, MEMKIT_WINDOW))(
      grad, places, size, last, MEMKIT_WINDOW_OF(w));
}
#undef MEMKIT_WINDOW
#undef MEMKIT_WINDOW_OF

void check(const Tensor& x, const Window& w) {
  check_float_tensor(kOp, x);
  TORCH_CHECK_VALUE(w.fits(x), kOp, ": expected [N, C, H, W] or [C, H, W], and windows with a result, got ",
                    x.sym_sizes(), ", kernel_size ", w.kernel, ", stride ", w.stride, ", padding ", w.padding,
                    " and dilation ", w.dilation);
}

at::MemoryFormat format_of(const Tensor& x) {
  return x.dim() == 4 ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}
at::MemoryFormat format_of(bool channels_last) {
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

PoolAxis axis_of(const Tensor& picture, const Tensor& results, const Window& w, int axis) {
  return {picture.size(axis - 2),      results.size(axis - 2),      Window::at(w.kernel, axis),
          Window::at(w.steps(), axis), Window::at(w.padding, axis), Window::at(w.dilation, axis)};
}

// `picture` lies as the input, `results` as the output.
PoolArgs arguments(const Tensor& picture, const Tensor& results, const Tensor& places, const Window& w, bool last) {
  PoolArgs args;
  args.dtype = dtype_of(picture);
  args.channels = last ? picture.size(-3) : 1;
  args.planes = (picture.dim() == 4 ? picture.size(0) : 1) * (last ? 1 : picture.size(-3));
  args.rows = axis_of(picture, results, w, 0);
  args.columns = axis_of(picture, results, w, 1);
  args.places = places.mutable_data_ptr();
  args.wide = w.wide();
  return args;
}

Both max_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
              bool ceil_mode) {
  const Window w = window_of(kernel, stride, padding, dilation, ceil_mode);
  check(input, w);
  const at::MemoryFormat format = format_of(input);
  const std::vector<SymInt> sizes = w.results(input.sym_sizes());
  Tensor out = with_pages(at::empty_symint(sizes, input.options(), format));
  Tensor places = with_pages(at::empty_symint(sizes, input.options().dtype(w.places()), format));
  if (input.is_meta() || out.numel() == 0) return {out, places};
  const Tensor x = input.contiguous(format);
  PoolArgs args = arguments(x, out, places, w, format == at::MemoryFormat::ChannelsLast);
  args.x = x.const_data_ptr();
  args.out = out.mutable_data_ptr();
  run_max_pool(args, false, x.device());
  return {out, places};
}

Tensor max_pool_backward(const Tensor& grad, const Tensor& places, c10::SymIntArrayRef size, bool channels_last,
                         IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         bool ceil_mode) {
  const Window w = window_of(kernel, stride, padding, dilation, ceil_mode);
  const at::MemoryFormat format = format_of(channels_last);
  Tensor out = with_pages(at::empty_symint(size, grad.options(), format));
  check(out, w);
  const std::vector<SymInt> sizes = w.results(size);
  TORCH_CHECK(places.device() == grad.device(), kOp, ": expected places on ", grad.device(), ", got ", places.device());
  TORCH_CHECK_VALUE(grad.sym_sizes() == sizes && places.sym_sizes() == sizes && places.scalar_type() == w.places(), kOp,
                    ": expected a gradient of ", c10::SymIntArrayRef(sizes), " and places of that and ", w.places(),
                    ", got ", grad.sym_sizes(), ", ", places.sym_sizes(), " and ", places.scalar_type());
  if (out.is_meta() || out.numel() == 0) return out;
  const Tensor from = grad.contiguous(format), at = places.contiguous(format);
  PoolArgs args = arguments(out, from, at, w, channels_last);
  args.x = from.const_data_ptr();
  args.out = out.mutable_data_ptr();
  run_max_pool(args, true, out.device());
  return out;
}

// -- autograd

// Where the maxima were as ATen has it: the place in the picture, int64.
Tensor indices_of(const Tensor& places, const SymInt& width, const Window& w) {
  const auto along = [&](int axis) {
    const auto k = axis ? places.to(at::kLong).remainder(Window::at(w.kernel, 1))
                        : places.to(at::kLong).floor_divide(Window::at(w.kernel, 1));
    Tensor begin = at::arange(places.sym_size(axis - 2), k.options()) * Window::at(w.steps(), axis);
    return (begin - Window::at(w.padding, axis)).unsqueeze_(axis ? 0 : 1) + k * Window::at(w.dilation, axis);
  };
  return along(0) * width + along(1);
}

struct MaxPool2dBackward : SavedNode {
  Window window;
  std::vector<SymInt> size;
  bool channels_last = false;

  std::string name() const override { return "memkit::max_pool2d_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return {Tensor()};
    const Tensor places = unpack(0);
    if (!at::GradMode::is_enabled() && !needs_stock(grad))
      return {call_backward(grad, places, size, channels_last, window)};
    // With its own derivative. Of its second argument, the input, it reads how that lies in memory.
    const Tensor like = at::empty_symint(size, grad.options(), format_of(channels_last));
    const Window& w = window;
    return {at::max_pool2d_with_indices_backward(grad, like, w.kernel, w.steps(), w.padding, w.dilation, w.ceil_mode,
                                                 indices_of(places, size.back(), w))};
  }
};

Both max_pool_autograd(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                       IntArrayRef dilation, bool ceil_mode) {
  const Window w = window_of(kernel, stride, padding, dilation, ceil_mode);
  TORCH_CHECK_NOT_IMPLEMENTED(!needs_stock(input), kOp,
                              ": expected no function transform and no forward-mode derivative; ",
                              "use torch.nn.functional.max_pool2d under these");
  Both out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = call(input, w);
  }
  if (!autograd::compute_requires_grad(input)) return out;
  auto node = make_node<MaxPool2dBackward>();
  node->set_next_edges(autograd::collect_next_edges(input));
  node->window = w;
  node->size = input.sym_sizes().vec();
  node->channels_last = format_of(input) == at::MemoryFormat::ChannelsLast;
  node->save(std::get<1>(out));
  autograd::set_history(std::get<0>(out), node);
  return out;
}

// -- the eager entry

// Whether there is a kernel for it, and nobody looks on who knows stock's operator alone.
bool serves(const Tensor& x, const Window& w) {
  const auto dtype = x.scalar_type();
  return x.layout() == at::kStrided && (x.is_cpu() || x.is_cuda() || x.is_meta()) &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16) &&
         !needs_stock(x) && !torch::jit::tracer::isTracing() && w.fits(x);
}

// None where Python shall call stock, with the arguments as they came.
Tensor pool(const Tensor& input, const Sizes& kernel, const Sizes& stride, const Sizes& padding, const Sizes& dilation,
            bool ceil_mode) {
  const Window w{kernel, stride, padding, dilation, ceil_mode};
  const pybind11::gil_scoped_release no_gil;
  return serves(input, w) ? std::get<0>(call(input, w)) : Tensor();
}

constexpr char kEntry[] = "max_pool2d";

void register_pooling(torch::Library& m) {
  m.impl("_max_pool2d", max_pool);
  m.impl("_max_pool2d_backward", max_pool_backward);
}

}  // namespace
}  // namespace memkit::pooling

namespace memkit {

void bind_pooling(pybind11::module_& m) { eager::bind<pooling::pool, pooling::kEntry>(m); }

TORCH_LIBRARY_IMPL(memkit, CPU, m) { pooling::register_pooling(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { pooling::register_pooling(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { pooling::register_pooling(m); }
TORCH_LIBRARY_IMPL(memkit, Autograd, m) { m.impl("_max_pool2d", pooling::max_pool_autograd); }

}  // namespace memkit
