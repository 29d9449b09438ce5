// For any content of /proc and /sys, the facts about a device keep to their limits.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "files/device.h"
#include "fuzz/promise.h"
#include "support/temp_dir.h"

using namespace tensorferry;

namespace {

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::trunc | std::ios::binary) << text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace fs = std::filesystem;
  static const support::TempDir folder;
  static const fs::path disk = fs::path(folder.path()) / "sys/dev/block/259:0";
  static const fs::path named = fs::path(folder.path()) / "sys/class/block/nvme0n1";
  static const fs::path nodes = fs::path(folder.path()) / "sys/devices/system/node";
  static const bool made =
      fs::create_directories(disk / "queue") && fs::create_directories(disk / "device") &&
      fs::create_directories(nodes / "node0") && fs::create_directories(disk / "slaves/one") &&
      fs::create_directories(disk / "loop") && fs::create_directories(named);
  fuzz::promise(made, "a folder for the files can be made");

  FuzzedDataProvider provider(data, size);
  const files::SystemTree tree{.sys = folder.path() + "/sys", .mountinfo = folder.file("mounts")};
  write(disk / "dev", "259:0\n");
  for (const char* name :
       {"queue/max_sectors_kb", "queue/max_segments", "queue/max_segment_size", "queue/nr_requests",
        "queue/logical_block_size", "serial", "uevent", "partition", "slaves/one/dev",
        "loop/backing_file", "device/numa_node"}) {
    write(disk / name, provider.ConsumeRandomLengthString(64));
  }
  write(nodes / "online", provider.ConsumeRandomLengthString(64));
  write(nodes / "node0/cpulist", provider.ConsumeRandomLengthString(64));
  write(named / "dev", provider.ConsumeRandomLengthString(32));
  const unsigned major = provider.ConsumeBool() ? 259 : 0;
  write(tree.mountinfo, provider.ConsumeRemainingBytesAsString());

  const Device device = files::inspect_device(major, 0, tree);
  const auto is_size = [](std::size_t bytes, std::size_t max) {
    return bytes >= std::size_t{256} << 10 && bytes <= max && (bytes & (bytes - 1)) == 0;
  };
  fuzz::promise(is_size(device.block_bytes, std::size_t{1} << 20), "block_bytes has limits");
  fuzz::promise(is_size(device.huge_page_block_bytes, std::size_t{4} << 20),
                "huge_page_block_bytes has limits");
  fuzz::promise(device.queue_depth > 0 && device.disks > 0, "a device has a queue and a disk");
  fuzz::promise(device.numa_node >= -1 && device.numa_node < 1024, "a node has a number");
  return 0;
}
