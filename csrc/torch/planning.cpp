#include "planning.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../arena/solve.h"
#include "tap.h"

namespace memkit {
namespace {

using arena::Buffer;
using Row = std::tuple<std::int64_t, std::int64_t, std::int64_t>;  // size, lower, upper

// The clock counts the allocations of one thread and the releases of what they gave, wherever those happen.
class Recorder final : public CpuObserver {
 public:
  Recorder() { add_cpu_observer(this, "memkit.plan"); }
  ~Recorder() { stop(); }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void stop() {
    remove_cpu_observer(this);
    alive_.clear();  // nobody calls any more
  }

  std::vector<Row> buffers() {
    stop();
    TORCH_CHECK(!full_, "memkit.plan: expected memory to record the allocations in, got none");
    std::vector<Row> rows;
    rows.reserve(buffers_.size());
    for (const Buffer& b : buffers_) rows.emplace_back(b.size, b.lower, b.upper == kOpen ? clock_ : b.upper);
    return rows;
  }

  void allocated(void* address, std::size_t nbytes) noexcept override {
    if (full_ || std::this_thread::get_id() != thread_) return;
    try {
      alive_[address] = buffers_.size();
      buffers_.push_back({clock_++, kOpen, static_cast<std::int64_t>(nbytes)});
    } catch (...) {
      full_ = true;
    }
  }

  void released(void* address, std::size_t) noexcept override {
    const auto found = alive_.find(address);
    if (found == alive_.end()) return;  // of another thread, or older than the recording
    buffers_[found->second].upper = clock_++;
    alive_.erase(found);
  }

 private:
  static constexpr std::int64_t kOpen = -1;

  const std::thread::id thread_ = std::this_thread::get_id();
  std::vector<Buffer> buffers_;
  std::unordered_map<void*, std::size_t> alive_;
  std::int64_t clock_ = 0;
  bool full_ = false;
};

std::vector<Buffer> buffers_of(const std::vector<Row>& rows) {
  std::vector<Buffer> buffers;
  buffers.reserve(rows.size());
  for (const auto& [size, lower, upper] : rows) buffers.push_back({lower, upper, size});
  return buffers;
}

pybind11::tuple solve_plan(const std::vector<Row>& rows, std::int64_t alignment, double budget, std::uint64_t seed) {
  arena::Solution s;
  {
    pybind11::gil_scoped_release release;
    s = arena::solve(buffers_of(rows), alignment, budget, seed);
  }
  return pybind11::make_tuple(s.offsets, s.height, s.lower_bound, s.optimal, s.method, s.seconds);
}

std::optional<std::string> check_plan(const std::vector<Row>& rows, const std::vector<std::int64_t>& offsets,
                                      std::int64_t alignment) {
  pybind11::gil_scoped_release release;
  if (alignment < 1) return "the alignment is " + std::to_string(alignment);
  std::string why;
  if (arena::verify(buffers_of(rows), offsets, alignment, &why)) return std::nullopt;
  return why;
}

}  // namespace

void bind_planning(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Recorder>(module, "Recorder", "Records the CPU tensor storage that this thread allocates.")
      .def(py::init<>())
      .def("stop", &Recorder::stop)
      .def("buffers", &Recorder::buffers);
  module.def("solve_plan", &solve_plan, py::arg("buffers"), py::arg("alignment"), py::arg("budget"), py::arg("seed"));
  module.def("check_plan", &check_plan, py::arg("buffers"), py::arg("offsets"), py::arg("alignment"));
}

}  // namespace memkit
