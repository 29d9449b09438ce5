// Parses arguments: `-` and `_` alike, sizes, and suggestions for misspelt names.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tensorferry/options.h"

namespace tensorferry::cli {

inline constexpr int exit_ok = 0;
inline constexpr int exit_failed = 1;
inline constexpr int exit_usage = 2;

// A command: its arguments, and a function that runs it after parsing. `run` returns the exit
// status. main() prints its exceptions and returns exit_failed.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

// The arguments with `-` for `_` in the names of flags. Values do not change.
[[nodiscard]] std::vector<std::string> normalize(const std::vector<std::string>& arguments);

// The arguments of this process after the name of the command, for the results file.
[[nodiscard]] std::vector<std::string> own_arguments();

// The known name nearest to the unknown one; empty if none is near.
[[nodiscard]] std::string nearest(const std::string& unknown,
                                  const std::vector<std::string>& known);

// The long flags of a command: "--engine".
[[nodiscard]] std::vector<std::string> flags_of(const CLI::App& app);

// An option that takes a size (4K, 2M, 1G), or several.
CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& bytes,
                      const std::string& description);
CLI::Option* add_sizes(CLI::App& app, const std::string& name, std::vector<std::uint64_t>& bytes,
                       const std::string& description);

// An option that takes a whole number from `min` to `max`.
CLI::Option* add_count(CLI::App& app, const std::string& name, unsigned& value, unsigned min,
                       unsigned max, const std::string& description);

// --engine auto|io_uring|libaio|threads|gds.
CLI::Option* add_engine(CLI::App& app, EngineKind& engine);
// --polling off|submission|completion.
CLI::Option* add_polling(CLI::App& app, Polling& polling);

}  // namespace tensorferry::cli
