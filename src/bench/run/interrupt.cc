#include "bench/run/interrupt.h"

#include <signal.h>

#include <chrono>
#include <csignal>
#include <ctime>

namespace tensorferry::bench {

namespace {

volatile std::sig_atomic_t noticed = 0;
volatile std::time_t noticed_at = 0;

std::time_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec;
}

// Some programs signal both the process and its group: only a later signal means impatience.
void notice(int signal) {
  constexpr std::time_t patience_seconds = 2;
  if (noticed == 0) {
    noticed = 1;
    noticed_at = now();
  } else if (now() - noticed_at >= patience_seconds) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

void catch_interrupts() {
  struct sigaction action{};
  action.sa_handler = notice;
  for (const int one : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    struct sigaction before{};
    sigaction(one, nullptr, &before);
    // A signal that was ignored before (by nohup, say) stays ignored.
    if (before.sa_handler != SIG_IGN) sigaction(one, &action, nullptr);
  }
  // A write beyond the limit of file sizes then fails with an error.
  std::signal(SIGXFSZ, SIG_IGN);
}

bool interrupted() noexcept { return noticed != 0; }

void check_interrupt() {
  if (interrupted()) throw Interrupted();
}

void finish(const Operation& operation) {
  using std::chrono::milliseconds;
  while (!operation.wait_for(milliseconds(100))) {
    if (!interrupted()) continue;
    operation.cancel();
    try {
      operation.wait();
    } catch (const Error&) {
      throw Interrupted();  // cancelled, as asked
    }
  }
  check_interrupt();
}

}  // namespace tensorferry::bench
