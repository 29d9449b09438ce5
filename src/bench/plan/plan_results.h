// A plan as JSON, for --json and `tensorferry report`; costs from JSON and back.
#pragma once

#include <string>
#include <vector>

#include "bench/plan/choices.h"
#include "bench/run/json.h"

namespace tensorferry::bench {

[[nodiscard]] Json to_json(const Task& task);
[[nodiscard]] Json to_json(const Machine& machine);
[[nodiscard]] Json to_json(const Costs& costs);
[[nodiscard]] Json to_json(const Settings& settings);
[[nodiscard]] Json to_json(const Choice& choice);
[[nodiscard]] Json to_json(const Change& change);
[[nodiscard]] Json to_json(const WithDrives& with_drives);

// Costs of a file that `tensorferry plan --check DIR --json FILE` wrote, or of its member "costs":
// what it lacks keeps the value of `costs`. Throws Error (EBADMSG) for other members and for what
// is no number of at least 0.
void take_costs(Costs& costs, const Json& json, const std::string& path);

}  // namespace tensorferry::bench
