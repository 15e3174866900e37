// Activations on the CPU. Each call covers the elements [begin, end); begin is a multiple of 8 (one byte of bits),
// so that threads never share a byte.
#pragma once

#include "../formulas/arguments.h"

namespace memkit::cpu {

// Whether the values come from polynomials in pieces on this machine (pieces.h), quicker than the formula.
bool is_in_pieces(Act act, Dtype dtype);

void activation_forward(const ActivationArgs& args, int64_t begin, int64_t end);
void activation_backward_from_input(const ActivationArgs& args, int64_t begin, int64_t end);
void activation_backward_from_output(const ActivationArgs& args, int64_t begin, int64_t end);
void activation_backward_from_bits(const ActivationArgs& args, int64_t begin, int64_t end);

}  // namespace memkit::cpu
