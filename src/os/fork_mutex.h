// Mutexes of the whole process across fork().
#pragma once

#include <pthread.h>

#include <mutex>

namespace tensorferry::os {

// Holds a mutex during every fork from now on: a child must not inherit it locked by another
// thread, nor what it guards half changed. `Mutex` is a function that returns the mutex. Call it
// once for each mutex, when the library is loaded.
template <std::mutex& (*Mutex)()>
int hold_during_forks() noexcept {
  return pthread_atfork([] { Mutex().lock(); }, [] { Mutex().unlock(); }, [] { Mutex().unlock(); });
}

}  // namespace tensorferry::os
