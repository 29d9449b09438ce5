// Threads of the library: they take no signals, carry a name, and starting one can fail.
#pragma once

#include <functional>
#include <optional>
#include <thread>

namespace tensorferry::os {

// Starts a thread that blocks every signal (handlers keep running in the user's threads). Nothing
// when the system has no thread left. `name` shows in debuggers and `top -H`, 15 characters at
// most.
[[nodiscard]] std::optional<std::thread> start_thread(const char* name, std::function<void()> body);

// CPU time that a running thread has used so far.
[[nodiscard]] double cpu_seconds(std::thread& thread) noexcept;
[[nodiscard]] double cpu_seconds_of_this_thread() noexcept;

}  // namespace tensorferry::os
