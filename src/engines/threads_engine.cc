// The threads engine: a few threads call pread and pwrite. It is the reference for the others, the
// fallback that works everywhere, and the right choice for files without O_DIRECT. The engine `gds`
// is the same with cuFile for memory of a GPU.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "engines/cufile.h"
#include "engines/engine.h"
#include "os/system.h"
#include "os/thread.h"
#include "tensorferry/gds.h"

namespace tensorferry::engines {

namespace {

// More threads would only compete for the processor; further requests wait in the queue.
constexpr unsigned threads_max = 16;

// The threads of all engines of the process. Each engine may have one; more only within the limit.
std::atomic<unsigned> all_threads{0};

// A child has none of them, and destroys no engine of its parent.
[[maybe_unused]] const int thread_fork_watch =
    pthread_atfork(nullptr, nullptr, [] { all_threads = 0; });

unsigned all_threads_max() noexcept {
  static const unsigned max = std::max(4 * std::thread::hardware_concurrency(), 64U);
  return max;
}

class ThreadsEngine final : public Engine {
 public:
  ThreadsEngine(EngineKind kind, unsigned depth, os::System& system)
      : kind_(kind), depth_(depth), system_(system) {
    finished_.reserve(depth);
    threads_.reserve(std::min(depth, threads_max));
  }

  ~ThreadsEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    all_threads -= static_cast<unsigned>(threads_.size());
  }

  [[nodiscard]] EngineKind kind() const noexcept override { return kind_; }
  [[nodiscard]] Capabilities capabilities() const noexcept override {
    return {.buffers_max = 0, .files_max = 0};
  }
  int attach() override { return 0; }

  Submitted submit(std::span<const Request> requests) override {
    if (requests.empty()) return {};
    const std::lock_guard lock(mutex_);
    const std::size_t count = std::min<std::size_t>(requests.size(), depth_ - in_flight_);
    start_threads(queue_.size() + count);
    if (threads_.empty()) return {0, EAGAIN};
    queue_.insert(queue_.end(), requests.begin(),
                  requests.begin() + static_cast<std::ptrdiff_t>(count));
    in_flight_ += count;
    for (std::size_t i = 0; i < std::min(count, idle_); ++i) work_.notify_one();
    return {count, count < requests.size() ? EAGAIN : 0};
  }

  int reap(std::span<Completion> out, Nanoseconds limit) override {
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return !finished_.empty() || woken_; };
    if (limit == forever) {
      done_.wait(lock, ready);
    } else if (limit > Nanoseconds::zero()) {
      done_.wait_for(lock, limit, ready);
    }
    woken_ = false;
    const std::size_t count = std::min(out.size(), finished_.size());
    const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(finished_.begin(), end, out.begin());
    finished_.erase(finished_.begin(), end);
    in_flight_ -= count;
    return static_cast<int>(count);
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    done_.notify_one();
  }

  void cancel(std::uint64_t tag) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [tag](const Request& request) { return request.tag == tag; });
    if (found == queue_.end()) return;
    queue_.erase(found);
    finished_.push_back({tag, -ECANCELED});
    done_.notify_one();
  }

  [[nodiscard]] double cpu_seconds() const noexcept override {
    const std::lock_guard lock(mutex_);
    double sum = 0;
    for (std::thread& thread : threads_) sum += os::cpu_seconds(thread);
    return sum;
  }

 private:
  // Called with the lock held.
  void start_threads(std::size_t waiting) {
    while (idle_ + starting_ < waiting && threads_.size() < std::min(depth_, threads_max)) {
      if (all_threads.fetch_add(1) >= all_threads_max() && !threads_.empty()) {
        --all_threads;
        return;
      }
      auto thread = os::start_thread("ferry-pread", [this] { run(); });
      if (!thread) {
        --all_threads;
        return;
      }
      threads_.push_back(std::move(*thread));
      ++starting_;
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    --starting_;
    for (;;) {
      ++idle_;
      work_.wait(lock, [this] { return !queue_.empty() || stopping_; });
      --idle_;
      if (queue_.empty()) return;
      const Request request = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const std::int32_t result = move_bytes(request);
      lock.lock();
      finished_.push_back({request.tag, result});
      done_.notify_one();
    }
  }

  std::int32_t move_bytes(const Request& request) {
    if (const GpuFile* file = request.gpu_file) {
      return static_cast<std::int32_t>(
          request.kind == RequestKind::read
              ? file->read(request.gpu, request.memory, request.bytes, request.offset)
              : file->write(request.gpu, request.memory, request.bytes, request.offset));
    }
    switch (request.kind) {
      case RequestKind::read:
        return static_cast<std::int32_t>(
            system_.pread(request.fd, request.memory, request.bytes, request.offset));
      case RequestKind::write:
        return static_cast<std::int32_t>(
            system_.pwrite(request.fd, request.memory, request.bytes, request.offset));
      case RequestKind::sync_data:
        return system_.fdatasync(request.fd);
      case RequestKind::sync_full:
        return system_.fsync(request.fd);
    }
    return -EINVAL;
  }

  const EngineKind kind_;
  const unsigned depth_;
  os::System& system_;
  mutable std::mutex mutex_;
  std::condition_variable work_;  // for the threads
  std::condition_variable done_;  // for the owner
  std::deque<Request> queue_;
  std::vector<Completion> finished_;
  std::size_t in_flight_ = 0;  // queued, moving or finished, but not reaped
  std::size_t idle_ = 0;
  std::size_t starting_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
  mutable std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<Engine>> open_threads_engine(unsigned depth, os::System& system) {
  return std::unique_ptr<Engine>(
      std::make_unique<ThreadsEngine>(EngineKind::threads, depth, system));
}

Result<std::unique_ptr<Engine>> open_gds_engine(unsigned depth, os::System& system) {
  if (const GdsSupport support = gds_support(); support.mode == GdsMode::none) {
    return Error({.operation = use_gds, .code = EOPNOTSUPP, .hint = support.reason});
  }
  return std::unique_ptr<Engine>(std::make_unique<ThreadsEngine>(EngineKind::gds, depth, system));
}

}  // namespace tensorferry::engines
