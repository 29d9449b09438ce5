#include "cli/python_program.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "bench/run/process.h"

namespace tensorferry::cli {

namespace {

// Catches the ImportError, so that a person without the package reads one line, not a traceback.
constexpr const char* starter = R"(
import sys
command, install = sys.argv[1:3]
try:
    from {} import main
except ImportError as error:
    sys.exit("tensorferry %s: %s: the Python package does this; to install it, run "
             "`%s -m pip install %s` in a checkout" % (command, error, sys.executable, install))
except KeyboardInterrupt:
    sys.exit("tensorferry %s: interrupted" % command)
sys.exit(main(sys.argv[3:]))
)";

std::string python() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = self.parent_path() / "python3";
  return !error && access(beside.c_str(), X_OK) == 0 ? beside.string() : "python3";
}

std::vector<std::string> words_of(const PythonProgram& program,
                                  const std::vector<std::string>& arguments) {
  std::vector<std::string> words{python(), "-c", fmt::format(starter, program.module),
                                 program.command, program.install};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

}  // namespace

int run_to_end(const PythonProgram& program, const std::vector<std::string>& arguments,
               const std::string& output) {
  return bench::run_process(words_of(program, arguments), output);
}

void become(const PythonProgram& program, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = words_of(program, arguments);
  execvp(words.front().c_str(), bench::pointers_to(words).data());
  throw std::system_error(errno, std::generic_category(),
                          fmt::format("tensorferry {} needs Python, but cannot start {}",
                                      program.command, words.front()));
}

}  // namespace tensorferry::cli
