// Memory for the time of a call.
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace memkit {

// On the CPU the thread's own, up to 256 KiB, which stays with the thread: the allocator takes as long for a few hundred
// numbers as a pass over a small tensor. Else a tensor's. Rooms of a thread end in the opposite order of their making.
class Room {
 public:
  Room(c10::Device device, int64_t bytes);
  Room(Room&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        own_(std::exchange(other.own_, 0)),
        tensor_(std::move(other.tensor_)) {}
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room();

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  int64_t own_ = 0;  // bytes of the thread's
  at::Tensor tensor_;
};

}  // namespace memkit
