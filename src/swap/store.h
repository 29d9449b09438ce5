// The files of a swap space: allocates space in them for tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/result.h"
#include "files/open_file.h"
#include "handle/device_use.h"
#include "os/system.h"
#include "swap/extents.h"
#include "swap/run_directory.h"
#include "swap/shares.h"
#include "swap/speeds.h"
#include "tensorferry/file.h"
#include "tensorferry/swap_space.h"

namespace tensorferry::swap {

class Store;

// Some of a tensor's bytes on one drive. Whole pages.
struct DriveExtent {
  std::size_t drive = 0;
  Extent extent;
};

// Files of a snapshot, which nobody writes to any more. While they are attached, they have names in
// the directories of the run, so that their bytes stay.
struct AttachedFiles {
  explicit AttachedFiles(std::shared_ptr<Store> to) : store(std::move(to)) {}
  ~AttachedFiles();
  AttachedFiles(const AttachedFiles&) = delete;
  AttachedFiles& operator=(const AttachedFiles&) = delete;

  const std::shared_ptr<Store> store;
  std::vector<File> files;
  std::vector<std::string> directories;  // the one on the drive of each file, as users give it
  std::vector<std::size_t> numbers;      // in the names that they have here
};

// The space that one tensor has on the drives. Its destructor gives the space back.
class Allocation {
 public:
  // `extents` are in the order of the tensor's bytes.
  Allocation(std::shared_ptr<Store> store, std::vector<DriveExtent> extents)
      : store_(std::move(store)), extents_(std::move(extents)) {}
  // Space in files of a snapshot; the "drives" of the extents are the numbers of these files. The
  // destructor gives nothing back.
  Allocation(std::shared_ptr<const AttachedFiles> attached, std::vector<DriveExtent> extents)
      : attached_(std::move(attached)), extents_(std::move(extents)) {}
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  // Bytes of the tensor that follow each other in one file.
  struct FileRange {
    const File& file;
    std::uint64_t file_offset;
    std::uint64_t offset;  // in the tensor
    std::uint64_t bytes;
  };
  // The ranges that hold `bytes` of the tensor from `offset` on.
  [[nodiscard]] std::vector<FileRange> ranges(std::uint64_t offset, std::uint64_t bytes) const;

  [[nodiscard]] const std::vector<DriveExtent>& extents() const noexcept { return extents_; }
  // nullptr for space in the store.
  [[nodiscard]] const std::shared_ptr<const AttachedFiles>& attached() const noexcept {
    return attached_;
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept;  // in whole pages

 private:
  const std::shared_ptr<Store> store_;
  const std::shared_ptr<const AttachedFiles> attached_;
  const std::vector<DriveExtent> extents_;
};

// What the devices have done so far. Empty: nothing is measured.
using DeviceUses = std::function<std::vector<handle::DeviceUse>()>;

// Thread-safe. In a child of fork() it never changes: allocations that end there give nothing back.
class Store : public std::enable_shared_from_this<Store> {
 public:
  // take() and drives() call `device_uses`, without a lock of the store.
  [[nodiscard]] static Result<std::shared_ptr<Store>> make(
      os::System& system, const std::vector<std::string>& directories, const std::string& run,
      unsigned rank, DeviceUses device_uses);

  // Allocates space for a tensor, spread over the drives by their speed (shares.h). What a full
  // drive cannot take goes to the others. Fails with ENOSPC, which names the bytes needed and free.
  [[nodiscard]] Result<std::shared_ptr<Allocation>> take(std::uint64_t bytes);
  // Makes the files longer ahead of need. Fails with ENOSPC.
  [[nodiscard]] Status reserve(std::uint64_t bytes);
  // Makes the files longer until so many of their bytes are free, in any pieces. Fails with ENOSPC.
  [[nodiscard]] Status make_room(std::uint64_t bytes);

  // Opens files of a snapshot. Fails with ENOENT if one is missing, EPERM if one is not ours.
  [[nodiscard]] Result<std::shared_ptr<const AttachedFiles>> attach(
      const std::vector<std::string>& paths);

  // Removes the directories. Allocations and their open files live on.
  void remove_directories();

  [[nodiscard]] std::uint64_t file_bytes() const;
  [[nodiscard]] std::vector<SwapDrive> drives();
  [[nodiscard]] const File& file(std::size_t drive) const { return drives_[drive].file; }
  [[nodiscard]] os::System& system() const noexcept { return system_; }
  // The directory that the user gave for a drive, without links, as it was then.
  [[nodiscard]] const std::string& given(std::size_t drive) const noexcept {
    return drives_[drive].given;
  }
  [[nodiscard]] const std::vector<std::string>& paths() const noexcept { return paths_; }
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  friend class Allocation;
  friend struct AttachedFiles;

  struct Drive {
    std::string given;
    std::unique_ptr<RunDirectory> directory;
    File file;
    FreeExtents free;
  };

  Store(os::System& system, std::size_t drives, DeviceUses device_uses)
      : system_(system),
        generation_(os::fork_generation()),
        device_uses_(std::move(device_uses)),
        shares_(drives) {}
  [[nodiscard]] Status add_drive(const std::string& given, const std::string& run, unsigned rank);
  void give_back(const std::vector<DriveExtent>& taken);
  void detach(const std::vector<std::size_t>& numbers);
  // Both add to `taken` and return how many bytes they found space for.
  [[nodiscard]] std::uint64_t take_whole(std::size_t index, std::uint64_t bytes,
                                         std::vector<DriveExtent>& taken);
  [[nodiscard]] std::uint64_t take_fragments(std::uint64_t bytes, std::vector<DriveExtent>& taken);
  // All drives, another one first each time.
  [[nodiscard]] std::vector<std::size_t> drives_in_turn();
  // Learns how fast the drives are. Call both without the lock.
  void learn();
  void learn_after(std::uint64_t bytes);  // only once in a while; `bytes` are of a new tensor
  // Both return 0 or -errno. grow() makes the file longer until it ends in so many free bytes,
  // extend() by so many bytes.
  [[nodiscard]] int grow(Drive& drive, std::uint64_t bytes);
  [[nodiscard]] int extend(Drive& drive, std::uint64_t lacking);
  [[nodiscard]] int reserve_on(Drive& drive, std::uint64_t bytes);
  [[nodiscard]] std::uint64_t reserved_share(std::size_t drive, std::uint64_t bytes) const;
  // In the files and on the drives under them.
  [[nodiscard]] std::uint64_t free_bytes() const;
  [[nodiscard]] Error no_space(std::uint64_t needed_bytes) const;
  [[nodiscard]] Error beyond_any_file(std::uint64_t bytes);

  os::System& system_;
  const std::uint64_t generation_;  // of forks
  const DeviceUses device_uses_;
  mutable std::mutex mutex_;
  Speeds speeds_;
  Shares shares_;
  std::uint64_t unlearned_bytes_ = 0;  // of tensors since the last look at the speeds
  std::vector<Drive> drives_;
  std::size_t held_ = 0;  // how many files of snapshots have had a name in our directories
  std::size_t next_ = 0;  // the first drive of the next allocation
  int growth_error_ = 0;  // errno of the last file that did not grow
  std::vector<std::string> paths_;
  std::vector<std::string> notes_;
};

}  // namespace tensorferry::swap
