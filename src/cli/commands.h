// One function per command, which adds the command and its arguments to the program.
#pragma once

#include "cli/arguments.h"

namespace tensorferry::cli {

[[nodiscard]] Command add_bench(CLI::App& program);
[[nodiscard]] Command add_sweep(CLI::App& program);
[[nodiscard]] Command add_point(CLI::App& program);
[[nodiscard]] Command add_tune(CLI::App& program);
[[nodiscard]] Command add_doctor(CLI::App& program);
[[nodiscard]] Command add_verify(CLI::App& program);
[[nodiscard]] Command add_report(CLI::App& program);
[[nodiscard]] Command add_completion(CLI::App& program);

}  // namespace tensorferry::cli
