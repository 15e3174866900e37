// An operator and the layers that consume its result, as one: backward keeps what the operator was given, not its result.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "linear_scale.h"
#include "optional.h"

namespace memkit {

using Tensors = std::vector<at::Tensor>;

// What makes the consumers' input.
class Producer {
 public:
  explicit Producer(Tensors inputs) : inputs(std::move(inputs)) {}
  virtual ~Producer() = default;

  // Raises on what the operator does not take.
  virtual void check() const = 0;
  // The result. statistics: what backward needs beside the inputs; made where they are empty.
  virtual at::Tensor forward(Tensors& statistics) const = 0;
  // The same, by an operator that autograd and function transforms know.
  virtual at::Tensor differentiable(Tensors& statistics) const { return forward(statistics); }
  // The gradient of each input, undefined where not wanted. grad is nobody else's; last: nor are the inputs needed again.
  virtual Tensors backward(at::Tensor grad, const Tensors& statistics, const std::vector<bool>& wanted, bool last) = 0;

  // Whether backward is to have the result in the first input's place, being smaller and as good. Its numbers are then
  // these and a 1, with which the forward puts the result behind the statistics.
  virtual bool prefers_result() const { return false; }
  // Whether the result is the first input itself.
  virtual bool is_nothing() const { return false; }
  // From a result in the first input's place: another input with the same result and the same derivatives.
  virtual at::Tensor input_again([[maybe_unused]] const Tensors& statistics) const { return inputs[0]; }

  const Tensors inputs;
};

// What a call of memkit::_consumer asks of its producer; schemas.cpp says what stands where.
struct ProducerSpec {
  std::string_view op, act, packing;
  c10::ArrayRef<double> numbers;
  at::ScalarType dtype;  // of the result
};
std::unique_ptr<Producer> make_producer(const ProducerSpec& spec, Tensors inputs);

// How many parts of the batch bring something where the CPU makes a convolution's input gradient, by elements.
int64_t conv_parts(int64_t input, int64_t weight);

// The layers: linear ones, or one convolution.
struct Consumers {
  Tensors weights, biases;
  at::IntArrayRef conv;
  LinearScale* scale = nullptr;  // in backward: what the result of one layer was multiplied by
  const char* name = "linear";   // in what is said of layers that do not fit

  // `inputs`: the producer's.
  void check(const ProducerSpec& spec, const Tensors& inputs);
  Tensors forward(const at::Tensor& h) const;

  struct Gradients {
    at::Tensor h;
    Tensors weights, biases;
  };
  // Gradients of what is wanted: h, then each weight, then each bias. h(): their input, asked for where a weight's
  // gradient is wanted; if nobody else has its memory, or it is dead, its own gradient takes that. like: of h's shape,
  // format and device.
  Gradients backward(const Tensors& grads, const std::function<at::Tensor()>& h, const at::Tensor& like,
                     const std::vector<bool>& wanted, bool is_dead) const;
};

}  // namespace memkit
