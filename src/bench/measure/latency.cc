#include "bench/measure/latency.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>

#include "bench/measure/statistics.h"
#include "bench/run/interrupt.h"
#include "bench/run/page_cache.h"
#include "bench/run/sizes.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

// Tensors spread over this many bytes: too many for a drive's own cache, too few to fill a disk.
constexpr std::uint64_t spread_bytes = 256 * MiB;
constexpr unsigned warm_up_operations = 2;
constexpr auto watch_interval = std::chrono::milliseconds(100);

}  // namespace

void Series::summarize() {
  std::vector<double> speeds;
  speeds.reserve(seconds.size());
  for (const double took : seconds) speeds.push_back(static_cast<double>(bytes) / 1e6 / took);
  latency_seconds = bench::summarize(seconds);
  mb_per_second = bench::summarize(speeds);
}

double Series::cpu_seconds_per_gb() const {
  const double moved = static_cast<double>(bytes) * static_cast<double>(seconds.size());
  return cpu_seconds / (moved / 1e9);
}

Json to_json(const Series& series) {
  Json json = {{"direction", to_string(series.direction)},
               {"bytes", series.bytes},
               {"engine", series.engine},
               {"engine_reason", series.engine_reason},
               {"direct", series.direct},
               {"locked", series.locked},
               {"latency_seconds", to_json(series.latency_seconds)},
               {"bandwidth_mb_per_second", to_json(series.mb_per_second)},
               {"cpu_seconds_per_gb", series.cpu_seconds_per_gb()}};
  if (series.cold) {
    Json cold = {{"bytes", series.cold->bytes}};
    if (series.cold->device_bytes) cold["device_bytes"] = *series.cold->device_bytes;
    cold["resident_pages"] = series.cold->resident_pages;
    cold["cold"] = series.cold->cold;
    cold["proof"] = series.cold->words;
    json["cold"] = std::move(cold);
  }
  json["seconds"] = series.seconds;
  json["started_seconds"] = series.started_seconds;
  return json;
}

std::uint64_t LatencyFile::file_bytes(const LatencyOptions& options, std::uint64_t tensor_bytes) {
  const std::uint64_t tensors =
      std::clamp<std::uint64_t>(spread_bytes / tensor_bytes, 1, options.iterations);
  return tensors * tensor_bytes;
}

LatencyFile::LatencyFile(const LatencyOptions& options, std::uint64_t tensor_bytes,
                         const std::string& path, const Volume& volume)
    : options_(options),
      bytes_(tensor_bytes),
      path_(path),
      volume_(volume),
      file_(File::open(path, Access::read_write)),
      memory_(options.memory, tensor_bytes, options.seed),
      handle_(options.handle) {
  const EngineKind engine = options.handle.engine;
  extend(file_, file_bytes(options, tensor_bytes), options.seed, engine);
  memory_.load_from(path);
}

LatencyFile::~LatencyFile() { unlink(path_.c_str()); }

std::uint64_t LatencyFile::offset_of(unsigned iteration) const {
  const std::uint64_t tensors = file_bytes(options_, bytes_) / bytes_;
  return iteration % std::max<std::uint64_t>(tensors, 1) * bytes_;
}

// Opens the rings and registers the memory, so that no latency includes it.
void LatencyFile::warm_up(Direction direction) {
  for (unsigned i = 0; i < warm_up_operations; ++i) {
    finish(start(handle_, direction, memory_.bytes(), file_, offset_of(i)));
  }
}

ColdProof LatencyFile::prove(std::uint64_t bytes, std::optional<std::uint64_t> device_before,
                             std::uint64_t resident_before) const {
  ColdProof proof{.bytes = bytes,
                  .device_bytes = {},
                  .resident_pages = resident_before,
                  .cold = false,
                  .words = {}};
  const auto device_after = bytes_read_by(volume_.device);
  if (device_before && device_after) proof.device_bytes = *device_after - *device_before;
  // A loop device counts every read, also one that its backing file serves from memory.
  const bool counts_drive = device_fact(volume_.device, "loop/dio") != "0";
  if (proof.device_bytes && *proof.device_bytes >= bytes && counts_drive) {
    proof.cold = true;
    proof.words = fmt::format("{} read {:.1f} MB for {:.1f} MB requested", volume_.device.name,
                              static_cast<double>(*proof.device_bytes) / 1e6,
                              static_cast<double>(bytes) / 1e6);
  } else if (!counts_drive) {
    proof.words = fmt::format("NOT proven: {} reads its backing file through the page cache",
                              volume_.device.name);
  } else if (resident_before == 0) {
    proof.cold = true;
    proof.words = "no page of the file was in memory before";
  } else {
    proof.words = fmt::format("NOT cold: {} pages of the file were in memory before ({})",
                              resident_before, volume_.file_system);
  }
  return proof;
}

Series LatencyFile::measure(Direction direction, const Watch& watch) {
  const bool buffered_read = direction == Direction::read && !file_.direct();
  warm_up(direction);
  finish(handle_.sync(file_));  // the page cache drops only durable pages
  drop_from_page_cache(path_);
  const std::uint64_t resident_before = resident_pages(path_);
  const auto device_before = bytes_read_by(volume_.device);

  Series series;
  series.direction = direction;
  series.bytes = bytes_;
  series.seconds.reserve(options_.iterations);
  series.started_seconds.reserve(options_.iterations);
  std::uint64_t resident_most = resident_before;
  const double cpu_before = process_cpu_seconds();
  const auto first = Clock::now();
  auto watched = first;
  for (unsigned i = 0; i < options_.iterations; ++i) {
    // A second pass through the page cache would be warm.
    if (buffered_read && i > 0 && offset_of(i) == 0) {
      drop_from_page_cache(path_);
      resident_most = std::max(resident_most, resident_pages(path_));
    }
    const auto begin = Clock::now();
    const Operation operation = start(handle_, direction, memory_.bytes(), file_, offset_of(i));
    finish(operation);
    const auto end = Clock::now();
    series.seconds.push_back(seconds_between(begin, end));
    series.started_seconds.push_back(seconds_between(first, begin));
    if (i == 0) {
      series.engine = operation.engine();
      series.engine_reason = operation.engine_reason();
    }
    if (end - watched >= watch_interval || i + 1 == options_.iterations) {
      watched = end;
      watch((i + 1) * bytes_);
    }
  }
  series.cpu_seconds = process_cpu_seconds() - cpu_before;
  series.summarize();
  series.direct = file_.direct();
  series.locked = memory_.lock_problem().empty();
  if (direction == Direction::read) {
    series.cold = prove(bytes_ * options_.iterations, device_before, resident_most);
  }
  return series;
}

}  // namespace tensorferry::bench
