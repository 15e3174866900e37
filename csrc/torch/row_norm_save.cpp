#include "row_norm_save.h"

#include <ATen/ATen.h>

#include <mutex>
#include <unordered_map>

#include "autocast.h"
#include "checks.h"
#include "engine.h"
#include "norm_engine.h"

namespace memkit {
namespace {

using at::Tensor;

// The weights a verdict is about. Their object may die and another take its address, hence the weak reference.
struct Identity {
  c10::weak_intrusive_ptr<c10::TensorImpl> weight;
  const void *weight_data, *bias_data;
  int64_t weight_version, bias_version;
  at::ScalarType dtype;

  Identity(const Tensor& weight, const OptionalTensor& bias, at::ScalarType dtype)
      : weight(weight.getIntrusivePtr()),
        weight_data(weight.const_data_ptr()),
        bias_data(bias ? bias->const_data_ptr() : nullptr),
        weight_version(weight.is_inference() ? -1 : weight._version()),
        bias_version(bias && !bias->is_inference() ? bias->_version() : -1),
        dtype(dtype) {}

  bool operator==(const Identity& other) const {
    return weight_data == other.weight_data && bias_data == other.bias_data && weight_version == other.weight_version &&
           bias_version == other.bias_version && dtype == other.dtype;
  }
};

struct Entry {
  Identity identity;
  WeightMeasurement measurement;
};

class Verdicts {
 public:
  OutputVerdict of(const RowNorm& norm, const Tensor& weight, const OptionalTensor& bias) {
    Identity identity(weight, bias, norm.dtype);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(weight.unsafeGetTensorImpl());
    if (found == entries_.end() || found->second.identity.weight.expired()) {
      if (entries_.size() >= sweep_at_) sweep();
      Entry entry{std::move(identity), {}};
      entry.measurement.start(norm, weight, bias);
      const auto [at, _] = entries_.insert_or_assign(weight.unsafeGetTensorImpl(), std::move(entry));
      return read(at->second);
    }
    Entry& entry = found->second;
    if (!(entry.identity == identity) && entry.measurement.done()) {
      entry.identity = std::move(identity);
      entry.measurement.start(norm, weight, bias);
    }
    return read(entry);
  }

 private:
  static OutputVerdict read(Entry& entry) {
    const int flaws = entry.measurement.flaws();
    return {flaws == 0, !(flaws & kNotInvertible)};
  }

  void sweep() {
    for (auto at = entries_.begin(); at != entries_.end();)
      at = at->second.identity.weight.expired() ? entries_.erase(at) : std::next(at);
    sweep_at_ = std::max<size_t>(256, 2 * entries_.size());
  }

  std::mutex mutex_;
  std::unordered_map<c10::TensorImpl*, Entry> entries_;
  size_t sweep_at_ = 256;
};

}  // namespace

OutputVerdict output_verdict(const RowNorm& norm, const OptionalTensor& weight, const OptionalTensor& bias,
                             bool rounded) {
  if (!weight) return {!bias.has_value(), true};
  static auto& verdicts = *new Verdicts;  // outlives every thread
  OutputVerdict verdict = verdicts.of(norm, *weight, bias);
  // A weight of more digits than the output: its gradient would have the output's, as a rounded one has already.
  const bool precise = c10::elementSize(weight->scalar_type()) > c10::elementSize(norm.dtype);
  if (precise && !rounded) verdict.exact = false;
  return verdict;
}

Kept resolve_kept(const RowNorm& norm, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  std::string_view save, bool inplace, bool rounded) {
  TORCH_CHECK_VALUE(save == "auto" || save == "input" || save == "output", norm.name(),
                    ": expected save 'auto', 'input' or 'output', got '", save, "'");
  TORCH_CHECK_VALUE(!(inplace && save == "input"), norm.name(),
                    ": expected save 'auto' or 'output' in place, got 'input', which is overwritten");
  if (save == "input") return Kept::input;
  if (!is_plain(input) || (weight && !is_plain(*weight)) || (bias && !is_plain(*bias)))  // values unknown
    return save == "output" ? Kept::output : Kept::input;
  const OutputVerdict verdict = output_verdict(norm, weight, bias, rounded || is_autocast(input));
  if (save == "auto" && !inplace) return verdict.exact ? Kept::output : Kept::input;
  TORCH_CHECK_VALUE(verdict.possible, norm.name(), ": expected, ", inplace ? "in place" : "with save='output'",
                    ", finite weights other than 0, from which the input follows, got some that are not; use ",
                    inplace ? "inplace='auto'" : "save='auto'");
  TORCH_CHECK_VALUE(verdict.exact || save == "output", norm.name(),
                    ": expected, in place, weights at least as large as their biases and as precise as the output, or "
                    "the gradient from the output would not be exact; use inplace='auto', or save='output' to accept "
                    "the error");
  return Kept::output;
}

}  // namespace memkit
