// The pool's class in Python, its errors, and Python stacks by number.
#include "pool_python.h"

#include <torch/csrc/Exceptions.h>

#include <unordered_map>

#include "forked.h"
#include "pool_replay.h"
#include "pool_use.h"

namespace memkit {

namespace py = pybind11;
using arena::Failure;

std::string pool_failure_text(const Failure& failure) { return "Pool: " + failure.text(); }

namespace {
py::object exhausted(const Failure& failure) {
  py::list holders;
  for (const arena::Holder& holder : failure.holders)
    holders.append(py::make_tuple(holder.tag, holder.bytes, holder.blocks));
  const char* const limits[] = {"", "grow", "max", "available", "system"};  // as Refusal::Limit
  const py::object type = py::module_::import("memkit.pool").attr("PoolExhausted");
  return type(pool_failure_text(failure), failure.asked, failure.free, failure.largest_free, failure.fragmentation,
              holders, limits[failure.refusal.limit]);
}
}  // namespace

void raise_pool_failure(const Failure& failure) {
  TORCH_CHECK_VALUE(failure.reason != Failure::invalid, pool_failure_text(failure));
  TORCH_CHECK(failure.reason == Failure::exhausted, pool_failure_text(failure));
  const py::gil_scoped_acquire gil;
  try {
    const py::object error = exhausted(failure);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  } catch (py::error_already_set& other) {
    other.restore();
  }
  // May have to cross threads and code without the GIL before it meets Python again.
  python_error carried;
  carried.persist();
  throw carried;
}

namespace {

constexpr int kFrames = 32;

struct Stacks {
  std::mutex mutex;
  std::unordered_map<std::string, arena::StackId> numbers;
  std::vector<const std::string*> texts{nullptr};
};
Stacks& stacks() { return shared_by_threads<Stacks>(); }

}  // namespace

arena::StackId capture_python_stack() {
  if (!Py_IsInitialized()) return 0;
  std::string text;
  {
    const py::gil_scoped_acquire gil;
    auto* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
    Py_XINCREF(frame);
    for (int i = 0; frame && i < kFrames; ++i) {
      const py::object current = py::reinterpret_steal<py::object>(frame);
      auto* raw = reinterpret_cast<PyFrameObject*>(frame);
      const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
      text += std::string(py::str(code.attr("co_filename"))) + "\t" + std::to_string(PyFrame_GetLineNumber(raw)) +
              "\t" + std::string(py::str(code.attr("co_name"))) + "\n";
      frame = reinterpret_cast<PyObject*>(PyFrame_GetBack(raw));
    }
    Py_XDECREF(frame);
  }
  const std::lock_guard<std::mutex> guard(stacks().mutex);
  const auto [at, fresh] = stacks().numbers.emplace(std::move(text), stacks().texts.size());
  if (fresh) stacks().texts.push_back(&at->first);
  return at->second;
}

std::string python_stack(arena::StackId id) {
  const std::lock_guard<std::mutex> guard(stacks().mutex);
  return id && id < stacks().texts.size() ? *stacks().texts[id] : "";
}

namespace {

std::shared_ptr<Pool> make_pool(const std::string& device, bool pinned, std::size_t size, std::size_t max, bool grow,
                                std::size_t growth, bool debug) {
  const c10::Device target(device);
  arena::Options options;
  options.capacity = size;
  options.max = max ? max : SIZE_MAX;
  options.grow = grow;
  options.growth = growth;
  options.debug = debug;
  const py::gil_scoped_release no_gil;  // pages are touched
  auto backend = target.is_cuda() ? make_cuda_device(target.index())
                 : pinned         ? make_pinned_device()
                                  : make_cpu_device();
  try {
    return Pool::create(std::move(backend), std::move(options));
  } catch (const arena::NoCapacity& error) {
    raise_pool_failure(error.failure);
  }
}

py::dict stats(Pool& pool) {
  const arena::Stats s = pool.arena().stats();
  py::dict d;
#define MEMKIT_STAT(NAME) d[#NAME] = s.NAME;
  MEMKIT_STAT(allocated)
  MEMKIT_STAT(allocated_peak)
  MEMKIT_STAT(active)
  MEMKIT_STAT(active_peak)
  MEMKIT_STAT(reserved)
  MEMKIT_STAT(reserved_peak)
  MEMKIT_STAT(allocations)
  MEMKIT_STAT(frees)
  MEMKIT_STAT(failures)
  MEMKIT_STAT(hits)
  MEMKIT_STAT(growths)
  MEMKIT_STAT(live_blocks)
  MEMKIT_STAT(free_blocks)
  MEMKIT_STAT(chunks)
  MEMKIT_STAT(free)
  MEMKIT_STAT(largest_free)
  MEMKIT_STAT(fragmentation)
#undef MEMKIT_STAT
  return d;
}

py::list holders(Pool& pool) {
  py::list list;
  for (const arena::Holder& holder : pool.arena().holders())
    list.append(py::make_tuple(holder.tag, holder.bytes, holder.blocks));
  return list;
}

// [(address, size, [(address, size, requested, state, lane, tag, stack), ...]), ...]
py::list chunks(Pool& pool) {
  std::vector<std::pair<arena::ChunkView, std::vector<arena::BlockView>>> seen;
  pool.arena().visit([&](const arena::ChunkView& chunk) { seen.push_back({chunk, {}}); },
                     [&](const arena::BlockView& block) { seen.back().second.push_back(block); });
  const char* const states[] = {"dead", "free", "live", "parked"};
  const auto number = [](const void* address) { return reinterpret_cast<std::uintptr_t>(address); };
  py::list list;
  for (const auto& [chunk, blocks] : seen) {
    py::list inner;
    for (const arena::BlockView& block : blocks)
      inner.append(py::make_tuple(number(block.address), block.size, block.requested, states[int(block.state)],
                                  block.lane, pool.arena().tag_name(block.tag), python_stack(block.stack)));
    list.append(py::make_tuple(number(chunk.address), chunk.size, inner));
  }
  return list;
}

py::tuple leave_scope(Pool& pool, std::size_t number) {
  const Pool::Left left = pool.leave_scope(number);
  py::list held;
  for (const arena::Scope::Held& one : left.held)
    held.append(py::make_tuple(pool.arena().tag_name(one.tag), one.bytes, python_stack(one.stack),
                               reinterpret_cast<std::uintptr_t>(one.data)));
  return py::make_tuple(left.scopes, held);
}

// On the CPU: the tap asks the pool.
class CpuUse final : public PoolUse {
 public:
  explicit CpuUse(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  void enter() override {
    pool_->check_open("Pool.use");
    enter_cpu_source(pool_);
  }
  std::optional<bool> leave() override { return leave_cpu_source(pool_.get()); }

 private:
  const std::shared_ptr<Pool> pool_;
};

std::shared_ptr<PoolUse> make_use(std::shared_ptr<Pool> pool) {
  if (pool->device().device().is_cuda()) return make_cuda_use(std::move(pool));
  return std::make_shared<CpuUse>(std::move(pool));
}

}  // namespace

void bind_pool(py::module_& m) {
  py::class_<Pool, std::shared_ptr<Pool>>(m, "Pool", "The compiled half of memkit.Pool.")
      .def(py::init(&make_pool), py::arg("device"), py::arg("pinned"), py::arg("size"), py::arg("max"), py::arg("grow"),
           py::arg("growth"), py::arg("debug"))
      .def_property_readonly("id", &Pool::id)
      .def("functions", &pool_functions)
      .def("close", &Pool::close, py::call_guard<py::gil_scoped_release>())
      .def("closed", [](Pool& pool) { return pool.arena().closed(); })
      .def("inherited", [](Pool& pool) { return pool.arena().inherited(); })
      .def(
          "trim", [](Pool& pool) { return pool.trim(); }, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats)
      .def("reset_peaks", [](Pool& pool) { pool.arena().reset_peaks(); })
      .def("holders", &holders)
      .def("chunks", &chunks)
      .def(
          "check",
          [](Pool& pool) {
            std::string wrong = pool.arena().check();
            return wrong.empty() && !pool.asleep() ? pool.arena().check_guards() : wrong;
          },
          py::call_guard<py::gil_scoped_release>())
      .def("violations",
           [](Pool& pool) {
             py::list list;
             for (const std::string& text : pool.violations()) list.append(text);
             return list;
           })
      .def("enter_scope", &Pool::enter_scope)
      .def("leave_scope", &leave_scope)
      .def("push_tag", [](Pool& pool, const std::string& name) { return pool.push_tag(name); })
      .def("pop_tag", &Pool::pop_tag)
      .def("sleep", &Pool::sleep, py::call_guard<py::gil_scoped_release>())
      .def("wake", &Pool::wake, py::call_guard<py::gil_scoped_release>())
      .def("asleep", &Pool::asleep)
      .def("refusal", [](Pool& pool, const std::string& text) {
        const std::unique_ptr<Failure> failure = pool.refusal(text);
        return failure ? exhausted(*failure) : py::none();
      });
  py::class_<PoolUse, std::shared_ptr<PoolUse>>(m, "PoolUse")
      .def(py::init(&make_use))
      .def("enter", &PoolUse::enter)
      .def("leave", &PoolUse::leave);
  py::class_<PoolReplay>(m, "PoolReplay")
      .def(py::init([](std::shared_ptr<Pool> pool, const std::vector<std::pair<std::size_t, std::size_t>>& slots,
                       std::size_t total, std::size_t alignment) {
        std::vector<arena::Plan::Slot> all;
        all.reserve(slots.size());
        for (const auto& [size, offset] : slots) all.push_back({size, offset});
        return std::make_unique<PoolReplay>(std::move(pool), std::move(all), total, alignment);
      }))
      .def("enter", &PoolReplay::enter)
      .def("leave", &PoolReplay::leave)
      .def("step", [](const PoolReplay& replay) {
        const PoolReplay::Step& step = replay.step();
        return py::make_tuple(step.planned, step.served, step.fell_back, step.mismatch);
      });
  m.add_object("PoolBase", make_pool_base());
}

}  // namespace memkit
