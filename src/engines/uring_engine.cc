// The io_uring engine: one ring, owned by one thread, with registered buffers and files if the
// kernel has them. The only file that knows liburing.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "engines/engine.h"
#include "os/fork_mutex.h"
#include "os/system.h"

namespace tensorferry::engines {

namespace {

constexpr std::uint64_t wake_tag = ~std::uint64_t{0};
constexpr std::uint64_t cancel_tag = wake_tag - 1;
constexpr unsigned buffers_max_wanted = 4096;
constexpr unsigned files_max_wanted = 64;
constexpr unsigned shared_buffers_max = 16384;  // the most that the kernel allows

// The ring features worth having, best first; each line drops one that older kernels lack. A ring
// with a single issuer starts disabled, so that attach() can choose the thread.
constexpr unsigned single_issuer = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_R_DISABLED;
constexpr std::array<unsigned, 3> setup_flags{single_issuer | IORING_SETUP_DEFER_TASKRUN,
                                              single_issuer, 0};
constexpr std::array<unsigned, 2> polled_setup_flags{single_issuer | IORING_SETUP_SQPOLL,
                                                     IORING_SETUP_SQPOLL};

// The kernel's thread sleeps when nothing has come for so long.
constexpr unsigned poll_idle_milliseconds = 10;

// The kernel ends one ring before another gets its addresses. ThreadSanitizer cannot see that; this
// tells it.
std::atomic<unsigned> rings_closed{0};

std::string why_refused(std::string_view operation, int code) {
  switch (code) {
    case EPERM:
      if (operation != "io_uring_setup") {
        return "blocked, most likely by the container's seccomp filter; allow io_uring_setup, "
               "io_uring_enter and io_uring_register, or use another engine";
      }
      if (os::read_text("/proc/sys/kernel/io_uring_disabled").starts_with("2")) {
        return "the sysctl kernel.io_uring_disabled is 2; set it to 0";
      }
      return "blocked, most likely by the container's seccomp filter or by the sysctl "
             "kernel.io_uring_disabled; allow io_uring_setup, io_uring_enter and "
             "io_uring_register, or use another engine";
    case ENOSYS:
      return "the kernel is older than Linux 5.11, or a filter hides io_uring; use another engine";
    case ENOMEM:
      return "not enough memory, or over the memlock limit (ulimit -l); lower the queue depth";
    case EMFILE:
    case ENFILE:
      return "out of file descriptors; raise ulimit -n";
    case ETIME:
      return "the ring took a request and did not answer; use another engine";
    default:
      return "the ring could not be set up; use another engine";
  }
}

void close_ring(io_uring& ring) noexcept {
  rings_closed.fetch_add(1, std::memory_order_release);
  io_uring_queue_exit(&ring);
}

int update_buffer(io_uring& ring, unsigned index, std::span<std::byte> memory) noexcept {
  const iovec range{memory.data(), memory.size()};
  const __u64 no_tag = 0;
  const int updated = io_uring_register_buffers_update_tag(&ring, index, &range, &no_tag, 1);
  return updated < 0 ? updated : 0;
}

// Gives a ring a buffer of another one: IORING_REGISTER_CLONE_BUFFERS with offsets, from Linux 6.13
// on. Older kernels answer EINVAL. liburing 2.3 does not have the call.
int clone_buffer(const io_uring& from, unsigned from_index, const io_uring& to, unsigned to_index) {
  constexpr unsigned clone_buffers = 30;
  constexpr __u32 replace_in_table = 2;
  struct {
    __u32 source_fd, flags, source_offset, offset, count;
    std::array<__u32, 3> padding;
  } argument{static_cast<__u32>(from.ring_fd), replace_in_table, from_index, to_index, 1, {}};
  const long cloned = ::syscall(SYS_io_uring_register, to.ring_fd, clone_buffers, &argument, 1);
  return cloned < 0 ? -errno : 0;
}

std::mutex& shared_mutex() {
  static constinit std::mutex instance;
  return instance;
}
[[maybe_unused]] const int ring_fork_watch = os::hold_during_forks<shared_mutex>();

// The buffers that all rings of the process use together. A ring that does nothing else holds them,
// and the others clone them from it: the kernel pins and charges the memory once. The rings of the
// workers cannot clone from each other, because each has a single issuer. Thread-safe.
class SharedBuffers {
 public:
  struct Key {
    std::uint64_t id;
    std::byte* begin;
    std::size_t bytes;
    auto operator<=>(const Key&) const = default;
  };

  // The one of this process, as long as somebody holds it. nullptr if the kernel has none.
  static std::shared_ptr<SharedBuffers> of_process() {
    static auto& last = *new std::weak_ptr<SharedBuffers>();
    const std::lock_guard lock(shared_mutex());
    std::shared_ptr<SharedBuffers> shared = last.lock();
    if (shared != nullptr && shared->generation_ == os::fork_generation()) return shared;
    io_uring ring{};
    if (io_uring_queue_init(1, &ring, 0) < 0) return nullptr;
    static_cast<void>(rings_closed.load(std::memory_order_acquire));
    io_uring_ring_dontfork(&ring);
    shared = std::make_shared<SharedBuffers>(ring);
    if (io_uring_register_buffers_sparse(&ring, shared_buffers_max) < 0) return nullptr;
    last = shared;
    return shared;
  }

  explicit SharedBuffers(io_uring ring) : ring_(ring) {}
  ~SharedBuffers() { close_ring(ring_); }
  SharedBuffers(const SharedBuffers&) = delete;
  SharedBuffers& operator=(const SharedBuffers&) = delete;

  // Registers the buffer with `ring`, whose owner calls. Returns 0; -errno if the kernel refuses to
  // register it; or -EOPNOTSUPP: it cannot be shared, register it alone.
  int lend(const Key& key, io_uring& ring, unsigned index) {
    const std::lock_guard lock(shared_mutex());
    if (!cloning_works_) return -EOPNOTSUPP;
    auto found = entries_.find(key);
    if (found == entries_.end()) {
      if (free_.empty() && next_ == shared_buffers_max) return -EOPNOTSUPP;
      const unsigned place = free_.empty() ? next_++ : free_.back();
      if (!free_.empty()) free_.pop_back();
      if (const int refused = update_buffer(ring_, place, {key.begin, key.bytes}); refused < 0) {
        free_.push_back(place);
        return refused;
      }
      found = entries_.emplace(key, Entry{.place = place}).first;
    }
    if (const int refused = clone_buffer(ring_, found->second.place, ring, index); refused < 0) {
      if (refused == -EINVAL) cloning_works_ = false;
      drop_unused(found);
      return -EOPNOTSUPP;
    }
    ++found->second.users;
    return 0;
  }

  void take_back(const Key& key) noexcept {
    if (generation_ != os::fork_generation()) return;
    const std::lock_guard lock(shared_mutex());
    const auto found = entries_.find(key);
    --found->second.users;
    drop_unused(found);
  }

 private:
  struct Entry {
    unsigned place = 0;
    unsigned users = 0;
  };

  void drop_unused(std::map<Key, Entry>::iterator entry) noexcept {
    if (entry->second.users > 0) return;
    update_buffer(ring_, entry->second.place, {});
    free_.push_back(entry->second.place);
    entries_.erase(entry);
  }

  io_uring ring_;
  const std::uint64_t generation_ = os::fork_generation();
  bool cloning_works_ = true;
  std::map<Key, Entry> entries_;
  std::vector<unsigned> free_;
  unsigned next_ = 0;
};

class UringEngine final : public Engine {
 public:
  // Without a wake_fd (-1) the caller must not wait in reap().
  UringEngine(io_uring ring, unsigned flags, int wake_fd, unsigned depth)
      : ring_(ring), flags_(flags), wake_fd_(wake_fd), depth_(depth) {}

  ~UringEngine() override {
    close_ring(ring_);
    if (wake_fd_ >= 0) ::close(wake_fd_);
    for (const auto& [index, key] : borrowed_) shared_->take_back(key);
  }

  [[nodiscard]] EngineKind kind() const noexcept override { return EngineKind::io_uring; }

  [[nodiscard]] Capabilities capabilities() const noexcept override {
    return {.buffers_max = buffers_max_, .files_max = files_max_};
  }

  int attach() override {
    if ((flags_ & IORING_SETUP_R_DISABLED) != 0) {
      const int enabled = io_uring_enable_rings(&ring_);
      if (enabled < 0) return enabled;
    }
    if (kernel_polls()) find_kernel_thread();
    if (io_uring_register_buffers_sparse(&ring_, buffers_max_wanted) == 0) {
      buffers_max_ = buffers_max_wanted;
    }
    if (io_uring_register_files_sparse(&ring_, files_max_wanted) == 0) {
      files_max_ = files_max_wanted;
    }
    watch_for_wake();
    return 0;
  }

  Submitted submit(std::span<const Request> requests) override {
    std::size_t queued = 0;
    while (queued < requests.size() && in_flight_ + queued < depth_) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      prepare(*entry, requests[queued]);
      ++queued;
    }
    const Submitted sent = send(queued);
    in_flight_ += sent.taken;
    if (sent.error == 0 && sent.taken < requests.size()) return {sent.taken, EAGAIN};
    return sent;
  }

  int reap(std::span<Completion> out, Nanoseconds limit) override {
    woken_ = false;
    if (const int ready = drain(out); ready > 0 || woken_) return ready;
    if (!wake_watched_) watch_for_wake();
    if (!wake_watched_ && limit > unwatched_limit) limit = unwatched_limit;

    int waited = 0;
    if (limit <= Nanoseconds::zero()) {
      waited = io_uring_get_events(&ring_);
    } else if (limit == forever) {
      io_uring_cqe* first = nullptr;
      waited = io_uring_wait_cqe(&ring_, &first);
    } else {
      io_uring_cqe* first = nullptr;
      __kernel_timespec time{.tv_sec = limit.count() / 1'000'000'000,
                             .tv_nsec = limit.count() % 1'000'000'000};
      waited = io_uring_wait_cqes(&ring_, &first, 1, &time, nullptr);
      if (waited == -ETIME) return 0;
    }
    return waited < 0 ? waited : drain(out);
  }

  void wake() noexcept override { ::eventfd_write(wake_fd_, 1); }

  [[nodiscard]] double cpu_seconds() const noexcept override {
    timespec used{};
    if (kernel_thread_ == 0 || ::clock_gettime(kernel_thread_, &used) != 0) return 0;
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
  }

  void cancel(std::uint64_t tag) noexcept override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr && kernel_polls()) {
      io_uring_sqring_wait(&ring_);
      entry = io_uring_get_sqe(&ring_);
    }
    if (entry == nullptr) return;
    io_uring_prep_cancel64(entry, tag, 0);
    io_uring_sqe_set_data64(entry, cancel_tag);
    send(1);
  }

  int register_buffer(unsigned index, std::span<std::byte> memory) override {
    if (memory.size() > registered_buffer_bytes_max) return -EFAULT;
    return update_buffer(ring_, index, memory);
  }

  int share_buffer(unsigned index, std::span<std::byte> memory, std::uint64_t id) override {
    if (memory.size() > registered_buffer_bytes_max) return -EFAULT;
    if (index >= buffers_max_) return -EINVAL;
    if (shared_ == nullptr) shared_ = SharedBuffers::of_process();
    if (shared_ != nullptr) {
      const SharedBuffers::Key key{id, memory.data(), memory.size()};
      const int lent = shared_->lend(key, ring_, index);
      if (lent == 0) borrowed_.emplace(index, key);
      if (lent != -EOPNOTSUPP) return lent;
    }
    return update_buffer(ring_, index, memory);
  }

  void unregister_buffer(unsigned index) noexcept override {
    let_kernel_take_all();
    update_buffer(ring_, index, {});
    const auto borrowed = borrowed_.find(index);
    if (borrowed == borrowed_.end()) return;
    shared_->take_back(borrowed->second);
    borrowed_.erase(borrowed);
  }

  int register_file(unsigned index, int fd) override {
    const int updated = io_uring_register_files_update(&ring_, index, &fd, 1);
    return updated < 0 ? updated : 0;
  }

  void unregister_file(unsigned index) noexcept override {
    let_kernel_take_all();
    register_file(index, -1);
  }

 private:
  // Whether a thread of the kernel takes the requests from the ring.
  [[nodiscard]] bool kernel_polls() const noexcept { return (flags_ & IORING_SETUP_SQPOLL) != 0; }

  // A request has what it uses only when the kernel has taken it.
  void let_kernel_take_all() noexcept {
    if (!kernel_polls()) return;
    while (io_uring_sq_ready(&ring_) > 0) std::this_thread::yield();
  }

  // The clock of the kernel's thread, by the number that the kernel tells.
  void find_kernel_thread() {
    const std::string facts = os::read_text("/proc/self/fdinfo/" + std::to_string(ring_.ring_fd));
    const std::string_view name = "SqThread:";
    const std::size_t at = facts.find(name);
    if (at == std::string::npos) return;
    const long number = std::strtol(facts.c_str() + at + name.size(), nullptr, 10);
    constexpr clockid_t thread_time = 6;  // CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED
    if (number > 0) kernel_thread_ = (~static_cast<clockid_t>(number) * 8) | thread_time;
  }

  static void prepare(io_uring_sqe& entry, const Request& request) {
    const int target = request.file_index >= 0 ? request.file_index : request.fd;
    switch (request.kind) {
      case RequestKind::read:
        if (request.buffer_index >= 0) {
          io_uring_prep_read_fixed(&entry, target, request.memory, request.bytes, request.offset,
                                   request.buffer_index);
        } else {
          io_uring_prep_read(&entry, target, request.memory, request.bytes, request.offset);
        }
        break;
      case RequestKind::write:
        if (request.buffer_index >= 0) {
          io_uring_prep_write_fixed(&entry, target, request.memory, request.bytes, request.offset,
                                    request.buffer_index);
        } else {
          io_uring_prep_write(&entry, target, request.memory, request.bytes, request.offset);
        }
        break;
      case RequestKind::sync_data:
        io_uring_prep_fsync(&entry, target, IORING_FSYNC_DATASYNC);
        break;
      case RequestKind::sync_full:
        io_uring_prep_fsync(&entry, target, 0);
        break;
    }
    if (request.file_index >= 0) entry.flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(&entry, request.tag);
  }

  // Hands the last `queued` entries to the kernel. Takes those that it refuses back out of the
  // ring, or the next call would send them a second time. The kernel looks at the tail only inside
  // io_uring_enter, which only this thread calls, so moving it back is safe.
  // The kernel's own thread takes all that is in the ring.
  Submitted send(std::size_t queued) noexcept {
    if (kernel_polls()) {
      if (queued > 0) io_uring_submit(&ring_);
      return {queued, 0};
    }
    std::size_t taken = 0;
    int error = 0;
    while (taken < queued) {
      const int sent = io_uring_submit(&ring_);
      if (sent <= 0) {
        error = sent == 0 ? EAGAIN : -sent;
        break;
      }
      taken += static_cast<std::size_t>(sent);
    }
    if (const auto left = static_cast<unsigned>(queued - taken); left > 0) {
      ring_.sq.sqe_tail -= left;
      ring_.sq.sqe_head = ring_.sq.sqe_tail;
      io_uring_smp_store_release(ring_.sq.ktail, ring_.sq.sqe_tail);
    }
    return {taken, error};
  }

  void watch_for_wake() noexcept {
    if (wake_fd_ < 0) return;
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) return;
    if (wake_watch_ == WakeWatch::lasting) {
      io_uring_prep_poll_multishot(entry, wake_fd_, POLLIN);
    } else {
      io_uring_prep_read(entry, wake_fd_, &wake_count_, sizeof wake_count_, 0);
    }
    io_uring_sqe_set_data64(entry, wake_tag);
    wake_watched_ = send(1).taken == 1;
  }

  int drain(std::span<Completion> out) noexcept {
    unsigned head = 0;
    unsigned seen = 0;
    std::size_t count = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      const std::uint64_t tag = entry->user_data;
      if (tag < cancel_tag) {
        if (count == out.size()) break;
        out[count++] = {tag, entry->res};
      } else if (tag == wake_tag) {
        if ((entry->flags & IORING_CQE_F_MORE) == 0) wake_watched_ = false;
        if (entry->res == -EINVAL) {
          wake_watch_ = WakeWatch::once;  // an old kernel: its polls do not last
        } else {
          woken_ = true;
        }
      }
      ++seen;
    }
    io_uring_cq_advance(&ring_, seen);
    in_flight_ -= count;
    if (!wake_watched_) watch_for_wake();
    return static_cast<int>(count);
  }

  io_uring ring_;
  unsigned flags_;
  int wake_fd_;
  // How the ring learns of wake(): by a poll that reports every write to wake_fd_, which nobody
  // reads; or by a read, which must be sent again each time.
  enum class WakeWatch : std::uint8_t { lasting, once };
  WakeWatch wake_watch_ = WakeWatch::lasting;
  std::uint64_t wake_count_ = 0;  // the kernel writes here
  bool wake_watched_ = false;
  bool woken_ = false;  // since reap() began
  std::size_t depth_;
  std::size_t in_flight_ = 0;
  unsigned buffers_max_ = 0;
  unsigned files_max_ = 0;
  clockid_t kernel_thread_ = 0;  // its clock; 0: there is none
  std::shared_ptr<SharedBuffers> shared_;
  std::map<unsigned, SharedBuffers::Key> borrowed_;  // by index
};

Error ring_refused(const char* operation, int code) {
  return Error({.operation = operation, .code = code, .hint = why_refused(operation, code)});
}

int init_ring(io_uring& ring, unsigned entries, unsigned flags) noexcept {
  io_uring_params settings{};
  settings.flags = flags;
  settings.sq_thread_idle = poll_idle_milliseconds;
  const int opened = io_uring_queue_init_params(entries, &ring, &settings);
  if (opened >= 0) static_cast<void>(rings_closed.load(std::memory_order_acquire));
  return opened;
}

// Sends a request through a small ring of the same kind: filters refuse system calls one by one.
// The engine's own ring belongs to the thread that attaches it.
Status round_trip(unsigned flags) {
  io_uring ring{};
  if (const int opened = init_ring(ring, 1, flags); opened < 0) {
    return ring_refused("io_uring_setup", -opened);
  }
  io_uring_probe nothing{};
  const int registered = (flags & IORING_SETUP_R_DISABLED) != 0
                             ? io_uring_enable_rings(&ring)
                             : io_uring_register_probe(&ring, &nothing, 0);
  int entered = 0;
  if (registered >= 0) {
    io_uring_prep_nop(io_uring_get_sqe(&ring));
    io_uring_cqe* answer = nullptr;
    __kernel_timespec limit{.tv_sec = 1, .tv_nsec = 0};
    entered = io_uring_submit_and_wait_timeout(&ring, &answer, 1, &limit, nullptr);
    if (entered >= 0 && answer == nullptr) entered = -ETIME;
  }
  close_ring(ring);
  if (registered < 0) return ring_refused("io_uring_register", -registered);
  if (entered < 0) return ring_refused("io_uring_enter", -entered);
  return Nothing{};
}

Result<std::unique_ptr<Engine>> open_ring(unsigned depth, std::span<const unsigned> flags_to_try) {
  io_uring ring{};
  // The watch for wake() and a cancellation need an entry each.
  const unsigned entries = depth + 2;
  int opened = -EINVAL;
  unsigned flags = 0;
  for (const unsigned wanted : flags_to_try) {
    flags = wanted;
    opened = init_ring(ring, entries, flags);
    if (opened != -EINVAL) break;
  }
  if (opened < 0) return ring_refused("io_uring_setup", -opened);
  if ((ring.features & IORING_FEAT_EXT_ARG) == 0) {
    // liburing would mistake the completion of our watch for its own timeout: reap() would sleep
    // for ever.
    close_ring(ring);
    return ring_refused("io_uring_setup", ENOSYS);
  }
  if (Status works = round_trip(flags); !works.ok()) {
    close_ring(ring);
    return works.error();
  }

  // A child that touched its parent's ring would hang the parent.
  io_uring_ring_dontfork(&ring);
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC);
  if (wake_fd < 0) {
    const int code = errno;
    close_ring(ring);
    return ring_refused("eventfd", code);
  }
  return std::unique_ptr<Engine>(std::make_unique<UringEngine>(ring, flags, wake_fd, depth));
}

}  // namespace

Result<std::unique_ptr<Engine>> open_uring_engine(unsigned depth, Polling polling) {
  auto opened = polling == Polling::submission ? open_ring(depth, polled_setup_flags)
                                               : open_ring(depth, setup_flags);
  if (!opened.ok() || polling != Polling::completion) return opened;
  io_uring ring{};
  constexpr unsigned flags = IORING_SETUP_IOPOLL;
  if (const int refusal = init_ring(ring, depth, flags); refusal < 0) {
    return ring_refused("io_uring_setup", -refusal);
  }
  io_uring_ring_dontfork(&ring);
  return make_polling_engine(std::make_unique<UringEngine>(ring, flags, -1, depth),
                             std::move(opened.value()), depth);
}

}  // namespace tensorferry::engines
