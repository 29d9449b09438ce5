// An open file for the room `handle`: up to two descriptors, the alignment that direct requests
// need, and its name for errors. Knows nothing of operations or memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "files/device.h"
#include "files/directory.h"
#include "files/identity.h"
#include "os/system.h"
#include "tensorferry/file.h"

namespace tensorferry::files {

// All members are thread-safe. They take no lock, because a forked child might inherit it locked.
// Descriptors stay open as long as the object lives.
class OpenFile {
 public:
  // As File::open and File::borrow, with errors as values.
  [[nodiscard]] static Result<std::shared_ptr<OpenFile>> open(
      os::System& system, const std::string& path, Access access,
      unsigned permissions = File::usual_permissions);
  [[nodiscard]] static Result<std::shared_ptr<OpenFile>> borrow(os::System& system, int descriptor);
  ~OpenFile();
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return *path_; }
  // The same for those who need it after the file has been closed.
  [[nodiscard]] const std::shared_ptr<const std::string>& shared_path() const noexcept {
    return path_;
  }
  [[nodiscard]] bool readable() const noexcept;
  [[nodiscard]] bool writable() const noexcept;
  // May become false at the first call of buffered_fd(). Requests that were planned before stay
  // valid: a request that suits a direct descriptor suits any.
  [[nodiscard]] bool direct() const noexcept { return direct_fd_ >= 0 && !demoted(); }
  [[nodiscard]] const std::string& direct_reason() const noexcept {
    const std::string* const why = demotion_reason_.load(std::memory_order_acquire);
    return why != nullptr ? *why : direct_reason_;
  }
  [[nodiscard]] std::size_t memory_alignment() const noexcept {
    return direct() ? memory_alignment_ : 1;
  }
  [[nodiscard]] std::size_t offset_alignment() const noexcept {
    return direct() ? offset_alignment_ : 1;
  }
  [[nodiscard]] const Device& device() const noexcept { return *device_; }
  [[nodiscard]] bool regular() const noexcept { return regular_; }
  [[nodiscard]] const Identity& identity() const noexcept { return identity_; }

  // -1 if the file never was direct().
  [[nodiscard]] int direct_fd() const noexcept { return direct_fd_; }
  // The descriptor through the page cache, opened at first use. If the file cannot be opened a
  // second time (its mode forbids it, or /proc is not mounted and the path is now another file),
  // direct() ends: the one descriptor serves all requests. Fails if that descriptor is borrowed.
  [[nodiscard]] Result<int> buffered_fd();
  // The directory that holds the file now; nullptr for a deleted file and a block device, which
  // have no entry to make durable.
  [[nodiscard]] Result<std::shared_ptr<const Directory>> directory();
  // Either descriptor, for calls on the whole file.
  [[nodiscard]] int main_fd() const noexcept {
    return direct_fd_ >= 0 ? direct_fd_ : buffered_fd_.load(std::memory_order_acquire);
  }

  [[nodiscard]] Result<std::uint64_t> size();
  [[nodiscard]] Status resize(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t free_bytes();  // on the file system; 0 if not known

  // Call it before a large write past the end of the file, `old_end`. Allocates the space and moves
  // the end, so that the requests of the write need not do so one after the other. Ignores
  // failures: the write reports them. The caller undoes it if the write fails (growth.h).
  void reserve(std::uint64_t offset, std::uint64_t bytes, std::uint64_t old_end);

 private:
  OpenFile(os::System& system, std::string path, int open_flags);
  void set(bool direct, int fd) noexcept;  // only while the object is being made
  [[nodiscard]] Status adopt(int fd, bool direct);
  [[nodiscard]] Status learn_alignment(const struct statx& facts);
  [[nodiscard]] int open_path(int flags, unsigned permissions);
  [[nodiscard]] Result<int> reopen(int extra_flags);
  [[nodiscard]] Result<int> reopen_by_path(int flags);
  [[nodiscard]] Error failure(const char* operation, int code) const;
  [[nodiscard]] Error wrong_kind(unsigned mode) const;
  // Removes O_DIRECT from the one descriptor, which then serves all requests. `refusal` says why
  // the file cannot be opened a second time. Fails if O_DIRECT cannot be removed.
  [[nodiscard]] Result<int> demote(const Error& refusal);
  [[nodiscard]] bool demoted() const noexcept {
    return demotion_reason_.load(std::memory_order_acquire) != nullptr;
  }

  os::System& system_;
  std::shared_ptr<const std::string> path_;
  int open_flags_;  // O_RDONLY, O_WRONLY or O_RDWR
  int direct_fd_ = -1;
  std::atomic<int> buffered_fd_{-1};  // set once
  bool own_flags_ = false;            // we opened direct_fd_ and may change its flags
  // Why direct_fd_ has lost O_DIRECT; nullptr if it has not. The text is never destroyed.
  std::atomic<const std::string*> demotion_reason_{nullptr};
  bool regular_ = true;
  Identity identity_;
  std::string direct_reason_;
  std::size_t memory_alignment_ = 1;
  std::size_t offset_alignment_ = 1;
  const Device* device_ = nullptr;
};

// As File::open, with the System of a test.
[[nodiscard]] File open(os::System& system, const std::string& path, Access access,
                        unsigned permissions = File::usual_permissions);

}  // namespace tensorferry::files
