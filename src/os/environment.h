// The environment variables that may steer this process. No other file reads variables.
#pragma once

#include <optional>
#include <string>

namespace tensorferry::os {

// Whether the program has more rights than the user who started it: setuid, setgid or capabilities
// of its file. Stays true after the program has given them up.
[[nodiscard]] bool privileged() noexcept;

// The value of a variable; nullopt if it is not set, and in a privileged program: the user who
// starts that must not choose its settings or files.
[[nodiscard]] std::optional<std::string> variable(const char* name);

}  // namespace tensorferry::os
