// The names of errno values.
#pragma once

#include <string>

namespace tensorferry {

// "EIO"; the number if the value has no name.
[[nodiscard]] std::string errno_name(int code);

}  // namespace tensorferry
