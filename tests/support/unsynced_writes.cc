#include "support/unsynced_writes.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ranges>
#include <string>

namespace tensorferry::support {

UnsyncedWrites::~UnsyncedWrites() {
  for (const auto& [file, fd] : descriptors_) ::close(fd);
}

Fault UnsyncedWrites::judge(const engines::Request& request) {
  struct stat facts{};
  if (request.kind == engines::RequestKind::read || ::fstat(request.fd, &facts) != 0) return {};
  const File file{facts.st_dev, facts.st_ino};
  const std::lock_guard lock(mutex_);
  if (request.kind != engines::RequestKind::write) {
    if (syncs_ == Syncs::work) writes_.erase(file);
    Fault fault;
    if (syncs_ == Syncs::do_nothing) fault.kind = Fault::Kind::pretend;
    return fault;
  }
  auto [known, is_new] = descriptors_.try_emplace(file, -1);
  if (is_new) {
    const std::string path = "/proc/self/fd/" + std::to_string(request.fd);
    known->second = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  }
  Overwritten overwritten{known->second, request.offset, {}};
  overwritten.bytes.resize(request.bytes);
  const ssize_t got = ::pread(known->second, overwritten.bytes.data(), request.bytes,
                              static_cast<off_t>(request.offset));
  overwritten.bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  writes_[file].push_back(std::move(overwritten));
  return {};
}

std::size_t UnsyncedWrites::lose() {
  const std::lock_guard lock(mutex_);
  std::size_t lost = 0;
  for (const auto& [file, writes] : writes_) {
    for (const Overwritten& one : std::views::reverse(writes)) {
      const ssize_t back =
          ::pwrite(one.fd, one.bytes.data(), one.bytes.size(), static_cast<off_t>(one.offset));
      lost += static_cast<std::size_t>(back == static_cast<ssize_t>(one.bytes.size()));
    }
    ::fsync(descriptors_[file]);
  }
  writes_.clear();
  return lost;
}

}  // namespace tensorferry::support
