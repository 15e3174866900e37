// What simt/runtime.cpp has beside CUDA's own functions: work of the CPU's, in a stream.
#pragma once

#include <functional>

namespace simt {

using Work = std::function<void()>;

// At the end of the stream, or of the graph that it records.
__attribute__((weak, visibility("default"))) void enqueue(void* stream, Work work);
// All that the stream has, then this.
__attribute__((weak, visibility("default"))) void run_now(void* stream, const Work& work);
__attribute__((weak, visibility("default"))) bool captures(void* stream);

}  // namespace simt
