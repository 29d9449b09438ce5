// A part of a test in a process of its own: for what cannot be undone (seccomp, limits), for what
// may hang and for what ends the process.
#pragma once

#include <chrono>
#include <functional>
#include <iosfwd>
#include <string>

namespace tensorferry::support {

struct ChildResult {
  bool hung = false;   // did not end within the limit and was killed
  int exit_code = -1;  // -1 unless it exited
  int signal = 0;      // that ended it
  std::string text;    // what the body returned

  [[nodiscard]] bool passed() const noexcept { return exit_code == 0 && text.empty(); }
};

std::ostream& operator<<(std::ostream& out, const ChildResult& result);

// Forks and runs `body` in the child. What it returns is its complaint: empty means that all was
// well. An exception becomes a complaint. The child ends with _exit() after the body; a body that
// calls exit() itself is fine too. A child that does not end within `limit` is killed.
[[nodiscard]] ChildResult run_in_child(const std::function<std::string()>& body,
                                       std::chrono::seconds limit = std::chrono::seconds(60));

// For use in run_in_child(), by root: from now on this process is an ordinary user, or has no
// /proc. Empty, or why it could not be done.
[[nodiscard]] std::string become_nobody();
[[nodiscard]] std::string hide_proc();

}  // namespace tensorferry::support
