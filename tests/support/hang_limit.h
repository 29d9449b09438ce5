// How long a test waits before it calls something hung.
#pragma once

#include <chrono>

namespace tensorferry::support {

// Nothing that tests wait for takes more than seconds, but a loaded machine may be slow.
inline constexpr std::chrono::seconds hang_limit{60};

}  // namespace tensorferry::support
