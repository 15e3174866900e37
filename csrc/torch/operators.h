// Calls of registered operators through the dispatcher, so that modes, compilers and autograd see them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace memkit {

// In a function: MEMKIT_CALL("memkit::_rms_norm", at::Tensor(const at::Tensor&, double))(x, eps). Looked up once.
#define MEMKIT_CALL(NAME, ...)                                                                                \
  ([]() -> const auto& {                                                                                      \
    static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(NAME, "").typed<__VA_ARGS__>(); \
    return handle;                                                                                            \
  }()                                                                                                         \
               .call)

}  // namespace memkit
