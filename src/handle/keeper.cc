#include "handle/keeper.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "handle/crew.h"
#include "os/system.h"
#include "os/thread.h"

namespace tensorferry::handle {

namespace {

constexpr std::chrono::milliseconds round_pause{1};

// After so many rounds with empty lanes the keeper sleeps until it is roused.
constexpr unsigned idle_rounds_max = 64;

}  // namespace

Keeper::~Keeper() {
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

Status Keeper::start() {
  const auto refused = [](const char* operation, int code, const char* hint) {
    return Error({.operation = operation, .code = code, .hint = hint});
  };
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return refused("eventfd", errno, "out of file descriptors; raise ulimit -n");
  // The last owner of the crew destroys it, and the keeper with it.
  auto thread = os::start_thread("ferry-keeper", [this] {
    run();
    const auto last = crew_.leave();
  });
  if (!thread) {
    return refused("start keeper thread", EAGAIN,
                   "the system allows no more threads; raise ulimit -u");
  }
  thread_ = std::move(*thread);
  id_ = thread_.get_id();
  return Nothing{};
}

void Keeper::join() {
  if (is_this_thread()) detach();
  if (thread_.joinable()) thread_.join();
}

void Keeper::detach() {
  if (thread_.joinable()) thread_.detach();
}

void Keeper::wake() const noexcept { ::eventfd_write(wake_fd_, 1); }

bool Keeper::call_later(std::vector<std::function<void()>>& listeners) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return false;
    for (auto& then : listeners) listeners_.push_back(std::move(then));
  }
  if (!is_this_thread()) wake();  // the keeper calls them before it sleeps
  return true;
}

bool Keeper::end() {
  const std::lock_guard lock(mutex_);
  ended_ = listeners_.empty();
  return ended_;
}

void Keeper::call_listeners() {
  std::vector<std::function<void()>> listeners;
  {
    const std::lock_guard lock(mutex_);
    listeners.swap(listeners_);
  }
  const std::uint64_t generation = os::fork_generation();
  for (const auto& then : listeners) {
    then();
    os::end_forked_thread(generation);
  }
}

void Keeper::run() {
  for (;;) {
    const bool closing = crew_.closing();  // before the last look: then nothing comes any more
    crew_.look_after_end();
    crew_.look_at_lanes();
    call_listeners();
    if (!closing) {
      sleep();
    } else if (end()) {
      return;
    }
  }
}

void Keeper::sleep() {
  idle_rounds_ = crew_.lanes_in_use() ? 0 : idle_rounds_ + 1;
  int pause = static_cast<int>(round_pause.count());
  if (idle_rounds_ > idle_rounds_max && !crew_.finishing()) {
    dormant_ = true;
    // A lane that was taken into use before it could see that: one more round.
    if (!crew_.lanes_in_use() && !crew_.finishing()) pause = -1;
  }
  std::vector<pollfd> fds{{.fd = wake_fd_, .events = POLLIN, .revents = 0}};
  crew_.add_watched(fds);
  ::poll(fds.data(), fds.size(), pause);
  dormant_ = false;
  for (const pollfd& one : fds) {
    eventfd_t count = 0;
    if ((one.revents & POLLIN) != 0) ::eventfd_read(one.fd, &count);
  }
}

}  // namespace tensorferry::handle
