// Runs a part of a test in a child process: a part that cannot be undone (seccomp, limits), may
// hang or ends the process.
#pragma once

#include <chrono>
#include <functional>
#include <iosfwd>
#include <string>

namespace tensorferry::support {

struct ChildResult {
  bool hung = false;   // was killed because it did not end within the limit
  int exit_code = -1;  // -1 unless it exited
  int signal = 0;      // the signal that ended it
  std::string text;    // the complaint that the body returned

  [[nodiscard]] bool passed() const noexcept { return exit_code == 0 && text.empty(); }
};

std::ostream& operator<<(std::ostream& out, const ChildResult& result);

// Forks and runs `body` in the child. It returns a complaint, or "" if all is well; an exception
// becomes a complaint. The child ends with _exit() after the body; the body may call exit() itself.
// Kills a child that does not end within `limit`.
[[nodiscard]] ChildResult run_in_child(const std::function<std::string()>& body,
                                       std::chrono::seconds limit = std::chrono::seconds(60));

// For use in run_in_child(), by root: makes this process an ordinary user, or takes /proc from it.
// Returns "", or why that failed.
[[nodiscard]] std::string become_nobody();
[[nodiscard]] std::string hide_proc();

}  // namespace tensorferry::support
