// Errno values as people know them.
#pragma once

#include <string>

namespace tensorferry {

// "EIO"; the number where it has no name.
[[nodiscard]] std::string errno_name(int code);

}  // namespace tensorferry
