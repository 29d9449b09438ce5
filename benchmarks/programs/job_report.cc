#include "job_report.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace {

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string list(const std::vector<double>& values) {
  std::string out = "[";
  for (const double value : values) out += (out.size() > 1 ? ", " : "") + number(value);
  return out + "]";
}

std::string stats_json(const tensorferry::Stats& stats) {
  std::string out = "{";
  const auto add = [&out](const char* name, std::uint64_t value) {
    out += json_text(name) + ": " + std::to_string(value) + ", ";
  };
  for (const auto& counter : tensorferry::stats_counters) add(counter.name, stats.*counter.value);
  add("latency_ns_p50", stats.latency_ns_p50);
  add("latency_ns_p99", stats.latency_ns_p99);
  out += "\"fallback_reasons\": [";
  for (std::size_t i = 0; i < stats.fallback_reasons.size(); ++i) {
    out += (i > 0 ? ", " : "") + json_text(stats.fallback_reasons[i]);
  }
  return out + "], \"cpu_seconds\": " + number(stats.cpu_seconds) + "}";
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

}  // namespace

void print(Result& result) {
  const auto repetitions = static_cast<double>(result.seconds.size());
  const double gigabytes = static_cast<double>(result.bytes_per_repetition) * repetitions / 1e9;
  const double operations = static_cast<double>(result.operations_per_repetition) * repetitions;
  std::string out =
      "{\"engine\": " + json_text(result.engine) +
      ", \"engine_reason\": " + json_text(result.engine_reason) +
      ", \"direct\": " + (result.direct ? "true" : "false") +
      ", \"direct_reason\": " + json_text(result.direct_reason) +
      ", \"request_bytes\": " + std::to_string(result.request_bytes) +
      ", \"queue_depth\": " + std::to_string(result.queue_depth) +
      ", \"bytes\": " + std::to_string(result.bytes_per_repetition) +
      ", \"seconds\": " + list(result.seconds) + ", \"cpu_seconds\": " + list(result.cpu_seconds) +
      ", \"gb_per_second\": " + number(gigabytes / sum(result.seconds)) +
      ", \"cpu_seconds_per_gb\": " + number(sum(result.cpu_seconds) / gigabytes) +
      ", \"context_switches\": " + list(result.context_switches) +
      ", \"context_switches_per_operation\": " + number(sum(result.context_switches) / operations);
  if (std::vector<double>& calls = result.call_seconds; !calls.empty()) {
    std::sort(calls.begin(), calls.end());
    out += ", \"call_us\": {\"mean\": " +
           number(sum(calls) * 1e6 / static_cast<double>(calls.size())) +
           ", \"p50\": " + number(calls[calls.size() / 2] * 1e6) +
           ", \"p99\": " + number(calls[calls.size() * 99 / 100] * 1e6) + "}" +
           ", \"open_close_us\": " + number(result.open_close_seconds * 1e6);
  }
  if (result.end_ns != 0) out += ", \"end_ns\": " + std::to_string(result.end_ns);
  if (!result.resident_kib.empty()) {
    out += ", \"resident_kib\": " + list(result.resident_kib) +
           ", \"descriptors\": " + list(result.descriptors);
  }
  std::printf("%s, \"stats\": %s}\n", out.c_str(), stats_json(result.stats).c_str());
}
