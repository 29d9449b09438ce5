// The latency benchmark: writes and reads one tensor after the other and times each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/measure/statistics.h"
#include "bench/run/json.h"
#include "bench/run/volume.h"
#include "bench/run/workload.h"

namespace tensorferry::bench {

struct LatencyOptions {
  std::vector<std::uint64_t> sizes;
  unsigned iterations = 200;
  HandleOptions handle;
  MemoryKind memory = MemoryKind::pinned;
  std::uint64_t seed = 1;
};

// The proof that reads came from the drive.
struct ColdProof {
  std::uint64_t bytes = 0;                    // that we read
  std::optional<std::uint64_t> device_bytes;  // that the drive counted meanwhile
  std::uint64_t resident_pages = 0;           // of the file, just before
  bool cold = false;
  std::string words;
};

// All operations of one direction and size.
struct Series {
  Direction direction = Direction::read;
  std::uint64_t bytes = 0;
  std::string engine;
  std::string engine_reason;
  bool direct = false;
  bool locked = false;                  // whether the memory was page-locked
  std::vector<double> seconds;          // of each operation
  std::vector<double> started_seconds;  // since the series began
  double cpu_seconds = 0;
  std::optional<ColdProof> cold;  // of reads

  // Of the operations. summarize() fills them once at the end: sorting many samples takes long.
  Summary latency_seconds;
  Summary mb_per_second;

  void summarize();
  [[nodiscard]] double cpu_seconds_per_gb() const;
};

[[nodiscard]] Json to_json(const Series& series);

// The file that holds the tensors of one size, one after the other; at its end the benchmark starts
// again at its beginning. The constructor fills it with data, so that writes overwrite.
class LatencyFile {
 public:
  // Bytes of the file for tensors of this size.
  [[nodiscard]] static std::uint64_t file_bytes(const LatencyOptions& options,
                                                std::uint64_t tensor_bytes);

  LatencyFile(const LatencyOptions& options, std::uint64_t tensor_bytes, const std::string& path,
              const Volume& volume);
  ~LatencyFile();
  LatencyFile(const LatencyFile&) = delete;
  LatencyFile& operator=(const LatencyFile&) = delete;

  // Why the memory could not be page-locked; empty if it is.
  [[nodiscard]] const std::string& lock_problem() const { return memory_.lock_problem(); }

  // Runs all iterations and calls `watch` about ten times a second. Throws Error and Interrupted.
  [[nodiscard]] Series measure(Direction direction, const Watch& watch);

 private:
  void warm_up(Direction direction);
  [[nodiscard]] std::uint64_t offset_of(unsigned iteration) const;
  [[nodiscard]] ColdProof prove(std::uint64_t bytes, std::optional<std::uint64_t> device_before,
                                std::uint64_t resident_before) const;

  const LatencyOptions& options_;
  const std::uint64_t bytes_;
  const std::string path_;
  const Volume& volume_;
  File file_;
  FilledMemory memory_;
  Handle handle_;
};

}  // namespace tensorferry::bench
