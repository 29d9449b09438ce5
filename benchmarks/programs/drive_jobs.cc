#include "drive_jobs.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "job_setup.h"
#include "tensorferry/tensorferry.h"

using tensorferry::File;
using tensorferry::Handle;
using tensorferry::Operation;

namespace {

// One operation of run_drives().
struct Piece {
  File file;
  std::uint64_t offset = 0;
  std::span<std::byte> memory;
  double share = 0;  // of the bytes of its file that lie before it
};

std::vector<Piece> pieces_of(const Job& job, const std::vector<File>& files,
                             std::span<std::byte> memory) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::size_t bytes = job.bytes_of(i);
    for (std::size_t at = 0; at < bytes; at += job.piece_bytes) {
      const std::size_t length = std::min(job.piece_bytes, bytes - at);
      pieces.push_back({files[i], at, memory.subspan(at, length),
                        static_cast<double>(at) / static_cast<double>(bytes)});
    }
    memory = memory.subspan(bytes);
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.share < b.share; });
  return pieces;
}

// Reads a file again and again with a few operations under way, until it is destroyed.
class Beside {
 public:
  Beside(Handle& handle, const Job& job)
      : memory_(MemoryKind::pinned, in_flight * job.piece_bytes),
        thread_([this, &handle, &job](const std::stop_token& stop) { read(handle, job, stop); }) {}

 private:
  static constexpr std::size_t in_flight = 8;

  void read(Handle& handle, const Job& job, const std::stop_token& stop) {
    const File file = File::open(job.beside, tensorferry::Access::read);
    const std::uint64_t pieces = std::max<std::uint64_t>(file.size() / job.piece_bytes, 1);
    std::deque<Operation> under_way;
    for (std::uint64_t n = 0; !stop.stop_requested(); ++n) {
      if (under_way.size() == in_flight) {
        under_way.front().wait();
        under_way.pop_front();
      }
      const std::size_t slot = n % in_flight * job.piece_bytes;
      const std::size_t length = std::min<std::uint64_t>(job.piece_bytes, file.size());
      under_way.push_back(
          handle.read(memory_.bytes().subspan(slot, length), file, n % pieces * job.piece_bytes));
    }
    for (const Operation& operation : under_way) operation.cancel();
    for (const Operation& operation : under_way) {
      try {
        operation.wait();
      } catch (const tensorferry::Error&) {  // it was cancelled
      }
    }
  }

  Memory memory_;
  std::jthread thread_;  // last, so that it ends first
};

void prepare_files(const Job& job) {
  for (std::size_t i = 0; i < job.paths.size(); ++i) {
    prepare_file(job.paths[i], job.bytes_of(i), job.seed);
  }
}

}  // namespace

Result run_drives(const Job& job) {
  prepare_files(job);
  Result result;
  std::vector<File> files;
  for (std::size_t i = 0; i < job.paths.size(); ++i) {
    files.push_back(open_for(job, job.paths[i]));
    result.bytes_per_repetition += job.bytes_of(i);
  }
  Handle handle(job.options);
  const Memory memory(job.memory, result.bytes_per_repetition);
  memory.fill(job.seed);
  const std::vector<Piece> pieces = pieces_of(job, files, memory.bytes());
  result.operations_per_repetition = pieces.size();
  std::optional<Beside> beside;
  if (!job.beside.empty()) beside.emplace(handle, job);
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] {
      std::vector<Operation> operations;
      operations.reserve(pieces.size());
      for (const Piece& piece : pieces) {
        operations.push_back(
            begin_transfer(handle, job.direction, piece.memory, piece.file, piece.offset));
      }
      for (const Operation& operation : operations) operation.wait();
    });
  }
  beside.reset();
  describe(result, job, handle, files.front());
  return result;
}

Result run_swap(const Job& job) {
  const Memory memory(job.memory, job.bytes() * job.count);
  memory.fill(job.seed);
  tensorferry::SwapOptions options;
  options.directories = job.paths;
  options.handle = job.options;
  tensorferry::SwapSpace space(options);
  const auto all = [&](Direction direction) {
    std::vector<Operation> operations;
    operations.reserve(job.count);
    for (std::size_t i = 0; i < job.count; ++i) {
      const std::string key = std::to_string(i);
      const auto tensor = memory.bytes().subspan(i * job.bytes(), job.bytes());
      operations.push_back(direction == Direction::read ? space.get(key, tensor)
                                                        : space.put(key, tensor));
    }
    for (const Operation& operation : operations) operation.wait();
  };

  Result result;
  result.operations_per_repetition = job.count;
  result.bytes_per_repetition = job.bytes() * job.count;
  if (job.direction == Direction::read) {
    for (unsigned i = 0; i <= job.warm_up; ++i) all(Direction::write);
  }
  for (int i = -static_cast<int>(job.warm_up); i < static_cast<int>(job.repeat); ++i) {
    measure(result, i, [&] { all(job.direction); });
  }
  result.engine = "swap";
  result.engine_reason = space.engine_reason();
  const std::string probe = space.directories().front() + "/probe";
  const File file = File::open(probe, tensorferry::Access::read_write);
  result.direct = file.direct();
  result.direct_reason = file.direct_reason();
  ::unlink(probe.c_str());
  return result;
}
