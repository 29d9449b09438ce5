// Any JSON in a file is read as a space, an earlier sweep or a configuration, or refused with an
// Error.
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

#include "bench/measure/sweep.h"
#include "bench/measure/tune.h"
#include "bench/run/results.h"
#include "fuzz/promise.h"
#include "support/temp_dir.h"
#include "tensorferry/error.h"

using namespace tensorferry;
using bench::Json;

namespace {

// Returns the result of the action, or nothing if it throws an Error. Other exceptions stop the
// fuzzer.
template <class Action>
auto unless_refused(Action action) -> std::optional<decltype(action())> {
  try {
    return action();
  } catch (const Error&) {
    return {};
  }
}

void check_space(const Json& json) {
  const auto space = unless_refused([&json] { return bench::parse_space(json); });
  if (!space) return;
  const Json written = bench::to_json(*space);
  fuzz::promise(bench::to_json(bench::parse_space(written)) == written,
                "a space is written as it is read");
}

void check_earlier(const Json& json) {
  const auto earlier = bench::earlier_sweep(json);
  if (!earlier) return;
  fuzz::promise(earlier->points.size() == json.at("points").size(), "all points are read");
  for (const bench::EarlierSweep::Entry& point : earlier->points) {
    (void)bench::to_csv(Json::array({point.entry}));
    (void)bench::describes(point.entry, bench::Job{});
  }
}

void check_config(const std::string& path, const Json& json) {
  const auto written = unless_refused([&path] {
    bench::write_config(path, bench::Point{});
    return bench::read_json(path);
  });
  if (!written) return;
  for (const auto& [key, value] : json.items()) {
    fuzz::promise(key == "aio" || written->at(key) == value, "the rest of a configuration stays");
  }
  const Json settings = bench::aio_block(bench::Point{});
  for (const auto& [key, value] : settings.items()) {
    fuzz::promise(written->at("aio").at(key) == value, "the settings are in the configuration");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const support::TempDir folder;
  const std::string path = folder.file("any.json");
  std::ofstream(path, std::ios::trunc | std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  const auto json = unless_refused([&path] { return bench::read_json(path); });
  if (!json) return 0;
  check_space(*json);
  check_earlier(*json);
  check_config(path, *json);
  return 0;
}
