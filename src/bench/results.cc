#include "bench/results.h"

#include <fmt/chrono.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "tensorferry/error.h"
#include "tensorferry/version.h"

namespace tensorferry::bench {

namespace {

Error failure(const char* operation, const std::string& path, int code, std::string hint = {}) {
  return Error({.operation = operation,
                .path = path,
                .offset = {},
                .length = {},
                .code = code != 0 ? code : EIO,
                .hint = std::move(hint)});
}

}  // namespace

Json begin_results(const std::string& command, const std::vector<std::string>& arguments,
                   std::span<const Place> places) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&now, &utc);
  Json results = {{"format", "tensorferry-results"},
                  {"version", results_version},
                  {"command", command},
                  {"arguments", arguments},
                  {"tensorferry", TENSORFERRY_VERSION},
                  {"started", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", utc)},
                  {"complete", false},
                  {"machine", machine_facts()},
                  {"places", Json::array()}};
  for (const Place& place : places) results["places"].push_back(to_json(place));
  return results;
}

Json to_json(const Summary& summary) {
  Json json = {{"mean", summary.mean},
               {"median", summary.median},
               {"standard_deviation", summary.standard_deviation},
               {"p50", summary.p50},
               {"p90", summary.p90},
               {"p99", summary.p99}};
  if (summary.ci95) json["ci95"] = {summary.ci95->low, summary.ci95->high};
  if (summary.p999) json["p999"] = *summary.p999;
  return json;
}

void write_text(const std::string& path, const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status before = fs::status(path, error);
  // A pipe or a terminal cannot be replaced; a link stays a link to the file that is.
  const bool replace = !fs::exists(before) || fs::is_regular_file(before);
  const fs::path canonical = fs::weakly_canonical(path, error);
  const std::string target = error ? path : canonical.string();
  const std::string fresh = replace ? target + ".new-" + std::to_string(getpid()) : path;
  errno = 0;
  std::ofstream out(fresh, std::ios::trunc);
  out << text;
  out.close();
  const int code = errno;
  if (!out) {
    if (replace) fs::remove(fresh, error);
    throw failure("write", path, code);
  }
  if (!replace) return;
  if (fs::exists(before)) fs::permissions(fresh, before.permissions(), error);
  fs::rename(fresh, target, error);
  if (!error) return;
  const int reason = error.value();
  fs::remove(fresh, error);
  throw failure("write", path, reason);
}

void write_json(const std::string& path, const Json& json) {
  write_text(path, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

Json read_json(const std::string& path) {
  errno = 0;
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || in.bad()) throw failure("read", path, errno);
  try {
    return Json::parse(text.str());
  } catch (const Json::parse_error& error) {
    throw failure("read", path, EBADMSG, error.what());
  }
}

}  // namespace tensorferry::bench
