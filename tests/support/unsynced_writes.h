// Forgets writes that were not synced, as a drive with a volatile cache does at a loss of power.
// Direct writes reach the file under a loop device even without a sync, so that a power cut there
// cannot show that one is missing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "engines/engine.h"
#include "support/faulty_engine.h"

namespace tensorferry::support {

// A judge for EngineFaults: notes what each write overwrites, until the file is synced.
// Thread-safe. Must outlive the engines.
class UnsyncedWrites {
 public:
  enum class Syncs : std::uint8_t { work, do_nothing };

  explicit UnsyncedWrites(Syncs syncs) : syncs_(syncs) {}
  ~UnsyncedWrites();
  UnsyncedWrites(const UnsyncedWrites&) = delete;
  UnsyncedWrites& operator=(const UnsyncedWrites&) = delete;

  [[nodiscard]] Fault judge(const engines::Request& request);

  // Puts back what the writes since the last sync of each file have overwritten. Call it when all
  // operations have ended. Returns how many writes are lost.
  std::size_t lose();

 private:
  using File = std::pair<dev_t, ino_t>;
  struct Overwritten {
    int fd;
    std::uint64_t offset;
    std::vector<std::byte> bytes;
  };

  const Syncs syncs_;
  std::mutex mutex_;
  std::map<File, int> descriptors_;  // of our own, through the page cache
  std::map<File, std::vector<Overwritten>> writes_;
};

}  // namespace tensorferry::support
