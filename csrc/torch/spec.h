// An activation by name: its formula, its parameters checked, and how it may be saved.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <string_view>

#include "../formulas/activation.h"

namespace memkit {

struct ActivationSpec {
  std::string_view name;  // as in the schema; static storage
  Act act;
  ActParams params;

  // Raises on an unknown name, a wrong number of parameters or a parameter out of range.
  ActivationSpec(std::string_view name, c10::ArrayRef<double> params);

  bool has_branch() const { return act >= Act::gelu; }
  // Whether the slope has two values, so that a bit of the input tells which.
  bool has_two_slopes() const;
  // As an output of this dtype shows them: hardtanh's bounds as they are stored.
  ActParams params_of_output(at::ScalarType dtype) const;
  // Whether the slope is a function of the output (and the branch) at these parameters. `dropped`: of the output that
  // dropout scaled, whose rounding blurs where the slope jumps at an output other than 0.
  bool invertible(bool dropped = false) const;
  // What a call asked to save `save` saves if its input is not to outlive it, as where it is overwritten: "output" or
  // "bit"; null where it needs the input.
  std::optional<std::string_view> save_without_input(std::string_view save, bool dropped = false) const;
};

// "gelu" or "gelu_tanh".
std::string_view gelu_name(std::string_view approximate);

enum class Save : uint8_t { input, output, bit };

// What `save` means for this call.
Save resolve_save(const ActivationSpec& spec, std::string_view save, bool inplace, bool dropped = false);

}  // namespace memkit
