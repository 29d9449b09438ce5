// One job of ferry_job, and how to parse it from the command line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "tensorferry/tensorferry.h"

enum class Direction { read, write };
enum class Mode { one, sync, path, many, queue };
enum class MemoryKind { pinned, ordinary, fresh };
enum class FileState { existing, created };

struct Job {
  std::string path;
  Direction direction = Direction::read;
  Mode mode = Mode::one;
  MemoryKind memory = MemoryKind::pinned;
  FileState file_state = FileState::existing;
  std::size_t bytes = std::size_t{256} << 20;
  std::size_t file_bytes = 0;  // 0: as many as the job needs
  std::uint64_t offset = 0;    // of the first byte (one)
  std::size_t count = 1000;    // calls per repetition (sync, path, queue), tensors (many)
  unsigned threads = 1;        // that transfer at the same time, each its own bytes (one)
  unsigned repeat = 1;
  unsigned warm_up = 2;  // untimed repetitions
  std::uint64_t seed = 1;
  bool beside_copies = false;  // another thread copies as many bytes meanwhile (one)
  bool wait_to_start = false;  // print "ready" before the timed repetitions and wait for a line
  tensorferry::HandleOptions options;
};

extern const char usage[];

// Returns nothing if the options make no job. Throws std::invalid_argument for a wrong value.
std::optional<Job> parse(int argument_count, char** arguments);
