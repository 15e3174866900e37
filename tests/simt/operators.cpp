// PyTorch's operators on the tensors of simt/runtime.cpp's devices: each that has a CUDA kernel runs its CPU kernel over the
// same memory, in the order of the current stream. What only writes into its arguments waits in the stream as a kernel would;
// what makes a tensor has to know its shape and runs at once, after the stream. In a capture both go into the graph.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <array>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime.h"

namespace {

using torch::jit::Stack;

// A CPU tensor over the same memory. It does not keep that alive: kernels do not either.
at::Tensor bare(const at::Tensor& tensor) {
  at::Tensor made = at::from_blob(tensor.numel() ? tensor.data_ptr() : nullptr, tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kCPU).requires_grad(false));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor over(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda() ? bare(tensor) : tensor; }

template <class F>
void each_tensor(c10::IValue& value, const F& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(change(tensor));
    value = std::move(out);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      out.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    value = std::move(out);
  }
}

struct Call {
  c10::OperatorHandle op;
  Stack arguments;

  Stack operator()() const {
    const at::AutoDispatchBelowAutograd below;
    Stack stack = arguments;
    op.callBoxed(&stack);
    return stack;
  }
};

// Draws what the device's generator, or the one given, stands for now.
c10::IValue generator_of(const c10::IValue& given, c10::Device device, bool captures) {
  if (given.isGenerator() && given.toGenerator().device().is_cpu()) return given;
  if (captures) return {};
  at::Generator own =
      given.isGenerator() ? given.toGenerator() : at::cuda::detail::getDefaultCUDAGenerator(device.index());
  const std::lock_guard<std::mutex> lock(own.mutex());
  const uint64_t offset = own.get_offset();
  own.set_offset(offset + 4);
  return at::detail::createCPUGenerator(own.current_seed() + offset);
}

const std::set<std::string> kLate = {"fill_.Scalar", "fill_.Tensor", "zero_",       "mul_.Tensor", "mul_.Scalar",
                                     "add_.Tensor",  "add_.Scalar",  "sub_.Tensor", "neg_"};

std::string plain_name(const c10::OperatorName& name) {
  return name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
}

void on_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const Stack given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  stack->resize(stack->size() - count);

  c10::Device device(at::kCUDA, c10::cuda::current_device());
  const auto look = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda()) device = tensor.device();
    return tensor;
  };
  Call call{op, given};
  std::vector<at::Tensor> written;                        // in the order of the arguments
  std::vector<std::pair<at::Tensor, std::size_t>> grown;  // outputs to be resized
  bool lists = false;
  for (std::size_t i = 0; i < count; ++i) {
    c10::IValue& value = call.arguments[i];
    each_tensor(value, look);
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice().has_index() ? value.toDevice() : device;
      value = c10::Device(at::kCPU);
    }
    const c10::AliasInfo* info = schema.arguments()[i].alias_info();
    const bool writes = info && info->isWrite();
    if (writes && value.isTensor() && value.toTensor().sizes() == at::IntArrayRef{0}) {
      grown.emplace_back(value.toTensor(), i);
      value = at::empty({0}, value.toTensor().options().device(at::kCPU));
    }
    if (writes) {
      if (given[i].isTensor()) written.push_back(given[i].toTensor());
      lists |= !given[i].isTensor();
    }
    each_tensor(value, over);
  }
  const c10::cuda::CUDAGuard guard(device);
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const bool captures = simt::captures(stream);
  const std::string name = plain_name(op.operator_name());
  for (std::size_t i = 0; i < count; ++i)
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos)
      call.arguments[i] = generator_of(given[i], device, captures);
  at::Tensor wide;
  if ((name == "_softmax" || name == "_log_softmax") && given[2].toBool()) {  // which the CPU's do not
    wide = given[0].toTensor().to(at::kFloat);
    call.arguments[0] = over(wide), call.arguments[2] = false;
  }

  if (grown.empty() && (!written.empty() || lists) && (captures || kLate.count(name))) {
    for (const at::Tensor& tensor : written) stack->push_back(tensor);
    simt::enqueue(stream, [call] { (void)call(); });
    return;
  }
  Stack results;
  if (captures) {
    simt::run_now(nullptr, [&] {  // for the results' shapes; what is written, is by the replay
      const at::AutoDispatchBelowAutograd below;
      Call trial = call;
      for (c10::IValue& value : trial.arguments)
        each_tensor(value, [](const at::Tensor& tensor) { return tensor.defined() ? tensor.clone() : tensor; });
      results = trial();
    });
  } else {
    simt::run_now(stream, [&] { results = call(); });
  }
  for (const auto& [tensor, i] : grown) {
    const at::Tensor made = call.arguments[i].toTensor();
    tensor.resize_(made.sizes());
    if (made.numel()) simt::run_now(stream, [to = over(tensor), made] { to.copy_(made); });
  }
  if (!written.empty()) {
    for (const at::Tensor& tensor : written) stack->push_back(tensor);
    return;
  }
  std::vector<at::Tensor> outputs;
  for (c10::IValue& value : results) {
    each_tensor(value, [&](const at::Tensor& made) {
      if (!made.defined()) return made;
      at::Tensor output = at::empty_strided(made.sizes(), made.strides(), made.options().device(device));
      if (made.numel()) simt::run_now(nullptr, [to = over(output), made] { to.copy_(made); });
      outputs.push_back(over(output));
      return output;
    });
    stack->push_back(value);
  }
  if (captures)
    simt::enqueue(stream, [call, outputs] {
      const at::AutoDispatchBelowAutograd below;
      auto next = outputs.begin();
      Stack results = call();
      for (c10::IValue& value : results)
        each_tensor(value, [&](const at::Tensor& made) {
          if (made.defined()) next++->copy_(made);
          return made;
        });
    });
}

// Which PyTorch has for its GPUs alone; in the widths of its CUDA kernel: float32 for narrower dtypes.
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& input, at::IntArrayRef shape,
                                            const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  const at::ScalarType wide = at::toOpMathType(input.scalar_type());
  std::vector<int64_t> dims;
  for (std::size_t i = 0; i < shape.size(); ++i) dims.push_back(input.dim() - 1 - static_cast<int64_t>(i));
  const double added = eps.value_or(wide == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                        : std::numeric_limits<float>::epsilon());
  const at::Tensor x = input.to(wide);
  const at::Tensor rstd = x.square().mean(dims, true).add(added).rsqrt();
  const at::Tensor y = x * rstd;
  return {(weight && weight->defined() ? y * weight->to(wide) : y).to(input.scalar_type()), rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                                     at::IntArrayRef shape, const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> wanted) {
  const at::ScalarType wide = rstd.scalar_type();
  std::vector<int64_t> dims, rows;
  for (int64_t i = 0; i < input.dim(); ++i)
    (i < input.dim() - static_cast<int64_t>(shape.size()) ? rows : dims).push_back(i);
  const bool weighs = weight && weight->defined();
  const at::Tensor y = input.to(wide) * rstd, g = grad.to(wide), gw = weighs ? g * weight->to(wide) : g;
  at::Tensor input_grad, weight_grad;
  if (wanted[0]) input_grad = ((gw - y * (gw * y).mean(dims, true)) * rstd).to(input.scalar_type());
  if (wanted[1] && weighs) {
    const at::Tensor product = g * y;
    weight_grad = (rows.empty() ? product : product.sum(rows)).to(weight->scalar_type());
  }
  return {input_grad, weight_grad};
}

bool is_locked(const at::Tensor& tensor) {
  cudaPointerAttributes attributes;
  return cudaPointerGetAttributes(&attributes, tensor.data_ptr()) == cudaSuccess &&
         attributes.type == cudaMemoryTypeHost;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TORCH_CHECK(at::is_expandable_to(source.sizes(), self.sizes()), "The size of tensor a ", self.sizes(),
              " must match the size of tensor b ", source.sizes());
  if (!self.numel()) return self;
  const bool staged = !source.is_cuda() && !(non_blocking && is_locked(source));
  const c10::Device device = self.is_cuda() ? self.device() : source.device();
  const c10::cuda::CUDAGuard guard(source.is_cuda() ? source.device() : device);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  simt::enqueue(stream.stream(), [to = bare(self), from = staged ? source.clone() : bare(source)] {
    const at::AutoDispatchBelowAutograd below;
    at::Tensor target = to;
    target.copy_(from);
  });
  const bool leaves = !self.is_cuda() && !(non_blocking && is_locked(self));
  if (leaves || (source.is_cuda() && self.is_cuda() && self.device() != source.device())) stream.synchronize();
  return self;
}

// What allocates, looks at no numbers, or is done by copies of the runtime's.
const std::set<std::string> kKept = {"empty.memory_format",
                                     "_fused_rms_norm",
                                     "_fused_rms_norm_backward",
                                     "empty_strided",
                                     "set_.source_Storage",
                                     "set_.source_Storage_storage_offset",
                                     "set_.source_Tensor",
                                     "set_",
                                     "resize_",
                                     "record_stream",
                                     "_local_scalar_dense",
                                     "_pin_memory",
                                     "is_pinned",
                                     "copy_",
                                     "_fused_sdp_choice"};

void take_over() {
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("copy_", &copy_);
  library.impl("_fused_rms_norm", &rms_norm);
  library.impl("_fused_rms_norm_backward", &rms_norm_backward);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema()) continue;
    const std::string plain = plain_name(name);
    const bool convolves = plain == "convolution" || plain == "convolution_backward";
    const bool has_cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
                         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (kKept.count(plain) || !has_cpu || (!convolves && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)))
      continue;
    bool views = false;
    for (const auto& argument : op->schema().arguments())
      views |= argument.alias_info() && !argument.alias_info()->isWrite();
    if (!views) library.impl(plain.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  }
}

const bool taken_over = (take_over(), true);

}  // namespace
