// The files of a swap space and what is free in them: where tensors get their places.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/result.h"
#include "files/open_file.h"
#include "os/system.h"
#include "swap/extents.h"
#include "swap/run_directory.h"
#include "tensorferry/file.h"

namespace tensorferry::swap {

class Store;

// A part of a tensor and where it lies. Whole pages.
struct Piece {
  std::size_t drive = 0;
  Extent extent;
};

// Room for one tensor, in the order of its bytes. Its end gives the room back.
class Place {
 public:
  Place(std::shared_ptr<Store> store, std::vector<Piece> pieces)
      : store_(std::move(store)), pieces_(std::move(pieces)) {}
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  struct Stretch {
    const File& file;
    std::uint64_t file_offset;
    std::uint64_t offset;  // in the tensor
    std::uint64_t bytes;
  };
  // The stretches that hold the tensor's bytes from `offset` on.
  [[nodiscard]] std::vector<Stretch> stretches(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  const std::shared_ptr<Store> store_;
  const std::vector<Piece> pieces_;
};

// Thread-safe. In a child of fork() it stays as it was, for ever: places that end there give
// nothing back.
class Store : public std::enable_shared_from_this<Store> {
 public:
  [[nodiscard]] static Result<std::shared_ptr<Store>> make(
      os::System& system, const std::vector<std::string>& directories, const std::string& run,
      unsigned rank);

  // Room for so many bytes, spread over all drives. ENOSPC tells what is needed and what is free.
  [[nodiscard]] Result<std::shared_ptr<Place>> take(std::uint64_t bytes);
  [[nodiscard]] Status reserve(std::uint64_t bytes);

  // Removes the directories. Places and their open files live on.
  void remove_directories();

  [[nodiscard]] std::uint64_t file_bytes() const;
  [[nodiscard]] const File& file(std::size_t drive) const { return drives_[drive].file; }
  [[nodiscard]] const std::vector<std::string>& paths() const noexcept { return paths_; }
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  friend class Place;

  struct Drive {
    std::unique_ptr<RunDirectory> directory;
    File file;
    Extents extents;
  };

  explicit Store(os::System& system) : system_(system), generation_(os::fork_generation()) {}
  [[nodiscard]] Status add_drive(const std::string& given, const std::string& run, unsigned rank);
  void give_back(const std::vector<Piece>& pieces);
  // Each adds pieces and returns how many bytes it found room for.
  [[nodiscard]] std::uint64_t take_whole(std::size_t index, std::uint64_t bytes,
                                         std::vector<Piece>& pieces);
  [[nodiscard]] std::uint64_t take_fragments(std::uint64_t bytes, std::vector<Piece>& pieces);
  // 0 or -errno.
  [[nodiscard]] int grow(Drive& drive, std::uint64_t bytes);
  [[nodiscard]] Error no_room(std::uint64_t needed_bytes) const;
  [[nodiscard]] Error beyond_any_file(std::uint64_t bytes);

  os::System& system_;
  const std::uint64_t generation_;  // of forks
  mutable std::mutex mutex_;
  std::vector<Drive> drives_;
  std::size_t next_ = 0;  // the drive whose turn it is
  int growth_error_ = 0;  // why a file did not grow, the last time
  std::vector<std::string> paths_;
  std::vector<std::string> notes_;
};

}  // namespace tensorferry::swap
