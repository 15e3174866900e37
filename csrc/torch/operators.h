// Calls of registered operators through the dispatcher, so that modes, compilers and autograd see them.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <utility>

namespace memkit {

// Calls an operator that has no derivative of its own; past autograd where that does not record. There its fallback would box
// the arguments, which takes 1 us and more for lists.
template <class Handle>
class PastAutograd {
 public:
  explicit PastAutograd(const Handle& handle) : handle_(handle) {}

  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    std::optional<at::AutoDispatchBelowAutograd> below;
    if (!at::GradMode::is_enabled()) below.emplace();
    return handle_.call(std::forward<Args>(args)...);
  }

 private:
  const Handle& handle_;
};

// In a function: MEMKIT_CALL("memkit::_rms_norm", at::Tensor(const at::Tensor&, double))(x, eps). Looked up once.
#define MEMKIT_HANDLE(NAME, ...)                                                                              \
  []() -> const auto& {                                                                                       \
    static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(NAME, "").typed<__VA_ARGS__>(); \
    return handle;                                                                                            \
  }()
#define MEMKIT_CALL(NAME, ...) (MEMKIT_HANDLE(NAME, __VA_ARGS__).call)
#define MEMKIT_CALL_PAST_AUTOGRAD(NAME, ...) ::memkit::PastAutograd(MEMKIT_HANDLE(NAME, __VA_ARGS__))

}  // namespace memkit
