#include "os/thread.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "os/system.h"

namespace tensorferry::os {

namespace {

constinit thread_local bool is_ours = false;

}  // namespace

std::optional<std::thread> start_thread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::optional<std::thread> thread;
  try {
    thread.emplace([name, body = std::move(body)] {
      is_ours = true;
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error&) {
    thread.reset();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

// Does not unwind: objects on the stack may hold locks of threads that the child does not have.
void end_forked_thread(std::uint64_t generation) noexcept {
  if (is_ours && generation != fork_generation()) ::syscall(SYS_exit, 0);
}

namespace {

double seconds_of(clockid_t clock) noexcept {
  timespec used{};
  if (clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

double cpu_seconds(std::thread& thread) noexcept {
  clockid_t clock{};
  return pthread_getcpuclockid(thread.native_handle(), &clock) == 0 ? seconds_of(clock) : 0;
}

double cpu_seconds_of_this_thread() noexcept { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace tensorferry::os
