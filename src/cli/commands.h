// One function per command, which adds the command and its arguments to the program.
#pragma once

#include "cli/arguments.h"

namespace tensorferry::cli {

[[nodiscard]] Command add_bench(CLI::App& program);
[[nodiscard]] Command add_sweep(CLI::App& program);
[[nodiscard]] Command add_point(CLI::App& program);
[[nodiscard]] Command add_tune(CLI::App& program);
[[nodiscard]] Command add_doctor(CLI::App& program);
[[nodiscard]] Command add_plan(CLI::App& program);
[[nodiscard]] Command add_verify(CLI::App& program);
[[nodiscard]] Command add_checkpoint(CLI::App& program);
[[nodiscard]] Command add_snapshot(CLI::App& program);
[[nodiscard]] Command add_report(CLI::App& program);
[[nodiscard]] Command add_completion(CLI::App& program);

// What a command prints about the results file that it wrote.
[[nodiscard]] std::string results_line(const std::string& path);

}  // namespace tensorferry::cli
