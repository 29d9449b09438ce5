// The libaio engine: Linux's older asynchronous I/O, nearly as fast on direct descriptors and
// allowed in most containers. On buffered descriptors io_submit blocks until the bytes are moved.
// The only file that knows libaio.
#include <libaio.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <string>
#include <vector>

#include "engines/engine.h"
#include "os/fork_mutex.h"
#include "os/system.h"

namespace tensorferry::engines {

namespace {

std::string why_refused(int code) {
  switch (code) {
    case EAGAIN: {
      std::string limit = os::read_text("/proc/sys/fs/aio-max-nr");
      std::string used = os::read_text("/proc/sys/fs/aio-nr");
      std::erase(limit, '\n');
      std::erase(used, '\n');
      return "the system-wide limit fs.aio-max-nr (" + limit + ", in use: " + used +
             ") is reached; raise it with sysctl -w fs.aio-max-nr=1048576, or use fewer workers "
             "or a lower queue depth";
    }
    case EPERM:
    case ENOSYS:
      return "this kernel has no asynchronous I/O or a filter hides it; use another engine";
    case EINVAL:
      return "the kernel takes no poll requests (Linux 4.18 or later does); use another engine";
    default:
      return "asynchronous I/O could not be set up; use another engine";
  }
}

// Contexts that no engine uses. io_destroy waits until every processor has passed through the
// kernel's scheduler, some 40 ms: an engine that ends leaves its context to the next one of its
// depth. They hold no descriptor, and few of the requests that the whole machine may have.
class IdleContexts {
 public:
  static IdleContexts& of_process() {
    static auto* const contexts = new IdleContexts;
    return *contexts;
  }
  static std::mutex& mutex() { return of_process().mutex_; }

  // One for `depth` requests, or null.
  io_context_t take(unsigned depth) {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(idle_, depth, &Idle::depth);
    if (found == idle_.end()) return nullptr;
    io_context_t context = found->context;
    idle_.erase(found);
    return context;
  }

  // Takes over a context with nothing in flight; false if it has enough.
  bool keep(io_context_t context, unsigned depth) {
    const std::lock_guard lock(mutex_);
    std::size_t requests = depth;
    for (const Idle& idle : idle_) requests += idle.depth;
    if (requests > max_requests) return false;
    idle_.push_back({context, depth});
    return true;
  }

  // Gives all back to the machine; false if there was none.
  bool clear() {
    std::vector<Idle> idle;
    {
      const std::lock_guard lock(mutex_);
      idle.swap(idle_);
    }
    for (const Idle& one : idle) ::io_destroy(one.context);
    return !idle.empty();
  }

  // In a child of fork(): contexts stay with the parent.
  void forget() noexcept {
    const std::lock_guard lock(mutex_);
    idle_.clear();
  }

 private:
  struct Idle {
    io_context_t context;
    unsigned depth;
  };
  static constexpr std::size_t max_requests = 512;

  std::mutex mutex_;
  std::vector<Idle> idle_;
};

// Before the first engine, so that no fork finds the mutex locked.
[[maybe_unused]] const int libaio_fork_watch =
    (os::hold_during_forks<IdleContexts::mutex>(),
     pthread_atfork(nullptr, nullptr, [] { IdleContexts::of_process().forget(); }));

// submit() and reap() share only the kernel's context and the count of requests in flight: the
// kernel is done with an iocb when io_submit returns.
class LibaioEngine final : public Engine {
 public:
  LibaioEngine(io_context_t context, int wake_fd, unsigned depth)
      : context_(context), wake_fd_(wake_fd), depth_(depth), blocks_(depth), events_(depth + 1) {
    for (iocb& block : blocks_) to_submit_.push_back(&block);
  }

  ~LibaioEngine() override {
    if (!drained() || !IdleContexts::of_process().keep(context_, static_cast<unsigned>(depth_))) {
      ::io_destroy(context_);
    }
    ::close(wake_fd_);
    if (ready_fd_ >= 0) ::close(ready_fd_);
  }

  [[nodiscard]] EngineKind kind() const noexcept override { return EngineKind::libaio; }
  [[nodiscard]] Capabilities capabilities() const noexcept override {
    return {.service = Service::any_thread};
  }
  int attach() override { return 0; }

  Submitted submit(std::span<const Request> requests) override {
    const std::size_t left = depth_ - in_flight_.load(std::memory_order_acquire);
    const std::size_t count = std::min(requests.size(), left);
    for (std::size_t i = 0; i < count; ++i) prepare(blocks_[i], requests[i]);
    in_flight_.fetch_add(count, std::memory_order_relaxed);  // before a reaper can see the end
    std::size_t taken = 0;
    int error = count < requests.size() ? EAGAIN : 0;
    while (taken < count) {
      const int sent =
          ::io_submit(context_, static_cast<long>(count - taken), to_submit_.data() + taken);
      if (sent <= 0) {
        error = sent == 0 ? EAGAIN : -sent;
        break;
      }
      taken += static_cast<std::size_t>(sent);
    }
    if (taken < count) in_flight_.fetch_sub(count - taken, std::memory_order_relaxed);
    return {taken, error};
  }

  int reap(std::span<Completion> out, Nanoseconds limit) override {
    if (!wake_watched_) (void)watch_for_wake();
    if (!wake_watched_) limit = std::min(limit, unwatched_limit);
    timespec time{.tv_sec = limit.count() / 1'000'000'000,
                  .tv_nsec = limit.count() % 1'000'000'000};
    const auto room = static_cast<long>(std::min(out.size(), events_.size()));
    const int got = ::io_getevents(context_, limit > Nanoseconds::zero() ? 1 : 0, room,
                                   events_.data(), limit == forever ? nullptr : &time);
    if (got < 0) return got;
    std::size_t count = 0;
    for (int i = 0; i < got; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      if (event.obj == &wake_block_) {
        eventfd_t woken = 0;
        ::eventfd_read(wake_fd_, &woken);
        wake_watched_ = false;
        continue;
      }
      out[count++] = {reinterpret_cast<std::uint64_t>(event.data),
                      static_cast<std::int32_t>(static_cast<std::int64_t>(event.res))};
    }
    in_flight_.fetch_sub(count, std::memory_order_release);
    return static_cast<int>(count);
  }

  void wake() noexcept override { ::eventfd_write(wake_fd_, 1); }

  // Linux cannot cancel a block request that libaio has sent; it completes by itself.
  void cancel(std::uint64_t) noexcept override {}

  [[nodiscard]] int ready_fd() override {
    if (ready_fd_ < 0) ready_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return ready_fd_;
  }

  // 0 or -errno.
  int watch_for_wake() noexcept {
    ::io_prep_poll(&wake_block_, wake_fd_, POLLIN);
    iocb* block = &wake_block_;
    const int sent = ::io_submit(context_, 1, &block);
    wake_watched_ = sent == 1;
    return std::min(sent, 0);
  }

 private:
  void prepare(iocb& block, const Request& request) const {
    const auto offset = static_cast<long long>(request.offset);
    switch (request.kind) {
      case RequestKind::read:
        ::io_prep_pread(&block, request.fd, request.memory, request.bytes, offset);
        break;
      case RequestKind::write:
        ::io_prep_pwrite(&block, request.fd, request.memory, request.bytes, offset);
        break;
      case RequestKind::sync_data:
        ::io_prep_fdsync(&block, request.fd);
        break;
      case RequestKind::sync_full:
        ::io_prep_fsync(&block, request.fd);
        break;
    }
    block.data = reinterpret_cast<void*>(request.tag);
    if (ready_fd_ >= 0) ::io_set_eventfd(&block, ready_fd_);
  }

  // Ends the watch for wake(). Whether the context is as new then.
  bool drained() noexcept {
    if (in_flight_.load(std::memory_order_acquire) > 0) return false;
    if (!wake_watched_) return true;
    wake();
    timespec limit{.tv_sec = 1, .tv_nsec = 0};
    return ::io_getevents(context_, 1, 1, events_.data(), &limit) == 1 &&
           events_[0].obj == &wake_block_;
  }

  io_context_t context_;
  int wake_fd_;
  int ready_fd_ = -1;
  const std::size_t depth_;
  std::atomic<std::size_t> in_flight_{0};
  std::vector<iocb> blocks_;  // of the call of submit() under way
  std::vector<iocb*> to_submit_;
  iocb wake_block_{};  // this and what follows is the reaper's
  bool wake_watched_ = false;
  std::vector<io_event> events_;
};

Error libaio_refused(const char* operation, int code) {
  return Error({.operation = operation, .code = code, .hint = why_refused(code)});
}

}  // namespace

Result<std::unique_ptr<Engine>> open_libaio_engine(unsigned depth) {
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) return libaio_refused("eventfd", errno);
  io_context_t context = IdleContexts::of_process().take(depth);
  if (context == nullptr) {
    int opened = ::io_setup(static_cast<int>(depth + 1), &context);
    if (opened == -EAGAIN && IdleContexts::of_process().clear()) {
      opened = ::io_setup(static_cast<int>(depth + 1), &context);
    }
    if (opened < 0) {
      ::close(wake_fd);
      return libaio_refused("io_setup", -opened);
    }
  }
  auto engine = std::make_unique<LibaioEngine>(context, wake_fd, depth);
  // Tries each call once: filters refuse system calls one by one. A signal refuses nothing.
  if (const int watched = engine->watch_for_wake(); watched < 0) {
    return libaio_refused("io_submit", -watched);
  }
  io_event none{};
  if (const int got = ::io_getevents(context, 0, 1, &none, nullptr); got < 0 && got != -EINTR) {
    return libaio_refused("io_getevents", -got);
  }
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace tensorferry::engines
