// Lets the kernel refuse system calls, as containers do.
#pragma once

#include <span>
#include <string>

namespace tensorferry::support {

// From now on, in every thread of this process and for ever, each of the system calls (SYS_...)
// fails with `error`. For use in run_in_child(). Empty, or why it could not be done.
[[nodiscard]] std::string refuse_system_calls(std::span<const int> calls, int error);
[[nodiscard]] std::string refuse_system_call(int call, int error);

// From now on this process is an ordinary user as far as locked memory is concerned: the memlock
// limit is `bytes` and the capability to pass it by is gone. Empty, or why it could not be done.
[[nodiscard]] std::string limit_locked_memory(std::size_t bytes);

}  // namespace tensorferry::support
