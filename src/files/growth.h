// Files that writes make longer: what a failed write has added to the end is cut off again, so that
// nobody finds zeros, or the later half of a tensor, where the write never came.
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
// process on that file has ended and some have failed, the file is cut back: to where the failed
// ranges at its end begin, and never below its old end or what another operation has written.
//
// Only bytes that failed writes were to write are cut off. What lies below a gap stays, also a
// hole: another process may be writing there at this moment, and the kernel shows a hole until its
// bytes have arrived. A file that somebody else has made longer still stays as it is.
//
// Thread-safe. A file system that does not answer holds up whoever writes to the same file, and
// nobody else, nor a fork. In a forked child the operations are the parent's, and nothing is cut.
class Growth {
 public:
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  // Before anything is written. Nothing where no range reaches past the end, and for devices.
  [[nodiscard]] static std::optional<Growth> begin(std::shared_ptr<OpenFile> file,
                                                   std::vector<Range> ranges);
  Growth(Growth&&) noexcept = default;
  Growth& operator=(Growth&&) = delete;
  ~Growth();

  // Where the file ended before anything was written.
  [[nodiscard]] std::uint64_t old_end() const noexcept { return old_end_; }

  // The writes have ended. Either is called once; the destructor cuts back if neither was. The
  // Error says that the file could not be cut.
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
