#include "row_norm_save.h"

#include <ATen/ATen.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "autocast.h"
#include "checks.h"
#include "engine.h"
#include "norm_engine.h"

namespace memkit {
namespace {

using at::Tensor;

// In shorter rows that were not centred, the gradient that is left when what lies along the output has been taken off may
// be any small part of it, and the output's rounding is not.
constexpr int64_t kFewColumns = 8;

bool is_short(const RowNorm& norm, const Tensor& input) {
  return !norm.centered && c10::multiply_integers(norm.shape(input.sizes())) < kFewColumns;
}

// Whether there is a bias of more digits than the output. With eps beside a deviation backward multiplies x_hat by the quotient
// of the two: in a row without deviation it would be the bias's rounding.
bool loses_offset(const RowNorm& norm, const OptionalTensor& bias) {
  const bool beside = norm.denominator == Denominator::deviation || norm.denominator == Denominator::sample_deviation;
  return beside && bias && c10::elementSize(bias->scalar_type()) > c10::elementSize(norm.dtype);
}

struct OutputVerdict {
  bool known;     // by a measurement
  bool exact;     // within twice the error of stock PyTorch's gradients: WeightCheck in formulas/norm.h
  bool possible;  // every weight can be divided by
};

OutputVerdict verdict_of(std::optional<int> flaws) {
  return {flaws.has_value(), flaws == 0, !(flaws.value_or(0) & kNotInvertible)};
}

// Measurements that run beside the program, each with the weight it is about, which may die and whose address another
// may take.
class Measurements {
 public:
  OutputVerdict of(const RowNorm& norm, const Tensor& weight, const OptionalTensor& bias, bool now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    WeightMeasurement& measurement = *weights_.of(weight);
    if (now) measurement.wait();
    std::optional<int> flaws = measurement.flaws();
    if (measurement.done()) measurement.start(norm, weight, bias);
    if (now) measurement.wait(), flaws = measurement.flaws();
    return verdict_of(flaws);
  }

  // What is known of a weight made from the parameter is known of this one, which was made anew in the same way.
  void follow(const Tensor& made, const Tensor& parameter) {
    const std::lock_guard<std::mutex> lock(mutex_);
    weights_.of(made) = parameters_.of(parameter);
  }

 private:
  class Table {
   public:
    std::shared_ptr<WeightMeasurement>& of(const Tensor& weight) {
      auto found = entries_.find(weight.unsafeGetTensorImpl());
      if (found == entries_.end() || found->second.weight.expired()) {
        if (entries_.size() >= sweep_at_) sweep();
        Entry entry{Weak(weight.getIntrusivePtr()), std::make_shared<WeightMeasurement>()};
        found = entries_.insert_or_assign(weight.unsafeGetTensorImpl(), std::move(entry)).first;
      }
      return found->second.measurement;
    }

   private:
    using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
    struct Entry {
      Weak weight;
      std::shared_ptr<WeightMeasurement> measurement;
    };

    void sweep() {
      for (auto at = entries_.begin(); at != entries_.end();)
        at = at->second.weight.expired() ? entries_.erase(at) : std::next(at);
      sweep_at_ = std::max<size_t>(256, 2 * entries_.size());
    }

    std::unordered_map<c10::TensorImpl*, Entry> entries_;
    size_t sweep_at_ = 256;
  };

  std::mutex mutex_;
  Table weights_, parameters_;  // parameters: of what is made from them in each call
};

Measurements& measurements() {
  static auto& one = *new Measurements;  // outlives every thread
  return one;
}

OutputVerdict measured(const RowNorm& norm, const Tensor& weight, const OptionalTensor& bias, bool now) {
  if (!weight.is_cpu()) return measurements().of(norm, weight, bias, now);
  WeightMeasurement measurement;
  measurement.start(norm, weight, bias);
  return verdict_of(measurement.flaws());
}

// now: waits for the device, so that it is about the weights as they are.
OutputVerdict output_verdict(const RowNorm& norm, const OptionalTensor& weight, const OptionalTensor& bias,
                             bool rounded, bool now) {
  if (!weight) return {true, !bias.has_value(), true};
  OutputVerdict verdict = measured(norm, *weight, bias, now);
  // A weight of more digits than the output: its gradient would have the output's, as a rounded one has already.
  const bool precise = c10::elementSize(weight->scalar_type()) > c10::elementSize(norm.dtype);
  if (precise && !rounded) verdict.exact = false;
  return verdict;
}

}  // namespace

void follow_weight(const Tensor& made, const Tensor& parameter) {
  if (!made.is_cpu() && is_plain(made) && is_plain(parameter)) measurements().follow(made, parameter);
}

void check_save(const RowNorm& norm, std::string_view save, bool inplace) {
  TORCH_CHECK_VALUE(save == "auto" || save == "input" || save == "output", norm.name(),
                    ": expected save 'auto', 'input' or 'output', got '", save, "'");
  TORCH_CHECK_VALUE(!(inplace && save == "input"), norm.name(),
                    ": expected save 'auto' or 'output' in place, got 'input', which is overwritten");
}

Kept resolve_kept(const RowNorm& norm, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  std::string_view save, bool inplace, bool rounded) {
  check_save(norm, save, inplace);
  if (save == "input") return Kept::input;
  if (loses_offset(norm, bias)) {
    TORCH_CHECK_VALUE(save == "auto" && !inplace, norm.name(), ": expected, ",
                      inplace ? "in place" : "with save='output'", ", a bias of the output's dtype ", norm.dtype,
                      " beside a denominator 'deviation' or 'sample_deviation', got ", describe(*bias),
                      "; use save='auto', out of place");
    return Kept::input;
  }
  if (!is_plain(input) || (weight && !is_plain(*weight)) || (bias && !is_plain(*bias)))  // values unknown
    return save == "output" ? Kept::output : Kept::input;
  rounded = rounded || is_autocast(input);
  const auto ask = [&](bool now) {
    OutputVerdict verdict = output_verdict(norm, weight, bias, rounded, now);
    if (is_short(norm, input)) verdict.exact = false;
    return verdict;
  };
  OutputVerdict verdict = ask(/*now=*/false);
  if (save == "auto" && !inplace) return verdict.exact ? Kept::output : Kept::input;
  const bool fits = verdict.possible && (verdict.exact || save == "output");
  if (!verdict.known || !fits) verdict = ask(/*now=*/true);
  TORCH_CHECK_VALUE(verdict.possible, norm.name(), ": expected, ", inplace ? "in place" : "with save='output'",
                    ", finite weights other than 0, from which the input follows, got some that are not; use ",
                    inplace ? "inplace='auto'" : "save='auto'");
  TORCH_CHECK_VALUE(
      verdict.exact || save == "output", norm.name(),
      ": expected, in place, weights at least as large as their biases and as precise as the output",
      norm.centered ? "" : ", and rows of at least 8 elements",
      ", or the gradient from the output would not be exact; use inplace='auto', or save='output' to accept "
      "the error");
  return Kept::output;
}

}  // namespace memkit
