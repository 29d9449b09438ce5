// Mutexes of the whole process across fork().
#pragma once

#include <pthread.h>

#include <mutex>

namespace tensorferry::os {

// Holds a mutex during every fork from now on: a child must not inherit it locked by another
// thread, nor what it guards half changed. `mutex` is a function that returns the mutex. Call it
// once for each mutex, when the library is loaded.
template <std::mutex& (*mutex)()>
int hold_during_forks() noexcept {
  return pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { mutex().unlock(); });
}

}  // namespace tensorferry::os
