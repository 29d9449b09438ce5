// The results file of every command that measures. docs/results.md describes it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/run/json.h"
#include "bench/run/volume.h"

namespace tensorferry::bench {

inline constexpr int results_version = 1;

// The members that all results begin with: format, version, command, machine, places. `complete` is
// false until the command sets it.
[[nodiscard]] Json begin_results(const std::string& command,
                                 const std::vector<std::string>& arguments,
                                 std::span<const Volume> volumes);

// Throws Error if write_text() would, as far as one can know before.
void check_writable(const std::string& path);

// Replaces the file in one step: readers see the old text or the new one. Writes links, pipes and
// files with several names in place. Throws Error.
void write_text(const std::string& path, const std::string& text);
void write_json(const std::string& path, const Json& json);

// Throws Error, also if the file is not JSON (EBADMSG, with the line).
[[nodiscard]] Json read_json(const std::string& path);

}  // namespace tensorferry::bench
