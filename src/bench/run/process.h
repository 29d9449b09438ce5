// Other programs.
#pragma once

#include <string>
#include <vector>

namespace tensorferry::bench {

// Runs a program, found on the path, to its end, with stdout and stderr in a file. Returns its exit
// status; 128 + the signal if one ended it, 127 if it could not be started. On an interrupt it is
// asked to end, waited for, and Interrupted is thrown.
[[nodiscard]] int run_process(const std::vector<std::string>& words,
                              const std::string& output = "/dev/null");

// In a process that this program started itself by run_process: ask for SIGTERM when that one ends,
// however it does. Anywhere else it does nothing.
void end_with_parent();

// The words as a line for a shell.
[[nodiscard]] std::string shell_line(const std::vector<std::string>& words);

}  // namespace tensorferry::bench
