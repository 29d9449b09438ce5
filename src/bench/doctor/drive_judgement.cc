// The drives in sysfs. For a stack of devices (dm, md, loop) it judges the drives below.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>

#include "bench/doctor/judgement.h"
#include "bench/run/sizes.h"

namespace tensorferry::bench {

namespace {

namespace fs = std::filesystem;

struct Drive {
  std::string folder;  // in sysfs
  std::string name;    // in /sys/block

  [[nodiscard]] std::string fact(const std::string& file) const {
    return first_line(folder + "/" + file);
  }
  [[nodiscard]] std::uint64_t number(const std::string& file) const {
    return first_number(folder + "/" + file);
  }
};

std::string name_in(const std::string& folder) {
  std::ifstream lines(folder + "/uevent");
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("DEVNAME=")) continue;
    std::string name = line.substr(line.find('=') + 1);
    std::ranges::replace(name, '/', '!');  // as sysfs writes it
    return name;
  }
  return {};
}

// Finds the drives below a stack of devices.
class Descent {
 public:
  explicit Descent(const SystemTree& tree) : tree_(tree) {}

  void visit(const std::string& number) {
    if (number.empty() || !visited_.insert(number).second) return;
    std::string folder = tree_.sys + "/dev/block/" + number;
    if (!first_line(folder + "/partition").empty()) folder += "/..";
    bool stands_for_itself = true;
    std::error_code error;
    for (fs::directory_iterator slave(folder + "/slaves", error);
         !error && slave != fs::directory_iterator(); slave.increment(error)) {
      visit(first_line(slave->path().string() + "/dev"));
      stands_for_itself = false;
    }
    // A loop device has its own queue and scheduler, beside those of the drive below.
    if (const std::string file = first_line(folder + "/loop/backing_file"); !file.empty()) {
      visit_holder(file);
    }
    if (!stands_for_itself) return;
    if (Drive drive{.folder = folder, .name = name_in(folder)}; !drive.name.empty()) {
      drives_.push_back(std::move(drive));
    }
  }

  [[nodiscard]] std::vector<Drive> drives() && {
    std::ranges::sort(drives_, {}, &Drive::name);
    return std::move(drives_);
  }

 private:
  void visit_holder(const std::string& file) {
    try {
      visit(device_of(file).number);
    } catch (const Error&) {
      return;  // not visible here: in another container, or removed
    }
  }

  const SystemTree& tree_;
  std::set<std::string> visited_;
  std::vector<Drive> drives_;
};

// Virtual disks do not know what they are made of, and many claim to spin.
bool is_virtual(const Drive& drive) {
  static constexpr std::array prefixes{"vd", "xvd", "loop", "zram", "nbd", "rbd", "ram"};
  static constexpr std::array makers{"QEMU", "VMware", "Msft", "Google", "VBOX", "Virtual"};
  const auto begins = [&](const char* prefix) { return drive.name.starts_with(prefix); };
  const std::string maker = drive.fact("device/vendor") + " " + drive.fact("device/model");
  const auto made_by = [&](const char* name) { return maker.find(name) != std::string::npos; };
  return std::ranges::any_of(prefixes, begins) || std::ranges::any_of(makers, made_by);
}

bool spins(const Drive& drive) {
  return drive.fact("queue/rotational") == "1" && !is_virtual(drive);
}

// The text for several drives: once if it is the same for all, else drive by drive.
std::string joined(const std::vector<Drive>& drives,
                   const std::function<std::string(const Drive&)>& said_of) {
  std::vector<std::string> each;
  std::set<std::string> different;
  for (const Drive& drive : drives) {
    const std::string said = said_of(drive);
    different.insert(said);
    each.push_back(drive.name + ": " + said);
  }
  return different.size() == 1 ? *different.begin() : fmt::format("{}", fmt::join(each, "; "));
}

void add_advice(Finding& finding, const std::string& advice) {
  finding.status = FindingStatus::warning;
  finding.advice += (finding.advice.empty() ? "" : "; ") + advice;
}

Finding judge_kind(const std::vector<Drive>& drives) {
  std::vector<std::string> names;
  for (const Drive& drive : drives) {
    const std::string model = drive.fact("device/model");
    const char* nature = spins(drive)                     ? ", spinning"
                         : is_virtual(drive)              ? ", virtual"
                         : drive.name.starts_with("nvme") ? ", NVMe"
                                                          : "";
    names.push_back(drive.name + (model.empty() ? "" : " " + model) + nature);
  }
  Finding finding{.name = "drive", .found = fmt::format("{}", fmt::join(names, "; "))};
  if (std::ranges::any_of(drives, spins)) add_advice(finding, "use an NVMe drive");
  return finding;
}

// The name in brackets: "none [mq-deadline] kyber".
std::string scheduler_of(const Drive& drive) {
  std::string all = drive.fact("queue/scheduler");
  const std::size_t begin = all.find('[');
  if (begin == std::string::npos) return all;
  return all.substr(begin + 1, all.find(']') - begin - 1);
}

Finding judge_scheduler(const std::vector<Drive>& drives) {
  static constexpr std::array slow{"bfq", "cfq", "kyber"};
  Finding finding{.name = "scheduler", .found = joined(drives, scheduler_of)};
  if (finding.found.empty()) finding.found = "none";
  for (const Drive& drive : drives) {
    const std::string scheduler = scheduler_of(drive);
    if (std::ranges::find(slow, scheduler) == slow.end()) continue;
    add_advice(finding, fmt::format("as root: echo {} > /sys/block/{}/queue/scheduler",
                                    spins(drive) ? "mq-deadline" : "none", drive.name));
  }
  return finding;
}

Finding judge_queue(const std::vector<Drive>& drives) {
  constexpr std::uint64_t least_kb = 256;  // the smallest block of large transfers
  constexpr std::uint64_t good_kb = 1024;
  Finding finding{.name = "queue", .found = joined(drives, [](const Drive& drive) {
                                     return fmt::format(
                                         "{} per request, {} segments, {} queued",
                                         rounded_size(drive.number("queue/max_sectors_kb") * KiB),
                                         drive.number("queue/max_segments"),
                                         drive.number("queue/nr_requests"));
                                   })};
  for (const Drive& drive : drives) {
    const std::uint64_t now = drive.number("queue/max_sectors_kb");
    const std::uint64_t most = drive.number("queue/max_hw_sectors_kb");
    if (now == 0 || now >= least_kb || most <= now) continue;  // the drive takes no more
    add_advice(finding, fmt::format("as root: echo {} > /sys/block/{}/queue/max_sectors_kb",
                                    std::min(most, good_kb), drive.name));
  }
  return finding;
}

// Whether this process may run on a processor in a list such as "0-3,8-11".
bool may_run_on(const std::string& list) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return true;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream ends(range);
    std::size_t first = 0;
    ends >> first;
    std::size_t last = first;
    if (char dash = 0; ends >> dash) ends >> last;
    for (std::size_t processor = first; processor <= last && processor < CPU_SETSIZE; ++processor) {
      if (CPU_ISSET(processor, &allowed)) return true;
    }
  }
  return false;
}

std::string node_of(const Drive& drive) {
  for (const char* file : {"device/numa_node", "device/device/numa_node"}) {
    if (const std::string node = drive.fact(file); !node.empty() && node != "-1") return node;
  }
  return {};
}

Finding judge_node(const std::vector<Drive>& drives, const SystemTree& tree) {
  const std::size_t nodes = count_numbered(tree.sys + "/devices/system/node", "node");
  if (nodes < 2) return {.name = "NUMA", .found = "one node: every processor is near"};
  const auto processors_near = [&](const Drive& drive) {
    return first_line(tree.sys + "/devices/system/node/node" + node_of(drive) + "/cpulist");
  };
  Finding finding{.name = "NUMA", .found = joined(drives, [&](const Drive& drive) {
                                    const std::string node = node_of(drive);
                                    return node.empty()
                                               ? fmt::format("unknown node of {}", nodes)
                                               : fmt::format("node {} of {}, near processors {}",
                                                             node, nodes, processors_near(drive));
                                  })};
  for (const Drive& drive : drives) {
    const std::string node = node_of(drive);
    if (node.empty() || may_run_on(processors_near(drive))) continue;
    finding.status = FindingStatus::warning;
    finding.advice = fmt::format(
        "this process may not run on processors near the drive; start it with numactl "
        "--cpunodebind={0} --membind={0}",
        node);
  }
  return finding;
}

}  // namespace

std::vector<Finding> judge_drives(const std::string& device_number, const SystemTree& tree) {
  Descent descent(tree);
  descent.visit(device_number);
  const std::vector<Drive> drives = std::move(descent).drives();
  if (drives.empty()) {
    return {{.name = "drive",
             .status = FindingStatus::warning,
             .found = "no block device is visible under it",
             .advice = "doctor could not check its scheduler and queue",
             .concern = Concern::nothing}};
  }
  return {judge_kind(drives), judge_scheduler(drives), judge_queue(drives),
          judge_node(drives, tree)};
}

}  // namespace tensorferry::bench
