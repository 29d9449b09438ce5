#include "handle/settings.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/alignment.h"
#include "files/device.h"
#include "os/system.h"

namespace tensorferry::handle {

namespace {

constexpr unsigned queue_depth_max = 4096;
constexpr unsigned workers_max = 256;
constexpr unsigned auto_queue_depth_min = 8;
constexpr unsigned auto_workers_max = 4;
constexpr double close_limit_seconds_max = 365.0 * 24 * 3600;

// What a lane has for small operations.
constexpr unsigned lane_queue_depth = 128;
constexpr unsigned lane_slots = 64;
constexpr std::size_t lane_slot_bytes = 32 * KiB;
constexpr unsigned lanes_min = 4;

constexpr std::size_t slot_shares = 16;
constexpr std::size_t slot_block_bytes_min = 64 * KiB;
constexpr std::size_t auto_slot_bytes = 64 * MiB;
constexpr std::size_t auto_slot_block_max = MiB;  // longer ones are no faster

Error refused(std::string why) {
  return Error({.operation = "open handle", .code = EINVAL, .hint = std::move(why)});
}

constexpr std::size_t slot_bytes_min(unsigned workers) noexcept {
  return slot_shares * slot_block_bytes_min * workers;
}

// How many bytes may be under way in the slots of all workers together. They should stay in the
// cache, which other work and landed blocks need too, but each disk must have enough to do.
std::size_t slot_bytes_in_flight(const Device& device, std::size_t slot_bytes) {
  return std::max(os::last_level_cache_bytes() / 2,
                  std::size_t{device.disks} * auto_queue_depth_min * slot_bytes);
}

MoverOptions lane_mover(const HandleOptions& options) noexcept {
  return {.queue_depth = options.queue_depth > 0 ? options.queue_depth : lane_queue_depth,
          .slot_block_bytes = lane_slot_bytes,
          .slots = lane_slots,
          .slot_bytes_in_flight = lane_slot_bytes * lane_slots};
}

// Lanes go by libaio: not if the user chose another engine. They do not measure what `overlap` and
// `submit` are there for.
unsigned lanes_of(const HandleOptions& options, EngineKind engine) noexcept {
  const bool chosen = options.engine == EngineKind::io_uring ||
                      options.engine == EngineKind::threads || engine == EngineKind::threads;
  const bool usual = options.overlap == Overlap::on && options.submit == Submit::batch;
  if (chosen || !usual || engines::moves_gpu_memory(engine)) return 0;
  return std::clamp(2 * std::thread::hardware_concurrency(), lanes_min, lanes_max);
}

}  // namespace

Status check_options(const HandleOptions& options) {
  const auto at_most = [](const std::string& what, std::size_t value, std::size_t max) {
    return refused(what + " is " + std::to_string(value) + " and must be at most " +
                   std::to_string(max));
  };
  if (options.queue_depth > queue_depth_max) {
    return at_most("queue_depth", options.queue_depth, queue_depth_max);
  }
  if (options.workers > workers_max) return at_most("workers", options.workers, workers_max);
  if (options.block_bytes > GiB) return at_most("block_bytes", options.block_bytes, GiB);
  const unsigned workers = std::max(options.workers, auto_workers_max);
  const std::size_t needed = slot_bytes_min(workers);
  if (options.slot_bytes > 0 && options.slot_bytes < needed) {
    return refused("slot_bytes is " + std::to_string(options.slot_bytes) +
                   " and must be at least " + std::to_string(needed) + " for " +
                   std::to_string(workers) + " workers");
  }
  if (options.polling != Polling::off && options.engine != EngineKind::automatic &&
      options.engine != EngineKind::io_uring) {
    return refused("polling is " + std::string(to_string(options.polling)) + " and the engine is " +
                   std::string(to_string(options.engine)) + "; only io_uring polls");
  }
  const double limit = options.close_limit_seconds;
  const bool is_valid = limit > 0 && limit <= close_limit_seconds_max;  // false for NaN
  if (!is_valid) {
    return refused("close_limit_seconds is " + std::to_string(limit) +
                   " and must be more than 0 and at most a year");
  }
  return Nothing{};
}

Status check_polling(const HandleOptions& options, const Device& device) {
  if (options.polling != Polling::completion || device.polled_queues) return Nothing{};
  const std::string name = device.name.empty() ? "what is below the file" : device.name;
  return Error({.operation = "poll for completions",
                .path = device.name.empty() ? "" : "/dev/" + device.name,
                .code = EOPNOTSUPP,
                .hint = name + " has no polled queues; for NVMe set nvme.poll_queues on the "
                               "kernel's command line, or open the handle without polling"});
}

bool cuts_small_transfers(const HandleOptions& options) noexcept {
  return options.block_bytes == 0 && options.overlap == Overlap::on &&
         (options.queue_depth == 0 || options.queue_depth >= 4);
}

std::size_t slot_bytes_of(const HandleOptions& options, SlotShares shares) noexcept {
  const std::size_t automatic = std::max(auto_slot_bytes, slot_bytes_min(options.workers));
  return (options.slot_bytes > 0 ? options.slot_bytes : automatic) / slot_shares *
         static_cast<std::size_t>(shares);
}

std::uint64_t inline_uncut_bytes_max(const HandleOptions& options) noexcept {
  return cuts_small_transfers(options) ? cut_bytes_min : MiB;
}

CrewOptions crew_options(const HandleOptions& options, EngineKind engine, const Device& device,
                         SlotShares shares) {
  const unsigned processors = std::max(std::thread::hardware_concurrency() / 2, 1U);
  const unsigned workers = options.workers > 0 ? options.workers
                           : device.profile
                               ? device.profile->workers
                               : std::min({device.disks, processors, auto_workers_max});
  // The depth from sysfs is for all workers together.
  const unsigned depth = options.queue_depth > 0 ? options.queue_depth
                         : device.profile
                             ? device.profile->queue_depth
                             : std::max(device.queue_depth / workers, auto_queue_depth_min);
  // Slots lie in huge pages. A profile has the block size for memory in place, which may be more.
  const std::size_t wanted =
      options.block_bytes > 0
          ? align_up(options.block_bytes, page_bytes())
          : std::min(files::preferred_block_bytes(device, files::Pages::huge), auto_slot_block_max);
  const bool in_cache = options.slot_bytes == 0 && options.overlap == Overlap::on;
  const std::size_t slot_bytes = slot_bytes_of(options, shares);
  const std::size_t budget = slot_bytes / workers;
  const std::size_t slot =
      std::max(slot_block_bytes_min, align_down(std::min(wanted, budget / 2), page_bytes()));
  const MoverOptions mover{
      .queue_depth = depth,
      .submit = options.submit,
      .slot_block_bytes = slot,
      .slots = static_cast<unsigned>(std::clamp<std::size_t>(budget / slot, 1, depth + reap_batch)),
      .slot_bytes_in_flight = in_cache ? slot_bytes_in_flight(device, slot) / workers : slot_bytes,
      .numa_node = device.numa_node};
  return {.engine = engine,
          .workers = workers,
          .overlap = options.overlap,
          .mover = mover,
          .lane_mover = lane_mover(options),
          .lanes = lanes_of(options, engine),
          .close_limit = std::chrono::duration_cast<std::chrono::nanoseconds>(
              std::chrono::duration<double>(options.close_limit_seconds)),
          .governor = &Governor::of(device.number)};
}

ProcessShare take_share(CrewOptions& crew, const HandleOptions& options, ProcessLimits& limits) {
  const std::size_t slot = crew.mover.slot_block_bytes;
  const std::size_t wanted = crew.mover.slots * slot;
  ProcessShare share(limits, crew.workers, options.workers > 0 ? crew.workers : 1, wanted,
                     options.slot_bytes > 0 ? wanted : slot);
  crew.workers = share.workers();
  crew.mover.slots = static_cast<unsigned>(share.slot_bytes() / crew.workers / slot);
  return share;
}

}  // namespace tensorferry::handle
