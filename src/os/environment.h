// The environment, as far as it may steer this process: nobody else reads variables.
#pragma once

#include <optional>
#include <string>

namespace tensorferry::os {

// Whether the program has rights that whoever started it need not have: setuid, setgid or
// capabilities of its file. It stays so when the program gives them up.
[[nodiscard]] bool privileged() noexcept;

// A variable; nullopt where it is not set, and in a privileged program: those who start it must not
// choose its settings or its files.
[[nodiscard]] std::optional<std::string> variable(const char* name);

}  // namespace tensorferry::os
