#include "bench/measure/point.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "bench/run/interrupt.h"
#include "bench/run/scratch.h"
#include "bench/run/sizes.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

// Larger transfers use the same memory several times.
constexpr std::uint64_t memory_bytes_max = GiB;
constexpr std::uint64_t warm_up_bytes_max = 16 * MiB;

const char* overlap_text(const Point& point) {
  return point.overlap == Overlap::on ? "overlap" : "sequential";
}

const char* submit_text(const Point& point) {
  return point.submit == Submit::single ? "single" : "block";
}

// Returns its last operation.
Operation move_all(Handle& handle, Direction direction, std::span<std::byte> memory,
                   const File& file, std::uint64_t bytes) {
  std::vector<Operation> operations;
  for (std::uint64_t at = 0; at < bytes; at += memory.size()) {
    const std::size_t length = std::min<std::uint64_t>(memory.size(), bytes - at);
    operations.push_back(start(handle, direction, memory.first(length), file, at));
  }
  for (const Operation& operation : operations) finish(operation);
  return operations.back();
}

// Never changes a file that it only reads.
void check_long_enough(const std::string& path, std::uint64_t bytes) {
  const std::uint64_t size = File::open(path, Access::read).size();
  if (size >= bytes) return;
  throw Error({.operation = "read",
               .path = path,
               .offset = 0,
               .length = bytes,
               .code = ENODATA,
               .hint = "the file has " + rounded_size(size) + ", but --io_size is " +
                       rounded_size(bytes) + "; choose a smaller --io_size or a larger file"});
}

void fill_up(const std::string& path, std::uint64_t bytes, EngineKind engine) {
  namespace fs = std::filesystem;
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  const std::uint64_t there = error ? 0 : size;
  const std::string directory = fs::path(path).parent_path().string();
  if (there < bytes) check_space(directory.empty() ? "." : directory, bytes - there);
  extend(File::open(path, Access::write), bytes, data_seed, engine);
}

}  // namespace

HandleOptions to_options(const Point& point) {
  HandleOptions options;
  options.engine = point.engine;
  options.block_bytes = point.block_bytes;
  options.queue_depth = point.queue_depth;
  options.workers = point.workers;
  options.submit = point.submit;
  options.overlap = point.overlap;
  options.polling = point.polling;
  return options;
}

Json to_json(const Point& point) {
  return {{"block_bytes", point.block_bytes},
          {"queue_depth", point.queue_depth},
          {"overlap", overlap_text(point)},
          {"workers", point.workers},
          {"submit", submit_text(point)}};
}

std::string log_name(Direction direction, const Point& point) {
  return fmt::format("{}_{}_{}_t1_p{}_d{}_bs{}.txt", to_string(direction), submit_text(point),
                     overlap_text(point), point.workers, point.queue_depth,
                     size_text(point.block_bytes));
}

PointResult run_point(const Point& point, Direction direction, const std::string& path,
                      std::uint64_t bytes, unsigned loops) {
  const Access access = direction == Direction::read ? Access::read : Access::write;
  if (direction == Direction::read) {
    check_long_enough(path, bytes);
  } else {
    fill_up(path, bytes, point.engine);
  }
  FilledMemory memory(point.memory, std::min(bytes, memory_bytes_max), data_seed);
  memory.load_from(path);
  Handle handle(to_options(point));
  const Operation first = move_all(handle, direction, memory.bytes(), File::open(path, access),
                                   std::min(bytes, warm_up_bytes_max));

  PointResult result;
  result.engine = first.engine();
  result.engine_reason = first.engine_reason();
  for (unsigned i = 0; i < loops; ++i) {
    const auto opened = Clock::now();
    auto begin = opened;
    auto end = opened;
    {
      const File file = File::open(path, access);
      begin = Clock::now();
      (void)move_all(handle, direction, memory.bytes(), file, bytes);
      end = Clock::now();
      result.direct = file.direct();
    }
    result.transfer_seconds.push_back(seconds_between(begin, end));
    result.seconds.push_back(seconds_between(opened, Clock::now()));
  }
  return result;
}

}  // namespace tensorferry::bench
