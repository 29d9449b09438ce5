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

}  // namespace tensorferry::cli
