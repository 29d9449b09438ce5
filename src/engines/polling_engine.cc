// The io_uring engine with Polling::completion: asks the device for completions instead of waiting
// for its interrupts. A ring that does so can do nothing but read and write with O_DIRECT, so an
// ordinary one has the rest: syncs, the page cache and wake().
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>
#include <vector>

#include "engines/engine.h"

namespace tensorferry::engines {

namespace {

class PollingEngine final : public Engine {
 public:
  PollingEngine(std::unique_ptr<Engine> polled, std::unique_ptr<Engine> rest, unsigned depth)
      : polled_(std::move(polled)), rest_(std::move(rest)), depth_(depth) {}

  [[nodiscard]] EngineKind kind() const noexcept override { return rest_->kind(); }
  [[nodiscard]] Capabilities capabilities() const noexcept override {
    return {.buffers_max = polled_->capabilities().buffers_max};
  }

  int attach() override {
    const int attached = rest_->attach();
    return attached < 0 ? attached : polled_->attach();
  }

  Submitted submit(std::span<const Request> requests) override {
    std::size_t taken = 0;
    while (taken < requests.size()) {
      const std::size_t left = depth_ - polled_in_flight_ - rest_in_flight_;
      if (left == 0) return {taken, EAGAIN};
      const bool polled = is_polled(requests[taken]);
      std::size_t count = 1;
      while (taken + count < requests.size() && count < left &&
             is_polled(requests[taken + count]) == polled) {
        ++count;
      }
      const auto alike = requests.subspan(taken, count);
      const Submitted sent = polled ? polled_->submit(alike) : submit_rest(alike);
      (polled ? polled_in_flight_ : rest_in_flight_) += sent.taken;
      taken += sent.taken;
      if (sent.error != 0) return {taken, sent.error};
    }
    return {taken, 0};
  }

  // Does not sleep while the device has requests.
  int reap(std::span<Completion> out, Nanoseconds limit) override {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      const int polled = polled_in_flight_ > 0 ? polled_->reap(out, Nanoseconds::zero()) : 0;
      if (polled < 0) return polled;
      const auto count = static_cast<std::size_t>(polled);
      polled_in_flight_ -= count;
      const bool may_sleep = polled_in_flight_ == 0 && count == 0;
      const int rest = rest_->reap(out.subspan(count), may_sleep ? limit : Nanoseconds::zero());
      if (rest > 0) rest_in_flight_ -= static_cast<std::size_t>(rest);
      const bool woken = woken_.exchange(false);
      if (count > 0) return polled + std::max(rest, 0);
      if (rest != 0 || may_sleep || woken) return rest;
      if (limit != forever && std::chrono::steady_clock::now() - begin >= limit) return 0;
    }
  }

  void wake() noexcept override {
    woken_ = true;
    rest_->wake();
  }

  // The kernel cannot cancel what it polls for.
  void cancel(std::uint64_t tag) noexcept override { rest_->cancel(tag); }

  int register_buffer(unsigned index, std::span<std::byte> memory) override {
    return polled_->register_buffer(index, memory);
  }
  int share_buffer(unsigned index, std::span<std::byte> memory, std::uint64_t id) override {
    return polled_->share_buffer(index, memory, id);
  }
  void unregister_buffer(unsigned index) noexcept override { polled_->unregister_buffer(index); }

 private:
  static bool is_polled(const Request& request) noexcept {
    if (is_sync(request.kind)) return false;
    const int flags = ::fcntl(request.fd, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
  }

  Submitted submit_rest(std::span<const Request> requests) {
    rest_requests_.assign(requests.begin(), requests.end());
    for (Request& request : rest_requests_) request.buffer_index = -1;
    return rest_->submit(rest_requests_);
  }

  std::unique_ptr<Engine> polled_;
  std::unique_ptr<Engine> rest_;
  std::size_t depth_;
  std::size_t polled_in_flight_ = 0;
  std::size_t rest_in_flight_ = 0;
  std::vector<Request> rest_requests_;
  std::atomic<bool> woken_{false};
};

}  // namespace

std::unique_ptr<Engine> make_polling_engine(std::unique_ptr<Engine> polled,
                                            std::unique_ptr<Engine> rest, unsigned depth) {
  return std::make_unique<PollingEngine>(std::move(polled), std::move(rest), depth);
}

}  // namespace tensorferry::engines
