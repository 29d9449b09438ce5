#include "handle/claim_queue.h"

#include <algorithm>
#include <utility>

#include "handle/worker.h"

namespace tensorferry::handle {

namespace {

// How soon a worker looks again at what the governor holds back. Its own completions come sooner.
constexpr std::chrono::milliseconds governor_pause{2};
// And at what a rate holds back, at the latest: somebody may change the rate.
constexpr std::chrono::milliseconds rate_pause_max{20};

// A sync moves no bytes, but it keeps the drive busy.
constexpr std::uint64_t charge_min = 4 * KiB;

}  // namespace

void ClaimQueue::push(std::shared_ptr<Leg> leg) {
  Legs& legs = of(leg->transfer->priority());
  legs.push_back(std::move(leg));
}

std::shared_ptr<Leg> ClaimQueue::take_out(const Leg& leg) noexcept {
  for (Legs& legs : legs_) {
    const auto found = std::ranges::find(legs, &leg, &std::shared_ptr<Leg>::get);
    if (found == legs.end()) continue;
    std::shared_ptr<Leg> taken = std::move(*found);
    legs.erase(found);
    return taken;
  }
  return nullptr;
}

template <class MayClaim, class Claimed>
std::size_t ClaimQueue::claim_from(Legs& legs, Worker& worker, std::span<Claim> out,
                                   MayClaim may_claim, Claimed claimed) {
  std::size_t count = 0;
  std::size_t looked_at = 0;
  while (count < out.size() && looked_at < legs.size() && may_claim()) {
    std::shared_ptr<Leg> leg = std::move(legs.front());
    legs.pop_front();
    Transfer& transfer = *leg->transfer;
    const std::size_t turn_end = std::min(out.size(), count + leg->turn_left);
    const std::size_t before = count;
    bool held = false;
    const auto starved = [&] {
      const Run* run = worker.starving() ? transfer.next_through_slot(*leg) : nullptr;
      return run != nullptr && !worker.has_slots_for(*run, transfer.priority());
    };
    if (transfer.claimable(*leg) && !starved()) {
      const std::shared_ptr<Transfer> self(leg, &transfer);
      do {
        transfer.claim(self, *leg, out[count]);
        claimed(out[count++]);
        held = count < turn_end && !may_claim();
      } while (count < turn_end && transfer.claimable(*leg) && !starved() && !held);
    }
    const bool took = count != before;
    looked_at = took ? 0 : looked_at + 1;
    leg->turn_left -= count - before;
    // A stopping one stays until drop() takes it.
    const bool stays = transfer.claimable(*leg) || transfer.stopping();
    if (stays && took && (count == out.size() || held) && leg->turn_left > 0) {
      // The next worker with room goes on with this turn: later operations must not overtake it.
      legs.push_front(std::move(leg));
      break;
    }
    if (leg->turn_left == 0) leg->turn_left = turn_blocks;
    if (stays) legs.push_back(std::move(leg));
  }
  return count;
}

std::size_t ClaimQueue::claim(Worker& worker, std::span<Claim> out, Bounds bounds) {
  if (classes_in_use()) [[unlikely]]
    return claim_by_class(worker, out, bounds);
  return claim_from(of(Priority::normal), worker, out, [] { return true; }, [](const Claim&) {});
}

std::size_t ClaimQueue::claim_by_class(Worker& worker, std::span<Claim> out, Bounds bounds) {
  worker.held_for = std::chrono::nanoseconds::max();
  std::size_t count = 0;
  const auto claim_up_to = [&](Priority priority, std::size_t most) {
    const std::size_t room = std::min(most, out.size() - count);
    const std::size_t claimed = claim_of(priority, worker, out.subspan(count, room), bounds);
    count += claimed;
    return claimed;
  };
  // Nothing starves: one that was passed over long enough comes first.
  const auto in_its_turn = [&](Priority priority, std::size_t& passed_over) {
    const bool claimed = passed_over >= passed_over_max && claim_up_to(priority, 1) > 0;
    if (claimed || of(priority).empty()) passed_over = 0;
  };
  in_its_turn(Priority::background, background_passed_over_);
  in_its_turn(Priority::normal, normal_passed_over_);
  const std::size_t urgent = claim_up_to(Priority::urgent, out.size());
  const std::size_t normal = claim_up_to(Priority::normal, out.size());
  if (!of(Priority::normal).empty()) normal_passed_over_ += urgent;
  if (!of(Priority::background).empty()) background_passed_over_ += urgent + normal;
  const std::size_t spare = worker.flights_left_for_background();
  if (count < spare) (void)claim_up_to(Priority::background, spare - count);
  return count;
}

std::size_t ClaimQueue::claim_of(Priority priority, Worker& worker, std::span<Claim> out,
                                 Bounds bounds) {
  Legs& legs = of(priority);
  if (legs.empty() || out.empty()) return 0;
  const Clock::time_point now = Clock::now();
  Rate& of_class = Rate::of(priority);
  const bool background = priority == Priority::background;
  const auto may_claim = [&] {
    if (bounds == Bounds::lifted) return true;
    auto due = of_class.due_in(now);
    if (rate_ != nullptr) due = std::max(due, rate_->due_in(now));
    const bool admitted = !background || background_.idle() || background_.governor().admits(now);
    if (!admitted) due = std::max<Clock::duration>(due, governor_pause);
    if (due > Clock::duration::zero()) {
      worker.held_for = std::min<Clock::duration>({worker.held_for, due, rate_pause_max});
    }
    return due == Clock::duration::zero();
  };
  return claim_from(legs, worker, out, may_claim, [&](Claim& claim) {
    const std::uint64_t bytes = claim.step == nullptr ? claim.block.bytes : 0;
    if (bounds == Bounds::kept) {
      of_class.charge(bytes, now);
      if (rate_ != nullptr) rate_->charge(bytes, now);
    }
    if (!background) return;
    claim.background_bytes = static_cast<std::uint32_t>(std::max(bytes, charge_min));
    background_.begins(claim.background_bytes);
  });
}

}  // namespace tensorferry::handle
