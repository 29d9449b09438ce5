// Threads of the library: they take no signals, carry a name, and starting one can fail.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>

namespace tensorferry::os {

// Starts a thread that blocks every signal, so that handlers run in the user's threads. Returns
// nullopt if the system cannot start another thread. `name` shows in debuggers and `top -H`; at
// most 15 characters.
[[nodiscard]] std::optional<std::thread> start_thread(const char* name, std::function<void()> body);

// Call it after a callback of the user has returned, with the fork generation from before. If the
// callback ran on a thread of the library and forked, this is the child, in which the thread cannot
// go on: it ends here, silently. It is the child's only thread, unless the user has started others.
void end_forked_thread(std::uint64_t generation) noexcept;

// The CPU time that a running thread has used so far.
[[nodiscard]] double cpu_seconds(std::thread& thread) noexcept;
[[nodiscard]] double cpu_seconds_of_this_thread() noexcept;

}  // namespace tensorferry::os
