#include "bench/doctor/judgement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "bench/run/sizes.h"

namespace tensorferry::bench {

namespace {

bool filtered_by_seccomp(const SystemTree& tree) {
  std::ifstream lines(tree.proc + "/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("Seccomp:")) return line.ends_with('2');
  }
  return false;
}

bool has_option(const std::string& options, std::string_view wanted) {
  std::istringstream words(options);
  for (std::string word; std::getline(words, word, ',');) {
    if (word == wanted) return true;
  }
  return false;
}

// "compress" matches "compress=zstd:3" and "compress-force=lzo".
bool has_option_like(const std::string& options, std::string_view beginning) {
  return ("," + options).find("," + std::string(beginning)) != std::string::npos;
}

struct KnownProblem {
  std::string found;
  std::string advice;
};

std::optional<KnownProblem> problem_of_kind(const Volume& volume) {
  static constexpr std::array in_memory{"tmpfs", "ramfs", "devtmpfs"};
  static constexpr std::array by_network{"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs"};
  const std::string& kind = volume.file_system;
  if (std::ranges::find(in_memory, kind) != in_memory.end()) {
    return KnownProblem{"memory, not a drive", "use a directory on an NVMe drive"};
  }
  if (std::ranges::find(by_network, kind) != by_network.end()) {
    return KnownProblem{"a network file system, not a drive of this machine",
                        "use a directory on a local NVMe drive"};
  }
  if (kind.starts_with("fuse")) {
    return KnownProblem{"a program serves it and copies every byte",
                        "use a directory on ext4 or xfs"};
  }
  if (kind == "overlay") {
    return KnownProblem{"the layers of a container: the first write to a file copies all of it",
                        "mount a directory of the host into the container (docker run -v)"};
  }
  if (kind == "zfs") {
    return KnownProblem{"it copies on every write and checks every block",
                        "use a directory on ext4 or xfs"};
  }
  if (kind == "btrfs" && has_option_like(volume.mount_options, "compress")) {
    return KnownProblem{"it compresses, so no byte goes straight to the drive",
                        "mount it without compress, or use a directory on ext4 or xfs"};
  }
  if (kind == "btrfs" && !has_option(volume.mount_options, "nodatacow")) {
    return KnownProblem{"it copies on every write and computes checksums",
                        "run `chattr +C` on an empty directory for the files, or use ext4 or xfs"};
  }
  return {};
}

}  // namespace

std::size_t count_numbered(const std::string& folder, std::string_view prefix) {
  namespace fs = std::filesystem;
  std::size_t count = 0;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.size() > prefix.size() && name.starts_with(prefix) &&
        name.find_first_not_of("0123456789", prefix.size()) == std::string::npos) {
      ++count;
    }
  }
  return count;
}

Finding judge_kernel(const std::string& release) {
  unsigned major = 0;
  unsigned minor = 0;
  char dot = 0;
  std::istringstream(release) >> major >> dot >> minor;
  Finding finding{.name = "kernel", .found = "Linux " + release};
  if (major > 5 || (major == 5 && minor >= 11)) return finding;
  finding.status = FindingStatus::warning;
  finding.found += ", too old for io_uring";
  finding.advice = "use Linux 5.11 or later; 6.1 or later is best";
  return finding;
}

Finding judge_io_uring(const std::optional<Error>& refusal, const SystemTree& tree) {
  if (!refusal) return {.name = "io_uring", .found = "works"};
  Finding finding{.name = "io_uring",
                  .status = FindingStatus::missing,
                  .found = refusal->what(),
                  .advice = refusal->hint()};
  const int code = refusal->code();
  // The sysctl and the build of the kernel affect this call alone.
  const bool at_setup = refusal->operation() == "io_uring_setup";
  const std::string setting = first_line(tree.proc + "/sys/kernel/io_uring_disabled");
  if (at_setup && code == EPERM && (setting == "1" || setting == "2")) {
    finding.found = "the sysctl kernel.io_uring_disabled is " + setting + ", which forbids it";
    finding.advice = "as root: sysctl -w kernel.io_uring_disabled=0";
    if (setting == "1") finding.advice += ", or join the group kernel.io_uring_group";
  } else if ((code == EPERM || code == ENOSYS) && filtered_by_seccomp(tree)) {
    finding.found =
        refusal->operation() + " is blocked by a seccomp filter, probably that of the container";
    finding.advice =
        "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile "
        "(docker run --security-opt seccomp=FILE)";
  } else if (at_setup && code == ENOSYS) {
    finding.found = "this kernel is too old, or was built without io_uring";
    finding.advice = "use a kernel with CONFIG_IO_URING, 5.11 or later";
  } else if (code == ENOMEM) {
    finding.found = "no memory for a ring, or the memlock limit is too low";
    finding.advice = "raise the limit: ulimit -l unlimited";
  }
  return finding;
}

Finding judge_libaio(const std::optional<Error>& refusal, Concern concern, const SystemTree& tree) {
  const std::uint64_t most = first_number(tree.proc + "/sys/fs/aio-max-nr");
  const std::uint64_t used = first_number(tree.proc + "/sys/fs/aio-nr");
  Finding finding{.name = "libaio",
                  .found = fmt::format("works; {} of {} requests in use", used, most),
                  .concern = concern};
  constexpr std::uint64_t enough = 4096;  // 32 workers with 128 requests each
  const bool short_of = most > 0 && most - std::min(used, most) < enough;
  if (refusal) {
    finding.status = FindingStatus::missing;
    finding.found = short_of ? fmt::format("{} of {} requests in use", used, most)
                             : std::string(refusal->what());
    finding.advice = refusal->hint();
  } else if (short_of) {
    finding.status = FindingStatus::warning;
  }
  if (short_of) finding.advice = "as root: sysctl -w fs.aio-max-nr=1048576";
  return finding;
}

Finding judge_memlock(const LockTrial& trial) {
  const bool unlimited = trial.limit_bytes == RLIM_INFINITY;
  const std::string limit = unlimited ? "no limit" : "limit " + rounded_size(trial.limit_bytes);
  const std::string tried = rounded_size(trial.bytes);
  if (trial.problem.empty()) {
    const bool exempt = trial.limit_bytes < trial.bytes;
    return {.name = "memlock",
            .found = fmt::format("{} can be locked; {}{}", tried, limit,
                                 exempt ? ", which does not apply to a privileged process" : "")};
  }
  const bool limited = trial.limit_bytes < trial.bytes;
  return {.name = "memlock",
          .status = FindingStatus::warning,
          .found = limited ? fmt::format("{} cannot be locked; {}", tried, limit) : trial.problem,
          .advice = limited
                        ? "raise the limit: `* - memlock unlimited` in /etc/security/limits.conf, "
                          "LimitMEMLOCK=infinity for systemd, --ulimit memlock=-1 for docker"
                        : "free memory, or give the container more"};
}

Finding judge_huge_pages(const std::string& problem, const SystemTree& tree) {
  const std::string file = "/kernel/mm/transparent_hugepage/enabled";
  const std::string setting = first_line(tree.sys + file);
  Finding finding{.name = "huge pages", .found = "transparent huge pages: " + setting};
  if (setting.empty() || setting.find("[never]") != std::string::npos) {
    finding.status = FindingStatus::warning;
    if (setting.empty()) finding.found = "this kernel has no transparent huge pages";
    finding.advice = "as root: echo madvise > /sys" + file;
    if (setting.empty()) finding.advice = "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE";
  } else if (!problem.empty()) {
    // It goes away when memory becomes free, and costs little.
    finding.status = FindingStatus::warning;
    finding.found = problem;
    finding.advice = "as root: echo 1 > /proc/sys/vm/compact_memory, or free memory";
    finding.concern = Concern::nothing;
  }
  return finding;
}

Finding judge_file_system(const Volume& volume) {
  Finding finding{.name = "file system",
                  .found = fmt::format("{} at {} ({})", volume.file_system, volume.mount_point,
                                       volume.mount_options)};
  if (const auto problem = problem_of_kind(volume)) {
    finding.status = FindingStatus::warning;
    finding.found =
        fmt::format("{} at {}: {}", volume.file_system, volume.mount_point, problem->found);
    finding.advice = problem->advice;
  } else if (has_option(volume.mount_options, "sync")) {
    finding.status = FindingStatus::warning;
    finding.found += ": every write waits for the drive";
    finding.advice = "as root: mount -o remount,async " + volume.mount_point;
  } else if (has_option(volume.mount_options, "ro")) {
    finding.status = FindingStatus::missing;
    finding.found += ": read-only";
    finding.advice = "as root: mount -o remount,rw " + volume.mount_point;
  }
  return finding;
}

Finding judge_space(const Volume& volume) {
  const bool little = volume.free_bytes < 2 * GiB || volume.free_bytes < volume.bytes / 10;
  return {
      .name = "free space",
      .status = little ? FindingStatus::warning : FindingStatus::ok,
      .found = fmt::format("{} of {}", rounded_size(volume.free_bytes), rounded_size(volume.bytes)),
      .advice = little
                    ? "free some space: full drives write slowly, and swapped tensors may not fit"
                    : ""};
}

Finding judge_profile(const Device& device) {
  Finding finding{.name = "settings", .found = "defaults; `tensorferry tune` finds better ones"};
  const std::string path = profile_path(device);
  if (!device.profile_problem.empty()) {
    finding.status = FindingStatus::warning;
    finding.found = "the tuned settings are not used: " + device.profile_problem;
    finding.advice = "run `tensorferry tune` again, or remove " + path;
  } else if (device.profile) {
    const Profile& tuned = *device.profile;
    finding.found =
        fmt::format("tuned: {}, block {}, depth {}, workers {} ({})", to_string(tuned.engine),
                    size_text(tuned.block_bytes), tuned.queue_depth, tuned.workers, path);
  } else if (path.empty()) {
    finding.found = "defaults; tuned settings cannot be stored for this directory";
  }
  return finding;
}

}  // namespace tensorferry::bench
