#include "bench/interrupt.h"

#include <signal.h>

#include <chrono>
#include <csignal>

namespace tensorferry::bench {

namespace {

volatile std::sig_atomic_t noticed = 0;

void notice(int) { noticed = 1; }

}  // namespace

void catch_interrupts() {
  struct sigaction action{};
  action.sa_handler = notice;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
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
