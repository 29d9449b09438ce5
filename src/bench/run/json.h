// JSON whose members keep their order.
#pragma once

#include <nlohmann/json.hpp>

namespace tensorferry::bench {

using Json = nlohmann::ordered_json;

}  // namespace tensorferry::bench
