#include "support/faulty_engine.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

namespace tensorferry::support {

using engines::Completion;
using engines::Request;
using engines::RequestKind;
using engines::Submitted;
using Clock = std::chrono::steady_clock;

namespace {

// Writes the shortened part through another descriptor without O_DIRECT, which rarely takes a short
// length. The rest is not written.
std::int32_t write_part(const Request& request, std::uint32_t bytes) {
  const std::string same_file = "/proc/self/fd/" + std::to_string(request.fd);
  const int fd = ::open(same_file.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  const ssize_t put = ::pwrite(fd, request.memory, bytes, static_cast<off_t>(request.offset));
  const std::int32_t result = put < 0 ? -errno : static_cast<std::int32_t>(put);
  ::close(fd);
  return result;
}

std::int32_t make_up(const Request& request, const Fault& fault) {
  switch (fault.kind) {
    case Fault::Kind::shorten:
      return write_part(request, std::min(fault.bytes, request.bytes));
    case Fault::Kind::pretend:
      return static_cast<std::int32_t>(request.bytes);
    case Fault::Kind::fail:
    case Fault::Kind::none:
      break;
  }
  return -fault.error;
}

// Requests reuse tags: the same tag alone does not mean the same request.
bool same(const Request& one, const Request& other) {
  return one.kind == other.kind && one.fd == other.fd && one.memory == other.memory &&
         one.offset == other.offset && one.bytes == other.bytes;
}

}  // namespace

class FaultyEngine final : public engines::Engine {
 public:
  FaultyEngine(EngineFaults& faults, std::unique_ptr<engines::Engine> real)
      : faults_(faults), real_(std::move(real)) {}

  [[nodiscard]] EngineKind kind() const noexcept override { return real_->kind(); }
  [[nodiscard]] engines::Capabilities capabilities() const noexcept override {
    return real_->capabilities();
  }
  int attach() override { return real_->attach(); }
  Submitted submit(std::span<const Request> requests) override;
  int reap(std::span<Completion> out, Nanoseconds limit) override;
  void wake() noexcept override {
    woken_.store(true);
    real_->wake();
  }
  void cancel(std::uint64_t tag) noexcept override { real_->cancel(tag); }
  int register_buffer(unsigned index, std::span<std::byte> memory) override {
    return real_->register_buffer(index, memory);
  }
  int share_buffer(unsigned index, std::span<std::byte> memory, std::uint64_t id) override {
    return real_->share_buffer(index, memory, id);
  }
  void unregister_buffer(unsigned index) noexcept override { real_->unregister_buffer(index); }
  int register_file(unsigned index, int fd) override { return real_->register_file(index, fd); }
  void unregister_file(unsigned index) noexcept override { real_->unregister_file(index); }
  [[nodiscard]] int ready_fd() override { return real_->ready_fd(); }
  [[nodiscard]] double cpu_seconds() const noexcept override { return real_->cpu_seconds(); }

 private:
  struct Held {
    Completion completion;
    Clock::time_point due;
  };
  struct Struck {
    Request request;
    Fault fault;
  };

  void hold(Completion completion) {
    held_.push_back({completion, Clock::now() + faults_.draw_delay()});
  }
  void take_up(const Request& request);
  void hold_real(Completion completion);
  std::size_t release(std::span<Completion> out);
  [[nodiscard]] Nanoseconds until_due(Clock::time_point now) const;
  void note_in_flight();

  EngineFaults& faults_;
  std::unique_ptr<engines::Engine> real_;
  std::mutex mutex_;  // one thread may submit while another one reaps
  std::vector<Held> held_;
  std::unordered_map<std::uint64_t, Struck> judged_;  // offered and not taken yet, by tag
  std::unordered_map<std::uint64_t, Struck> struck_;  // reads under way, by tag
  std::size_t in_flight_ = 0;                         // in the real engine
  std::atomic<bool> woken_{false};
};

// Passes the requests up to a refusal or a made-up completion to the real engine in one call, and
// so on.
Submitted FaultyEngine::submit(std::span<const Request> requests) {
  const std::lock_guard lock(mutex_);
  std::size_t taken = 0;
  while (taken < requests.size()) {
    std::size_t run_end = taken;
    int refusal = 0;
    Fault made_up;
    for (; run_end < requests.size(); ++run_end) {
      const Request& request = requests[run_end];
      const auto known = judged_.find(request.tag);
      const bool again = known != judged_.end() && same(known->second.request, request);
      if (!again && faults_.refused(&refusal)) break;
      const Fault fault = again ? known->second.fault : faults_.take(request);
      judged_[request.tag] = {request, fault};
      const bool read = request.kind == RequestKind::read;
      if (fault.kind == Fault::Kind::pretend || (fault.kind != Fault::Kind::none && !read)) {
        made_up = fault;
        break;
      }
    }
    const std::span<const Request> run = requests.subspan(taken, run_end - taken);
    const Submitted submitted = run.empty() ? Submitted{} : real_->submit(run);
    for (const Request& request : run.first(submitted.taken)) take_up(request);
    taken += submitted.taken;
    in_flight_ += submitted.taken;
    if (submitted.taken < run.size()) {
      note_in_flight();
      return {taken, submitted.error};
    }
    if (made_up.kind != Fault::Kind::none) {
      const Request& request = requests[taken++];
      judged_.erase(request.tag);
      hold({request.tag, make_up(request, made_up)});
      real_->wake();  // a thread that reaps meanwhile must see it
    }
    note_in_flight();
    if (refusal != 0) return {taken, refusal};
  }
  return {taken, 0};
}

// The real engine has the request: the verdict waits for its completion.
void FaultyEngine::take_up(const Request& request) {
  const auto known = judged_.find(request.tag);
  if (known->second.fault.kind != Fault::Kind::none) struck_[request.tag] = known->second;
  judged_.erase(known);
}

void FaultyEngine::note_in_flight() {
  const auto now = static_cast<unsigned>(in_flight_ + held_.size());
  unsigned before = faults_.in_flight_max_.load();
  while (now > before && !faults_.in_flight_max_.compare_exchange_weak(before, now)) {
  }
}

// Changes a completion of the real engine. A struck read has moved all its bytes by now: this
// overwrites the part that was "not read", so that the test sees if the library takes it for read.
void FaultyEngine::hold_real(Completion completion) {
  --in_flight_;
  const auto found = struck_.find(completion.tag);
  if (found != struck_.end()) {
    const auto [request, fault] = found->second;
    struck_.erase(found);
    const bool failed = fault.kind == Fault::Kind::fail;
    const std::uint32_t kept = failed ? 0 : std::min(fault.bytes, request.bytes);
    if (completion.result > 0 && static_cast<std::uint32_t>(completion.result) > kept) {
      std::memset(request.memory + kept, 0xa5,
                  static_cast<std::uint32_t>(completion.result) - kept);
      completion.result = static_cast<std::int32_t>(kept);
    }
    if (failed) completion.result = -fault.error;
  }
  hold(completion);
}

std::size_t FaultyEngine::release(std::span<Completion> out) {
  const Clock::time_point now = Clock::now();
  std::size_t count = 0;
  if (faults_.reorder) {
    for (std::size_t i = held_.size(); i > 1; --i) {
      std::swap(held_[i - 1], held_[faults_.draw_below(i)]);
    }
  }
  for (std::size_t i = 0; i < held_.size() && count < out.size();) {
    if (held_[i].due > now) {
      ++i;
      continue;
    }
    out[count++] = held_[i].completion;
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return count;
}

engines::Engine::Nanoseconds FaultyEngine::until_due(Clock::time_point now) const {
  Nanoseconds wait = forever;
  for (const Held& held : held_) {
    wait = std::min(wait, std::max(Nanoseconds(0), Nanoseconds(held.due - now)));
  }
  return wait;
}

int FaultyEngine::reap(std::span<Completion> out, Nanoseconds limit) {
  const Clock::time_point begin = Clock::now();
  std::vector<Completion> real(std::max<std::size_t>(out.size(), 64));
  for (;;) {
    const bool woken = woken_.exchange(false);
    const Clock::time_point now = Clock::now();
    const Nanoseconds passed = now - begin;
    const Nanoseconds left = limit == forever ? forever : std::max(Nanoseconds(0), limit - passed);
    std::unique_lock lock(mutex_);
    const Nanoseconds wait = woken ? Nanoseconds(0) : std::min(left, until_due(now));
    lock.unlock();
    const int got = real_->reap(real, wait);
    if (got < 0) return got;
    lock.lock();
    for (int i = 0; i < got; ++i) hold_real(real[static_cast<std::size_t>(i)]);
    const std::size_t released = release(out);
    if (released > 0 || woken || left.count() == 0) return static_cast<int>(released);
  }
}

Result<std::unique_ptr<engines::Engine>> EngineFaults::open(EngineKind kind, unsigned depth,
                                                            os::System& system) {
  auto real = engines::open_engine(kind, depth, system);
  if (!real.ok()) return real;
  return std::unique_ptr<engines::Engine>(
      std::make_unique<FaultyEngine>(*this, std::move(real.value())));
}

std::vector<TakenRequest> EngineFaults::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

void EngineFaults::reset_counts() {
  const std::lock_guard lock(mutex_);
  log_.clear();
  requests_ = 0;
  syncs_ = 0;
  refusals_ = 0;
  struck_ = 0;
  in_flight_max_ = 0;
}

bool EngineFaults::refused(int* error) {
  if (refuse_probability <= 0 || refuse_errors.empty()) return false;
  const std::lock_guard lock(mutex_);
  if (std::uniform_real_distribution<double>(0, 1)(dice_) >= refuse_probability) return false;
  *error =
      refuse_errors[std::uniform_int_distribution<std::size_t>(0, refuse_errors.size() - 1)(dice_)];
  refusals_.fetch_add(1);
  return true;
}

Fault EngineFaults::take(const Request& request) {
  const std::uint64_t index = requests_.fetch_add(1);
  if (request.kind == RequestKind::sync_data || request.kind == RequestKind::sync_full) {
    syncs_.fetch_add(1);
  }
  if (log_requests) {
    const std::lock_guard lock(mutex_);
    log_.push_back({request.kind, request.offset, request.bytes});
  }
  const Fault fault = judge ? judge(request, index) : Fault{};
  if (fault.kind != Fault::Kind::none) struck_.fetch_add(1);
  return fault;
}

std::chrono::nanoseconds EngineFaults::draw_delay() {
  if (delay_max.count() <= 0) return {};
  const std::lock_guard lock(mutex_);
  return std::chrono::nanoseconds(
      std::uniform_int_distribution<std::int64_t>(0, delay_max.count())(dice_));
}

std::size_t EngineFaults::draw_below(std::size_t limit) {
  const std::lock_guard lock(mutex_);
  return std::uniform_int_distribution<std::size_t>(0, limit - 1)(dice_);
}

EngineFaults::Judge strike_one(std::uint64_t index, Fault fault) {
  return [index, fault](const Request&, std::uint64_t at) { return at == index ? fault : Fault{}; };
}

}  // namespace tensorferry::support
