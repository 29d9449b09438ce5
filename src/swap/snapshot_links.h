// Further names of swap files, under which a snapshot keeps them when their run has ended.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"
#include "os/system.h"

namespace tensorferry::swap {

// The names are <directory>/tensorferry-snapshots-<uid>/<name>. They are removed again unless
// keep() is called. Not thread-safe.
class SnapshotLinks {
 public:
  explicit SnapshotLinks(os::System& system) : system_(system) {}
  ~SnapshotLinks();
  SnapshotLinks(const SnapshotLinks&) = delete;
  SnapshotLinks& operator=(const SnapshotLinks&) = delete;

  // Adds a name for an open file on the drive of `directory`.
  [[nodiscard]] Status add(int fd, const std::string& directory, const std::string& name);
  // Makes the names durable.
  [[nodiscard]] Status sync();
  // Leaves the names there. Returns their paths, in the order of add().
  [[nodiscard]] std::vector<std::string> keep();

 private:
  // An open folder of names, and the directory that holds it.
  struct Folder {
    std::string directory;
    std::string path;
    int parent = -1;
    int fd = -1;
  };
  struct Link {
    std::size_t folder;
    std::string name;
  };
  [[nodiscard]] Result<std::size_t> folder_in(const std::string& directory);

  os::System& system_;
  std::vector<Folder> folders_;
  std::vector<Link> links_;
};

}  // namespace tensorferry::swap
