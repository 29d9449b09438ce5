// Threads of the library: they take no signals, carry a name, and starting one can fail.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>

namespace tensorferry::os {

// Starts a thread that blocks every signal (handlers keep running in the user's threads). Nothing
// when the system has no thread left. `name` shows in debuggers and `top -H`, 15 characters at
// most.
[[nodiscard]] std::optional<std::thread> start_thread(const char* name, std::function<void()> body);

// For who has called a user on whichever thread. If that is one of ours and the user has forked,
// this is the child, made since `generation`: there is nothing to go on with, and the thread ends
// here, without a word. It is the child's only one, unless the user has started others.
void end_forked_thread(std::uint64_t generation) noexcept;

// CPU time that a running thread has used so far.
[[nodiscard]] double cpu_seconds(std::thread& thread) noexcept;
[[nodiscard]] double cpu_seconds_of_this_thread() noexcept;

}  // namespace tensorferry::os
