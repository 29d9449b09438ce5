// Files that writes make longer. Bytes that a failed write has added at the end are cut off again,
// so that no reader finds zeros, or the later half of a tensor, that were never written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/result.h"
#include "files/open_file.h"

namespace tensorferry::files {

struct Growing;

// Writes of one operation to one file that reach past its end. When the last such operation of the
// process on that file has ended and some have failed, the file is cut back to the start of the
// failed ranges at its end, but never below its old end or below bytes that another operation
// wrote.
//
// Only the ranges of failed writes are cut off. Bytes below a gap stay, even a hole: another
// process may be writing there now, and the kernel shows a hole until its bytes arrive. If somebody
// else has made the file even longer, it stays as it is.
//
// Thread-safe. A file system that hangs blocks only writers of the same file, no others and no
// fork. In a forked child the operations are the parent's, and nothing is cut.
class Growth {
 public:
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  // Call it before the first write. Returns nullopt if no range reaches past the end, and for
  // devices.
  [[nodiscard]] static std::optional<Growth> begin(std::shared_ptr<OpenFile> file,
                                                   std::vector<Range> ranges);
  Growth(Growth&&) noexcept = default;
  Growth& operator=(Growth&&) = delete;
  ~Growth();

  // The end of the file before the first write.
  [[nodiscard]] std::uint64_t old_end() const noexcept { return old_end_; }

  // Call one of them, once, when the writes have ended; else the destructor cuts back. cut_back()
  // fails if the file cannot be cut.
  void keep() noexcept;
  Status cut_back() noexcept;

 private:
  enum class Outcome : std::uint8_t { kept, failed };

  Growth(std::shared_ptr<OpenFile> file, std::vector<Range> ranges, std::uint64_t old_end,
         std::shared_ptr<Growing> growing) noexcept
      : file_(std::move(file)),
        ranges_(std::move(ranges)),
        old_end_(old_end),
        growing_(std::move(growing)) {}
  Status end(Outcome outcome) noexcept;

  std::shared_ptr<OpenFile> file_;  // nullptr once it has ended
  std::vector<Range> ranges_;
  std::uint64_t old_end_;
  std::shared_ptr<Growing> growing_;
  std::uint64_t generation_ = os::fork_generation();
};

}  // namespace tensorferry::files
