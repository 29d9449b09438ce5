// A block device made of a file, and mounted file systems, for tests of real EIO, power cuts, full
// disks and other file systems. Needs root.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "support/temp_dir.h"

namespace tensorferry::support {

// Why mounts do not work here; empty if they do. For GTEST_SKIP.
[[nodiscard]] std::string mounts_unavailable_reason();

// Mounts a file system without a device ("tmpfs", "ramfs", "overlay"), and unmounts it at the end.
// Only this process and its children see the mount, so a killed test leaves none.
class Mount {
 public:
  // Throws std::runtime_error. `options` as in mount -o; overlay gets its directories here.
  explicit Mount(const std::string& type, const std::string& options = "");
  ~Mount();
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  TempDir dir_;
  std::string path_;
};

enum class PowerCut : std::uint32_t { journal_flushed = 1, journal_lost = 2 };

// A loop device over a sparse file. The kernel frees it after its last user, even if the test is
// killed. While a file system is mounted, only the mount keeps the device, and each mount makes a
// new device over the same file: like a drive after a power cycle, it remembers only its bytes.
class LoopDevice {
 public:
  // Throws std::runtime_error.
  explicit LoopDevice(std::uint64_t bytes, unsigned sector_bytes = 512);
  ~LoopDevice();
  LoopDevice(const LoopDevice&) = delete;
  LoopDevice& operator=(const LoopDevice&) = delete;

  // Why loop devices, or a file system on one ("ext4", "xfs", "btrfs"), do not work here.
  [[nodiscard]] static std::string unavailable_reason(const std::string& type = "");

  // Changes with each mount.
  [[nodiscard]] const std::string& device() const noexcept { return device_; }

  // All throw std::runtime_error. One file system at a time.
  void make_file_system(const std::string& type, const std::string& options = "");
  void mount();
  void unmount();
  [[nodiscard]] const std::string& mount_point() const noexcept { return mount_point_; }
  [[nodiscard]] std::string file(const std::string& name) const {
    return mount_point_ + "/" + name;
  }

  // ext4 and xfs: from now on nothing reaches the device, as after a loss of power.
  void cut_power(PowerCut how);

  // From now on, reads and writes beyond `bytes` of the device give EIO.
  void lose_everything_from(std::uint64_t bytes);

 private:
  void attach();

  TempDir dir_;
  unsigned sector_bytes_;
  std::string backing_;
  std::string device_;
  std::string mount_point_;
  std::string type_;
  int fd_ = -1;  // of the device, while it is not mounted
  bool mounted_ = false;
};

}  // namespace tensorferry::support
