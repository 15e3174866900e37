// Activations on the CPU. Each call covers the elements [begin, end); begin is a multiple of 8 (one byte of bits),
// so that threads never share a byte.
#pragma once

#include "../formulas/arguments.h"

namespace memkit::cpu {

// Whether tanh has a loop of its own on this machine (values.h), quicker than the formula's.
bool has_own_tanh(Dtype dtype);

void activation_forward(const ActivationArgs& args, int64_t begin, int64_t end);
void activation_backward_from_input(const ActivationArgs& args, int64_t begin, int64_t end);
void activation_backward_from_output(const ActivationArgs& args, int64_t begin, int64_t end);
void activation_backward_from_bits(const ActivationArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
