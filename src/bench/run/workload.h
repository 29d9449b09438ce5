// The parts of every measurement: memory and files with data, engines, clocks.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensorferry/error.h"
#include "tensorferry/file.h"
#include "tensorferry/gpu.h"
#include "tensorferry/handle.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::bench {

using Clock = std::chrono::steady_clock;

[[nodiscard]] inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// User and system time of this process, including its kernel threads.
[[nodiscard]] double process_cpu_seconds();

enum class Direction : std::uint8_t { read, write };
[[nodiscard]] std::string_view to_string(Direction direction) noexcept;

// Page-locked; ordinary, as torch allocates it (touched, on a multiple of 64 bytes); or of the
// first GPU.
enum class MemoryKind : std::uint8_t { pinned, pageable, gpu };
[[nodiscard]] std::string_view to_string(MemoryKind kind) noexcept;

// Memory of a kind, filled with random bytes. Memory of a GPU gets them by load_from().
class FilledMemory {
 public:
  // Throws Error (ENODEV, ENOMEM) if the GPU or its memory is not available.
  FilledMemory(MemoryKind kind, std::size_t bytes, std::uint64_t seed);

  // Fills memory of a GPU from a file of random bytes. Leaves other memory unchanged.
  void load_from(const std::string& path);

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return bytes_; }

  // Why the memory is not page-locked; empty if it is.
  [[nodiscard]] const std::string& lock_problem() const noexcept { return lock_problem_; }

 private:
  std::string lock_problem_ = "ordinary memory was requested";
  std::optional<PinnedBuffer> pinned_;
  std::optional<GpuBuffer> gpu_;
  std::vector<std::byte> pageable_;
  std::span<std::byte> bytes_;
};

// For data that need not differ from run to run.
inline constexpr std::uint64_t data_seed = 1;

// Every engine, in the order in which `auto` tries them.
inline constexpr std::array all_engines{EngineKind::io_uring, EngineKind::libaio,
                                        EngineKind::threads};

// Why an engine does not work here; nothing if it does.
[[nodiscard]] std::optional<Error> try_engine(EngineKind engine);

// Called from time to time with the bytes moved so far.
using Watch = std::function<void(std::uint64_t bytes)>;

// Queues a transfer of all of `memory`.
[[nodiscard]] Operation start(Handle& handle, Direction direction, std::span<std::byte> memory,
                              const File& file, std::uint64_t offset);

// Appends random bytes until the file has `bytes`, and makes them durable.
void extend(const File& file, std::uint64_t bytes, std::uint64_t seed, EngineKind engine);

}  // namespace tensorferry::bench
