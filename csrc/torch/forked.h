// What threads of the process share under a mutex, and a child of fork() goes on with.
#pragma once

#include <pthread.h>

namespace memkit {

// The one T there is. A fork() waits for its mutex: a child must not inherit it locked by a thread that it does not have.
// Leaked on purpose: threads may look after static objects have died. T::mutex is locked last, with no other inside it.
template <class T>
T& shared_by_threads() {
  static T& instance = *new T;
  static const int registered =
      pthread_atfork([] { instance.mutex.lock(); }, [] { instance.mutex.unlock(); }, [] { instance.mutex.unlock(); });
  (void)registered;
  return instance;
}

}  // namespace memkit
