// What tests draw from: the same numbers in every run.
#pragma once

#include <random>

namespace {

std::mt19937_64 generator(1);

[[maybe_unused]] double normal() { return std::normal_distribution<double>()(generator); }

}  // namespace
