// JSON as this project writes it: members in the order they were given.
#pragma once

#include <nlohmann/json.hpp>

namespace tensorferry::bench {

using Json = nlohmann::ordered_json;

}  // namespace tensorferry::bench
