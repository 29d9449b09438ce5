// The legs of a crew that wait for workers, by class: urgent ones first, then normal ones, then
// those in the background as far as the governor of the drive admits them. Within a class they take
// turns. The crew's lock guards it.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>

#include "handle/governor.h"
#include "handle/transfer.h"

namespace tensorferry::handle {

class Worker;

// After so many blocks of higher classes a class that waits gets one.
inline constexpr std::size_t passed_over_max = 16;

// Whether rates and the governor hold: not for a crew that is finishing.
enum class Bounds : std::uint8_t { kept, lifted };

class ClaimQueue {
 public:
  using Clock = std::chrono::steady_clock;

  // `rate` is that of the handle; nullptr: it has none.
  ClaimQueue(Governor& governor, std::shared_ptr<Rate> rate)
      : background_(governor), rate_(std::move(rate)) {}

  // Adds a leg at the end of its class.
  void push(std::shared_ptr<Leg> leg);
  // Takes a leg out; returns nullptr if it is not here.
  [[nodiscard]] std::shared_ptr<Leg> take_out(const Leg& leg) noexcept;

  // Claims up to out.size() blocks. Sets worker.held_for if some have to wait.
  [[nodiscard]] std::size_t claim(Worker& worker, std::span<Claim> out, Bounds bounds);

  // For movers, without the lock.
  [[nodiscard]] Background& background() noexcept { return background_; }

 private:
  using Legs = std::deque<std::shared_ptr<Leg>>;

  [[nodiscard]] Legs& of(Priority priority) noexcept {
    return legs_.at(static_cast<std::size_t>(priority));
  }
  // may_claim() is asked before each block, and claimed(claim) told after it.
  template <class MayClaim, class Claimed>
  [[nodiscard]] static std::size_t claim_from(Legs& legs, Worker& worker, std::span<Claim> out,
                                              MayClaim may_claim, Claimed claimed);
  [[nodiscard]] std::size_t claim_by_class(Worker& worker, std::span<Claim> out, Bounds bounds);
  // Claims blocks of one class that its rates, and in the background the governor, let start.
  [[nodiscard]] std::size_t claim_of(Priority priority, Worker& worker, std::span<Claim> out,
                                     Bounds bounds);

  std::array<Legs, 3> legs_;
  // Blocks of higher classes since the last one of these, while one waited.
  std::size_t normal_passed_over_ = 0;
  std::size_t background_passed_over_ = 0;
  Background background_;
  const std::shared_ptr<Rate> rate_;
};

}  // namespace tensorferry::handle
