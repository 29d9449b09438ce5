#include "tensorferry/priority.h"

#include <array>
#include <cerrno>
#include <string>

#include "handle/governor.h"
#include "tensorferry/error.h"

namespace tensorferry {

namespace {

constexpr std::array<std::string_view, 3> names{"urgent", "normal", "background"};

constinit thread_local std::optional<Priority> of_this_thread;

}  // namespace

std::string_view to_string(Priority priority) noexcept {
  return names.at(static_cast<std::size_t>(priority));
}

Priority parse_priority(std::string_view text) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names.at(i) == text) return static_cast<Priority>(i);
  }
  throw Error({.operation = "priority",
               .code = EINVAL,
               .hint = "no priority is called \"" + std::string(text) +
                       "\"; choose urgent, normal or background"});
}

PriorityScope::PriorityScope(Priority priority) noexcept : before_(of_this_thread) {
  if (priority != Priority::normal) handle::use_classes();
  of_this_thread = priority;
}

PriorityScope::~PriorityScope() { of_this_thread = before_; }

std::optional<Priority> scope_priority() noexcept { return of_this_thread; }

void set_rate(Priority priority, std::uint64_t bytes_per_second) noexcept {
  if (bytes_per_second > 0) handle::use_classes();
  handle::Rate::of(priority).set(bytes_per_second);
}

std::uint64_t rate(Priority priority) noexcept { return handle::Rate::of(priority).get(); }

}  // namespace tensorferry
