// Who goes first on a drive, and how many bytes a class may move in a second. Both hold for all
// handles of the process together.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tensorferry/export.h"
#include "tensorferry/options.h"

namespace tensorferry {

// "urgent", "normal", "background".
[[nodiscard]] TENSORFERRY_EXPORT std::string_view to_string(Priority priority) noexcept;

// The reverse of to_string(). Throws Error (EINVAL) that names the choices.
[[nodiscard]] TENSORFERRY_EXPORT Priority parse_priority(std::string_view text);

// While it lives, operations that this thread starts have this priority, unless their call names
// another; and what this thread waits for is raised to it. Scopes nest. Destroy it on the thread
// that made it.
class TENSORFERRY_EXPORT PriorityScope {
 public:
  explicit PriorityScope(Priority priority) noexcept;
  ~PriorityScope();
  PriorityScope(const PriorityScope&) = delete;
  PriorityScope& operator=(const PriorityScope&) = delete;

 private:
  const std::optional<Priority> before_;
};

// The priority of the innermost scope of this thread; nullopt if it has none.
[[nodiscard]] TENSORFERRY_EXPORT std::optional<Priority> scope_priority() noexcept;

// Lets the operations of a class, of all handles of the process together, move at most so many
// bytes in a second; 0: no limit, as at first. Holds for blocks that start from now on.
TENSORFERRY_EXPORT void set_rate(Priority priority, std::uint64_t bytes_per_second) noexcept;
[[nodiscard]] TENSORFERRY_EXPORT std::uint64_t rate(Priority priority) noexcept;

}  // namespace tensorferry
