#include "swap/snapshot_links.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "swap/own_directory.h"

namespace tensorferry::swap {

namespace {

Error link_failure(const char* operation, const std::string& path, int code, std::string hint) {
  return Error({.operation = operation, .path = path, .code = -code, .hint = std::move(hint)});
}

const char* linking_hint(int code) {
  switch (code) {
    case -EEXIST:
      return "a snapshot of that name exists; choose another name";
    case -EPERM:
    case -EOPNOTSUPP:
      return "the file system has no hard links; put the swap files on ext4 or xfs";
    case -ENOENT:
      return "the snapshot that this run has resumed from was removed while the run still needed "
             "some of its tensors; write them again before you take a snapshot";
    default:
      return "check free space, owner and mode";
  }
}

}  // namespace

SnapshotLinks::~SnapshotLinks() {
  for (const Link& link : links_) {
    (void)system_.remove_at(folders_[link.folder].fd, link.name.c_str(), 0);
  }
  for (const Folder& folder : folders_) {
    system_.close(folder.fd);
    system_.close(folder.parent);
  }
}

Result<std::size_t> SnapshotLinks::folder_in(const std::string& directory) {
  const auto known = std::ranges::find(folders_, directory, &Folder::directory);
  if (known != folders_.end()) return static_cast<std::size_t>(known - folders_.begin());
  const std::string name = "tensorferry-snapshots-" + std::to_string(::geteuid());
  const std::string path = directory + "/" + name;
  const int parent = system_.open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (parent < 0) {
    return link_failure("open swap directory", directory, parent,
                        "check that the drive is mounted");
  }
  const Result<int> opened = open_own_directory(system_, parent, name, path);
  if (!opened.ok()) {
    system_.close(parent);
    return opened.error();
  }
  folders_.push_back({directory, path, parent, opened.value()});
  return folders_.size() - 1;
}

Status SnapshotLinks::add(int fd, const std::string& directory, const std::string& name) {
  const Result<std::size_t> folder = folder_in(directory);
  if (!folder.ok()) return folder.error();
  const Folder& home = folders_[folder.value()];
  if (const int linked = system_.link_file(fd, home.fd, name.c_str()); linked < 0) {
    return link_failure("name file of snapshot", home.path + "/" + name, linked,
                        linking_hint(linked));
  }
  links_.push_back({folder.value(), name});
  return Nothing{};
}

Status SnapshotLinks::sync() {
  for (const Folder& folder : folders_) {
    for (const int fd : {folder.fd, folder.parent}) {
      if (const int synced = system_.fsync(fd); synced < 0) {
        return link_failure("sync", folder.path, synced,
                            "the names of the snapshot's files may not be on the drive");
      }
    }
  }
  return Nothing{};
}

std::vector<std::string> SnapshotLinks::keep() {
  std::vector<std::string> paths;
  for (const Link& link : links_) paths.push_back(folders_[link.folder].path + "/" + link.name);
  links_.clear();
  return paths;
}

}  // namespace tensorferry::swap
