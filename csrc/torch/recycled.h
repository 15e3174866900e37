// Memory of small objects that come and go all the time: a thread keeps what it frees for the next one it makes.
// A tensor of a pool is a TensorImpl and a StorageImpl; their malloc and free were 30 of the 280 ns it took.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>

namespace memkit {

// For Self, a final class that derives from this.
template <class Self>
class Recycled {
 public:
  static void* operator new(std::size_t bytes) {
    static_assert(std::is_final_v<Self> && sizeof(Self) >= sizeof(Free) &&
                  alignof(Self) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    Free* found = kept_.first;
    if (!found) {
      if (!kept_.begun) begin();
      return ::operator new(bytes);
    }
    kept_.first = found->next;
    ++kept_.room;
    return found;
  }

  static void operator delete(void* memory) noexcept {
    if (!kept_.room) return ::operator delete(memory);
    --kept_.room;
    kept_.first = new (memory) Free{kept_.first};
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr int kMost = 0;  // it has to see what is freed
#else
  static constexpr int kMost = 64;
#endif

  struct Free {
    Free* next;
  };
  struct List {
    Free* first;
    int room;  // 0 before the thread's first, and from its end on
    bool begun;
  };

  // What a thread keeps goes when it ends.
  static void begin() {
    struct End {
      ~End() {
        for (kept_.room = 0; Free* found = kept_.first; ::operator delete(found)) kept_.first = found->next;
      }
    };
    static thread_local End end;
    kept_.room = kMost;
    kept_.begun = true;
  }

  // initial-exec: read without a call, from a library that is loaded late; it is two words.
  static inline thread_local List kept_ __attribute__((tls_model("initial-exec"))) = {};
};

}  // namespace memkit
