#include "bench/run/volume.h"

#include <mntent.h>
#include <sys/statvfs.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <thread>

#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

bool lies_below(const std::string& path, const std::string& mount_point) {
  if (mount_point == "/") return true;
  return path == mount_point || path.starts_with(mount_point + "/");
}

// The deepest mount above the path counts; of several at one point the last.
void find_mount(Volume& volume) {
  const auto close = [](FILE* file) { endmntent(file); };
  const std::unique_ptr<FILE, decltype(close)> table(setmntent("/proc/self/mounts", "re"), close);
  if (table == nullptr) return;
  std::array<char, std::size_t{16} * 1024> text{};
  mntent entry{};
  while (getmntent_r(table.get(), &entry, text.data(), static_cast<int>(text.size())) != nullptr) {
    const std::string point = entry.mnt_dir;
    if (!lies_below(volume.directory, point) || point.size() < volume.mount_point.size()) continue;
    volume.mount_point = point;
    volume.file_system = entry.mnt_type;
    volume.mount_options = entry.mnt_opts;
  }
}

std::string processor() {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return {};
}

}  // namespace

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  const std::size_t begin = line.find_first_not_of(" \t");
  if (begin == std::string::npos) return {};
  return line.substr(begin, line.find_last_not_of(" \t") - begin + 1);
}

std::uint64_t first_number(const std::string& path) {
  std::uint64_t number = 0;
  std::istringstream(first_line(path)) >> number;
  return number;
}

std::string device_fact(const Device& device, const std::string& file) {
  if (device.number.empty()) return {};
  return first_line("/sys/dev/block/" + device.number + "/" + file);
}

std::optional<std::uint64_t> bytes_read_by(const Device& device) {
  constexpr std::uint64_t sector_bytes = 512;
  std::istringstream words(device_fact(device, "stat"));
  std::uint64_t reads = 0;
  std::uint64_t merges = 0;
  std::uint64_t sectors = 0;
  if (!(words >> reads >> merges >> sectors)) return {};
  return sectors * sector_bytes;
}

Volume volume_of(const std::string& directory) {
  Volume volume;
  std::error_code error;
  volume.directory = std::filesystem::canonical(directory, error).string();
  struct statvfs facts{};
  if (!error && statvfs(volume.directory.c_str(), &facts) != 0) {
    error.assign(errno, std::generic_category());
  }
  if (error) {
    throw Error(
        {.operation = "use directory",
         .path = directory,
         .code = error.value(),
         .hint = error.value() == ENOENT ? "create the directory first, or name another" : ""});
  }
  volume.bytes = std::uint64_t{facts.f_blocks} * facts.f_frsize;
  volume.free_bytes = std::uint64_t{facts.f_bavail} * facts.f_frsize;
  volume.device = device_of(volume.directory);
  find_mount(volume);
  return volume;
}

Json to_json(const Volume& volume) {
  const Device& device = volume.device;
  Json drive = {{"name", device.name},
                {"model", device_fact(device, "device/model")},
                {"disks", device.disks},
                {"logical_block_bytes", device.logical_block_bytes},
                {"request_bytes_max", device.request_bytes_max},
                {"block_bytes", device.block_bytes},
                {"queue_depth", device.queue_depth}};
  for (const char* fact : {"scheduler", "rotational", "nr_requests", "write_cache"}) {
    drive[fact] = device_fact(device, std::string("queue/") + fact);
  }
  return {{"directory", volume.directory},
          {"drive", drive},
          {"file_system",
           {{"kind", volume.file_system},
            {"mount_point", volume.mount_point},
            {"mount_options", volume.mount_options},
            {"bytes", volume.bytes},
            {"free_bytes", volume.free_bytes}}}};
}

Json machine_facts() {
  utsname names{};
  uname(&names);
  struct sysinfo memory{};
  sysinfo(&memory);
  return {{"host", names.nodename},
          {"kernel", std::string(names.sysname) + " " + names.release},
          {"architecture", names.machine},
          {"processor", processor()},
          {"processors", std::thread::hardware_concurrency()},
          {"memory_bytes", std::uint64_t{memory.totalram} * memory.mem_unit}};
}

}  // namespace tensorferry::bench
