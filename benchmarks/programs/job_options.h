// One job of ferry_job, and how to parse it from the command line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensorferry/tensorferry.h"

enum class Direction { read, write };
enum class Mode { one, sync, path, many, queue, drives, swap };
enum class MemoryKind { pinned, ordinary, fresh };
enum class FileState { existing, created };

struct Job {
  std::vector<std::string> paths;  // files, or directories (swap); most modes have one
  Direction direction = Direction::read;
  Mode mode = Mode::one;
  MemoryKind memory = MemoryKind::pinned;
  FileState file_state = FileState::existing;
  // Of an operation, or of each file (drives); the last one also counts for the files after it.
  std::vector<std::size_t> sizes;
  std::size_t file_bytes = 0;  // 0: as many as the job needs
  std::uint64_t offset = 0;    // of the first byte (one)
  std::size_t count = 1000;    // per thread (sync, path, queue), tensors (many, swap)
  unsigned threads = 1;        // that work at the same time (one, sync, path, queue)
  unsigned in_flight = 64;     // operations of a thread (queue)
  std::size_t piece_bytes = std::size_t{8} << 20;  // of one operation (drives)
  std::string beside;  // a file that another thread reads without a pause (drives)
  unsigned repeat = 1;
  unsigned warm_up = 2;  // untimed repetitions
  std::uint64_t seed = 1;
  bool beside_copies = false;  // another thread copies as many bytes meanwhile (one)
  bool wait_to_start = false;  // print "ready" before the timed repetitions and wait for a line
  tensorferry::HandleOptions options;

  [[nodiscard]] const std::string& path() const { return paths.front(); }
  [[nodiscard]] std::size_t bytes() const { return bytes_of(0); }
  [[nodiscard]] std::size_t bytes_of(std::size_t file) const {
    return sizes.empty() ? std::size_t{256} << 20 : sizes[std::min(file, sizes.size() - 1)];
  }
};

extern const char usage[];

// Returns nothing if the options make no job. Throws std::invalid_argument for a wrong value.
std::optional<Job> parse(int argument_count, char** arguments);
