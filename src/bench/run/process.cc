#include "bench/run/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "bench/run/interrupt.h"

namespace tensorferry::bench {

namespace {

// Descriptors of the other program; this one does not print.
constexpr int its_input = 0;
constexpr int its_output = 1;
constexpr int its_errors = 2;

constexpr int exit_not_started = 127;
constexpr int exit_by_signal = 128;

class SpawnSettings {
 public:
  explicit SpawnSettings(const std::string& output) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawn_file_actions_addopen(&actions_, its_input, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, its_output, output.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0666);
    posix_spawn_file_actions_adddup2(&actions_, its_output, its_errors);
    posix_spawnattr_init(&attributes_);
    // Children must not ignore the signals that this process ignores.
    sigset_t usual;
    sigemptyset(&usual);
    for (const int one : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) sigaddset(&usual, one);
    posix_spawnattr_setsigdefault(&attributes_, &usual);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnSettings() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  [[nodiscard]] int spawn(pid_t& child, char* const* words) const {
    return posix_spawnp(&child, words[0], &actions_, &attributes_, words, environ);
  }

 private:
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

// Polls, because a signal that arrives just before waitpid() would not end the wait.
int wait_for(pid_t child) {
  int status = 0;
  bool asked = false;
  timespec turn{.tv_sec = 0, .tv_nsec = 1'000'000};
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (interrupted() && !asked) {
      kill(child, SIGTERM);
      asked = true;
    }
    nanosleep(&turn, nullptr);
  }
  return status;
}

}  // namespace

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

int run_process(const std::vector<std::string>& words, const std::string& output) {
  std::vector<std::string> copies = words;
  pid_t child = 0;
  if (SpawnSettings(output).spawn(child, pointers_to(copies).data()) != 0) return exit_not_started;
  const int status = wait_for(child);
  check_interrupt();
  return WIFEXITED(status) ? WEXITSTATUS(status) : exit_by_signal + WTERMSIG(status);
}

void end_with_parent() {
  const pid_t parent = getppid();
  std::error_code error;
  const std::string program = "/proc/" + std::to_string(parent) + "/exe";
  if (!std::filesystem::equivalent(program, "/proc/self/exe", error)) return;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) raise(SIGTERM);  // it has ended meanwhile
}

std::string shell_line(const std::vector<std::string>& words) {
  constexpr std::string_view plain = "+,-./:=@_";
  std::string line;
  for (const std::string& word : words) {
    if (!line.empty()) line += ' ';
    const bool safe = !word.empty() && std::ranges::all_of(word, [&](unsigned char c) {
      return std::isalnum(c) != 0 || plain.find(static_cast<char>(c)) != std::string_view::npos;
    });
    if (safe) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char c : word) line += c == '\'' ? "'\\''" : std::string(1, c);
    line += '\'';
  }
  return line;
}

}  // namespace tensorferry::bench
