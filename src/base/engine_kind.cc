#include <array>
#include <cerrno>
#include <string>

#include "tensorferry/error.h"
#include "tensorferry/options.h"

namespace tensorferry {

namespace {
constexpr std::array<std::string_view, 5> engine_names{"auto", "io_uring", "libaio", "threads",
                                                       "gds"};
constexpr std::array<std::string_view, 3> polling_names{"off", "submission", "completion"};
}  // namespace

std::string_view to_string(EngineKind kind) noexcept {
  return engine_names.at(static_cast<std::size_t>(kind));
}

EngineKind parse_engine_kind(std::string_view text) {
  for (std::size_t i = 0; i < engine_names.size(); ++i) {
    if (engine_names.at(i) == text) return static_cast<EngineKind>(i);
  }
  throw Error({.operation = "engine",
               .code = EINVAL,
               .hint = "no engine is called \"" + std::string(text) +
                       "\"; choose auto, io_uring, libaio, threads or gds"});
}

std::string_view to_string(Polling polling) noexcept {
  return polling_names.at(static_cast<std::size_t>(polling));
}

Polling parse_polling(std::string_view text) {
  for (std::size_t i = 0; i < polling_names.size(); ++i) {
    if (polling_names.at(i) == text) return static_cast<Polling>(i);
  }
  throw Error({.operation = "polling",
               .code = EINVAL,
               .hint = "no polling is called \"" + std::string(text) +
                       "\"; choose off, submission or completion"});
}

}  // namespace tensorferry
