// The results file that every measuring command writes. docs/results.md describes it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/run/json.h"
#include "bench/run/volume.h"

namespace tensorferry::bench {

inline constexpr int results_version = 1;

// What all results have in front: format, version, command, machine, places. `complete` is false
// until the command sets it.
[[nodiscard]] Json begin_results(const std::string& command,
                                 const std::vector<std::string>& arguments,
                                 std::span<const Volume> volumes);

// Throws Error where write_text() would, as far as that can be known.
void check_writable(const std::string& path);

// Replaces the file at once: readers see the old text or the new one. Links, pipes and files with
// several names are written in place. Throws Error.
void write_text(const std::string& path, const std::string& text);
void write_json(const std::string& path, const Json& json);

// Throws Error, also for a file that is not JSON (EBADMSG, with the place).
[[nodiscard]] Json read_json(const std::string& path);

}  // namespace tensorferry::bench
