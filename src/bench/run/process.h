// Runs other programs.
#pragma once

#include <string>
#include <vector>

namespace tensorferry::bench {

// Runs a program, found on the PATH, to its end, with stdout and stderr in a file. Returns its exit
// status, 128 + the signal if one killed it, or 127 if it could not start. On an interrupt sends it
// SIGTERM, waits for it and throws Interrupted.
[[nodiscard]] int run_process(const std::vector<std::string>& words,
                              const std::string& output = "/dev/null");

// In a process that this program started by run_process: makes the kernel send it SIGTERM when its
// parent ends. Does nothing in any other process.
void end_with_parent();

// The words as execvp() takes them, with a null pointer at the end. They point into `words`.
[[nodiscard]] std::vector<char*> pointers_to(std::vector<std::string>& words);

// The words as a line for a shell.
[[nodiscard]] std::string shell_line(const std::vector<std::string>& words);

}  // namespace tensorferry::bench
