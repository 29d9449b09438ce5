// An open file: a direct (O_DIRECT) and a buffered descriptor, its alignment and its identity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tensorferry/export.h"

namespace tensorferry {

namespace files {
class OpenFile;
}

enum class Access : std::uint8_t { read, write, read_write };

// A regular file or a block device. Copies share the open file; the last one closes it. All
// members may be called from any thread. Operations in flight keep the file open by themselves.
class TENSORFERRY_EXPORT File {
 public:
  // What a new file allows whom, less the umask, if nothing else is said.
  static constexpr unsigned usual_permissions = 0666;

  // Opens by path. With write access a missing file is created, with `permissions` less the umask.
  // An existing file is never truncated. Throws Error for missing files, directories, FIFOs, lack
  // of permission and so on, with a hint. Waits for nothing but a lease on the file that another
  // program has to give up, at most a minute.
  [[nodiscard]] static File open(const std::string& path, Access access,
                                 unsigned permissions = usual_permissions);

  // Uses a descriptor that the caller keeps and may close at any time (it is duplicated). It may be
  // O_DIRECT, O_RDONLY, O_WRONLY or O_RDWR; O_APPEND, which ignores offsets, is refused. Where the
  // file cannot be opened a second time, O_NONBLOCK is refused too, and through O_DIRECT writes are
  // of whole blocks only.
  [[nodiscard]] static File borrow(int descriptor);

  [[nodiscard]] const std::string& path() const noexcept;
  [[nodiscard]] std::uint64_t size() const;  // as of now; throws Error

  // Cuts the file or extends it with zeros. Throws Error; a block device has the size it has.
  void resize(std::uint64_t bytes);

  // Whether bytes bypass the page cache, and if not, why. If a file cannot be opened a second time
  // (made with a mode that forbids it, or renamed where /proc is not mounted), they do until the
  // first write that is not of whole blocks.
  [[nodiscard]] bool direct() const noexcept;
  [[nodiscard]] const std::string& direct_reason() const noexcept;

  // What direct transfers in place need; 1 where the file is buffered.
  [[nodiscard]] std::size_t memory_alignment() const noexcept;
  [[nodiscard]] std::size_t offset_alignment() const noexcept;

  // The request size that suits the device, from sysfs (docs/architecture.md says how), for memory
  // in pages of the usual size.
  [[nodiscard]] std::size_t block_bytes() const noexcept;

  // For the library's own rooms.
  [[nodiscard]] const std::shared_ptr<files::OpenFile>& opened() const noexcept { return opened_; }
  explicit File(std::shared_ptr<files::OpenFile> opened) : opened_(std::move(opened)) {}

 private:
  std::shared_ptr<files::OpenFile> opened_;
};

}  // namespace tensorferry
