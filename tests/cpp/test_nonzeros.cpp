// Nonzero elements found, gathered and spread again, by every instruction set this machine has.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/nonzeros.h"
#include "random.h"

using namespace memkit::cpu;

namespace {

template <class E>
void there_and_back(int64_t numel, double density, bool negative_zero) {
  const E sign = E(1) << (8 * sizeof(E) - 1);
  std::vector<E> x(size_t(numel), 0), expected;
  for (E& each : x)
    if (std::uniform_real_distribution<double>()(generator) < density) do
        each = E(generator());
      while (each == 0 || each == sign);
  if (negative_zero) x[x.size() / 2] = sign;
  for (E each : x)
    if (each) expected.push_back(each);

  const int64_t units = nonzeros_units(numel);
  std::vector<uint64_t> bits(size_t(nonzeros_words(numel)), ~uint64_t(0));
  std::vector<int64_t> starts(static_cast<size_t>(units) + 1, 0);
  NonzerosArgs args{numel, sizeof(E), x.data(), nullptr, bits.data(), starts.data()};
  bool found = false;
  for (int64_t u = 0; u < units; ++u) found |= find_nonzeros(args, u, u + 1);
  const char* isa = name(memkit::cpu::isa());
  const auto describe = [&] { return std::to_string(numel) + " of " + std::to_string(sizeof(E)) + " bytes, " + isa; };
  CHECK(found == negative_zero, "%s", describe().c_str());
  for (int64_t i = 0; i < 64 * nonzeros_words(numel); ++i)
    CHECK((bits[size_t(i / 64)] >> (i % 64) & 1) == (i < numel && x[size_t(i)] != 0), "%s, %ld", describe().c_str(),
          long(i));
  int64_t before = 0;
  for (int64_t& start : starts) before += std::exchange(start, before);
  CHECK(before == int64_t(expected.size()), "%s", describe().c_str());

  // Exactly as large as they have to be: the sanitizers see what goes beyond. The last units first, then the others.
  std::vector<E> nonzeros(expected.size()), again(size_t(numel), E(0x5a5a));
  args.nonzeros = nonzeros.data();
  const int64_t half = units / 2;
  gather_nonzeros(args, half, units);
  if (half) gather_nonzeros(args, 0, half);
  CHECK(nonzeros == expected, "%s", describe().c_str());
  args.elements = again.data();
  spread_nonzeros(args, half, units);
  if (half) spread_nonzeros(args, 0, half);
  CHECK(again == x, "%s", describe().c_str());
}

int all() {
  for (double density : {0.0, 0.05, 0.5, 1.0})
    for (bool negative_zero : {false, true})
      for (int64_t numel : {1L, 7L, 15L, 16L, 17L, 63L, 64L, 65L, 130L, 4095L, 4096L, 4097L, 3 * 4096L + 77}) {
        there_and_back<uint16_t>(numel, density, negative_zero);
        there_and_back<uint32_t>(numel, density, negative_zero);
        there_and_back<uint64_t>(numel, density, negative_zero);
      }
  return finish("nonzeros");
}

}  // namespace

int main() {
  int failed = 0;
  for (const char* isa : {"base", "v3", "v4"}) {  // which is asked once a process
    setenv("MEMKIT_CPU_ISA", isa, 1);
    const pid_t child = fork();
    if (child == 0) return all();
    int status = 1;
    waitpid(child, &status, 0);
    failed |= status;
  }
  return failed != 0;
}
