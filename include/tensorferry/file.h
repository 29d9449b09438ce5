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
// members may be called from any thread. Operations in flight keep the file open.
class TENSORFERRY_EXPORT File {
 public:
  // Default mode of a new file, before the umask.
  static constexpr unsigned usual_permissions = 0666;

  // Opens a file by path. With write access it creates a missing file, with `permissions` minus the
  // umask. It never truncates an existing file. Throws Error with a hint: for missing files,
  // directories, FIFOs, lack of permission and so on. Blocks only if another program holds a lease
  // on the file, for at most a minute.
  [[nodiscard]] static File open(const std::string& path, Access access,
                                 unsigned permissions = usual_permissions);

  // Uses a duplicate of the caller's descriptor, which the caller may close at any time. The
  // descriptor may be O_DIRECT, O_RDONLY, O_WRONLY or O_RDWR. Throws Error for O_APPEND, which
  // ignores offsets. If the file cannot be opened a second time, throws Error for O_NONBLOCK too,
  // and an O_DIRECT descriptor then writes whole blocks only.
  [[nodiscard]] static File borrow(int descriptor);

  [[nodiscard]] const std::string& path() const noexcept;
  [[nodiscard]] std::uint64_t size() const;  // asks the system; throws Error

  // Cuts the file or extends it with zeros. Throws Error, always so for a block device.
  void resize(std::uint64_t bytes);

  // Whether transfers bypass the page cache, and if not, why. If the file cannot be opened a second
  // time (its mode forbids it, or it was renamed and /proc is not mounted), the first write of a
  // partial block makes this false.
  [[nodiscard]] bool direct() const noexcept;
  [[nodiscard]] const std::string& direct_reason() const noexcept;

  // The alignment that direct transfers in place need; 1 if the file is buffered.
  [[nodiscard]] std::size_t memory_alignment() const noexcept;
  [[nodiscard]] std::size_t offset_alignment() const noexcept;

  // The request size that suits the device, for memory in pages of the usual size: from its
  // profile, else from sysfs (docs/architecture.md).
  [[nodiscard]] std::size_t block_bytes() const noexcept;

  // For the library's own rooms.
  [[nodiscard]] const std::shared_ptr<files::OpenFile>& opened() const noexcept { return opened_; }
  explicit File(std::shared_ptr<files::OpenFile> opened) : opened_(std::move(opened)) {}

 private:
  std::shared_ptr<files::OpenFile> opened_;
};

}  // namespace tensorferry
