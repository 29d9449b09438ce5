// Commands that the Python package carries out.
#pragma once

#include <string>
#include <vector>

namespace tensorferry::cli {

struct PythonProgram {
  std::string command;  // "report": for messages
  std::string module;   // of the package: it has main(arguments), which returns the exit status
  std::string install;  // what pip installs to get it: "'.[report]'"
};

// Becomes that program, with these arguments: returns only by std::system_error, if Python cannot
// start. Runs the Python beside this command, else the first one on the PATH.
[[noreturn]] void become(const PythonProgram& program, const std::vector<std::string>& arguments);

// Runs that program to its end, with what it says in a file. Returns its exit status, as
// bench::run_process() does.
[[nodiscard]] int run_to_end(const PythonProgram& program,
                             const std::vector<std::string>& arguments, const std::string& output);

}  // namespace tensorferry::cli
