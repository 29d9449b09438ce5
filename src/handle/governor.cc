#include "handle/governor.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <functional>

namespace tensorferry::handle {

namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// A worker that comes this late to a block that was due has not lost the time.
constexpr nanoseconds rate_slack = milliseconds(20);
// A block never takes longer than this: a year.
constexpr double charge_seconds_max = 3e7;

// For so long after a request others count as using the drive. Urgent ones are few, and the next
// should not find the drive's queue full.
constexpr nanoseconds urgent_linger = std::chrono::seconds(1);
constexpr nanoseconds normal_linger = milliseconds(20);

// An urgent request suffers if it takes longer than 2.5 times the shortest of late.
constexpr std::uint64_t suffers_from_halves = 5;
// How much the limit falls with one that suffers and rises with one that does not: of about 100
// urgent requests one suffers when both are in balance.
constexpr std::uint64_t fall_divisor = 8;
constexpr std::uint64_t rise_divisor = 800;
// The shortest time rises slowly, so that a time that was an exception is forgotten.
constexpr std::uint64_t forget_divisor = 16384;

std::int64_t since_epoch(Governor::Clock::time_point time) noexcept {
  return duration_cast<nanoseconds>(time.time_since_epoch()).count();
}

// Enough for the drives of any machine; what comes later shares the last.
constexpr std::size_t governors_max = 64;
struct Named {
  std::atomic<std::size_t> name{0};  // a hash of the drive's number; 0: free
  Governor governor;
};
std::array<Named, governors_max>& all_governors() noexcept {
  static std::array<Named, governors_max> all;
  return all;
}

// What the parent has under way stays there. The first call makes the governors: no fork finds them
// half made.
[[maybe_unused]] const int fork_watch =
    (static_cast<void>(all_governors()), pthread_atfork(nullptr, nullptr, [] {
       for (Named& one : all_governors()) one.governor.forget();
     }));

}  // namespace

void Rate::set(std::uint64_t bytes_per_second) noexcept {
  bytes_per_second_ = bytes_per_second;
  next_ = 0;
}

Rate::Clock::duration Rate::due_in(Clock::time_point now) const noexcept {
  if (!limits()) return Clock::duration::zero();
  return std::max(Clock::duration::zero(), Clock::duration(next_.load() - since_epoch(now)));
}

void Rate::charge(std::uint64_t bytes, Clock::time_point now) noexcept {
  const std::uint64_t rate = get();
  if (rate == 0) return;
  const double seconds = static_cast<double>(bytes) / static_cast<double>(rate);
  const auto takes = static_cast<std::int64_t>(std::min(seconds, charge_seconds_max) * 1e9);
  const std::int64_t earliest = since_epoch(now) - rate_slack.count();
  std::int64_t before = next_.load();
  while (!next_.compare_exchange_weak(before, std::max(before, earliest) + takes)) {
  }
}

Rate& Rate::of(Priority priority) noexcept {
  static std::array<Rate, 3> rates;
  return rates.at(static_cast<std::size_t>(priority));
}

Governor& Governor::of(std::string_view number) noexcept {
  const std::size_t name = std::max<std::size_t>(std::hash<std::string_view>()(number), 1);
  auto& all = all_governors();
  for (Named& one : all) {
    std::size_t free = 0;
    if (one.name.compare_exchange_strong(free, name) || free == name) return one.governor;
  }
  return all.back().governor;
}

void Governor::forget() noexcept {
  under_way_ = 0;
  urgent_until_ = 0;
  normal_until_ = 0;
}

std::uint64_t Governor::limit(Clock::time_point now) const noexcept {
  const std::int64_t time = since_epoch(now);
  const bool shared = time < urgent_until_.load(std::memory_order_relaxed) ||
                      time < normal_until_.load(std::memory_order_relaxed);
  return shared ? limit_.load(std::memory_order_relaxed) : UINT64_MAX;
}

void Governor::begins(Priority priority, Clock::time_point now) noexcept {
  if (priority == Priority::urgent) {
    urgent_until_.store(since_epoch(now + urgent_linger), std::memory_order_relaxed);
  } else if (priority == Priority::normal) {
    normal_until_.store(since_epoch(now + normal_linger), std::memory_order_relaxed);
  }
}

void Governor::ended(Priority priority, Direction direction, std::uint64_t bytes,
                     Clock::time_point begin, Clock::time_point now) noexcept {
  begins(priority, now);
  if (priority != Priority::urgent || bytes == 0) return;
  const auto size = std::min<std::size_t>(std::bit_width(bytes), sizes - 1);
  const auto took = static_cast<std::uint64_t>(
      std::max<std::int64_t>(1, duration_cast<nanoseconds>(now - begin).count()));
  adapt(shortest_.at(static_cast<std::size_t>(direction)).at(size), took);
}

// Several threads at once may lose a step of one of them: the next one makes up for it.
void Governor::adapt(std::atomic<std::uint64_t>& shortest, std::uint64_t took) noexcept {
  const std::uint64_t known = shortest.load(std::memory_order_relaxed);
  if (known == 0 || took < known) {
    shortest.store(took, std::memory_order_relaxed);
    return;
  }
  shortest.store(known + known / forget_divisor, std::memory_order_relaxed);
  if (under_way() == 0) return;  // the background has no part in it
  const std::uint64_t limit = limit_.load(std::memory_order_relaxed);
  const std::uint64_t next = 2 * took > suffers_from_halves * known ? limit - limit / fall_divisor
                                                                    : limit + limit / rise_divisor;
  limit_.store(std::clamp(next, limit_min, limit_max), std::memory_order_relaxed);
}

}  // namespace tensorferry::handle
