#include "support/child.h"

#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <ostream>
#include <system_error>
#include <thread>

namespace tensorferry::support {

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void live(const std::function<std::string()>& body, int pipe) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string text;
  try {
    text = body();
  } catch (const std::exception& problem) {
    text = std::string("threw: ") + problem.what();
  } catch (...) {
    text = "threw something other than a std::exception";
  }
  std::size_t at = 0;
  while (at < text.size()) {
    const ssize_t put = ::write(pipe, text.data() + at, text.size() - at);
    if (put <= 0) break;
    at += static_cast<std::size_t>(put);
  }
  std::fflush(nullptr);
  ::_exit(text.empty() ? 0 : 1);
}

// Reads the pipe until its end or the deadline. A grandchild may hold the pipe open, so the caller
// looks for the end of the child too.
void collect(int pipe, std::string& text, std::chrono::milliseconds wait) {
  struct pollfd ready{pipe, POLLIN, 0};
  if (::poll(&ready, 1, static_cast<int>(wait.count())) <= 0) return;
  std::array<char, 4096> chunk{};
  const ssize_t got = ::read(pipe, chunk.data(), chunk.size());
  if (got > 0) text.append(chunk.data(), static_cast<std::size_t>(got));
  if (got == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

ChildResult run_in_child(const std::function<std::string()>& body, std::chrono::seconds limit) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (child == 0) {
    ::close(pipe[0]);
    live(body, pipe[1]);
  }
  ::close(pipe[1]);

  ChildResult result;
  int status = 0;
  const Clock::time_point deadline = Clock::now() + limit;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline) {
      result.hung = true;
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      break;
    }
    collect(pipe[0], result.text, std::chrono::milliseconds(2));
  }
  for (std::size_t before = result.text.size() + 1; before != result.text.size();) {
    before = result.text.size();
    collect(pipe[0], result.text, std::chrono::milliseconds(0));
  }
  ::close(pipe[0]);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

std::string become_nobody() {
  constexpr uid_t nobody = 65534;
  if (::setgroups(0, nullptr) != 0 || ::setgid(nobody) != 0 || ::setuid(nobody) != 0) {
    return std::string("cannot become nobody: ") + std::strerror(errno);
  }
  return {};
}

std::string hide_proc() {
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", "/proc", "tmpfs", MS_RDONLY, nullptr) != 0) {
    return std::string("cannot hide /proc: ") + std::strerror(errno);
  }
  return {};
}

std::ostream& operator<<(std::ostream& out, const ChildResult& result) {
  if (result.hung) return out << "the child hung and was killed; it said: " << result.text;
  if (result.signal != 0) out << "signal " << result.signal << " ended the child";
  if (result.signal == 0) out << "the child exited with " << result.exit_code;
  return out << "; it said: " << result.text;
}

}  // namespace tensorferry::support
