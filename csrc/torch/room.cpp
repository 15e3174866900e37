#include "room.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/impl/alloc_cpu.h>

#include <memory>

#include "fresh.h"

namespace memkit {
namespace {

constexpr int64_t kOwn = 256 << 10, kLine = 64;

struct Own {
  std::unique_ptr<void, void (*)(void*)> block{c10::alloc_cpu(kOwn), c10::free_cpu};
  int64_t used = 0;
};
thread_local Own own;

}  // namespace

Room::Room(c10::Device device, int64_t bytes) {
  const int64_t whole = (bytes + kLine - 1) / kLine * kLine;
  if (device.is_cpu() && own.used + whole <= kOwn) {
    data_ = static_cast<char*>(own.block.get()) + own.used;
    own.used += own_ = whole;
    return;
  }
  tensor_ = device.is_cpu() ? at::Tensor(at::detail::empty_cpu({bytes}, at::kByte)) : fresh({bytes}, at::kByte, device);
  data_ = tensor_.mutable_data_ptr();
}

Room::~Room() { own.used -= own_; }

}  // namespace memkit
