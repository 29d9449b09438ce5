#include "files/device.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "os/fork_mutex.h"
#include "os/numa.h"
#include "os/system.h"
#include "tensorferry/error.h"

namespace tensorferry::files {

namespace {

struct Number {
  unsigned major = 0;
  unsigned minor = 0;
  auto operator<=>(const Number&) const = default;
};

std::string to_text(Number number) {
  return std::to_string(number.major) + ":" + std::to_string(number.minor);
}

// Takes the text up to `separator`, or all of it, off the front.
std::string_view take(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view front = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return front;
}

std::optional<unsigned> parse(std::string_view text) {
  unsigned value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

std::optional<Number> parse_number(std::string_view text) {
  const auto major = parse(take(text, ':'));
  const auto minor = parse(text);
  if (!major || !minor) return {};
  return Number{*major, *minor};
}

std::string first_line_of(const std::string& path) {
  std::string text = os::read_text(path);
  text.resize(std::min(text.find('\n'), text.size()));
  return text;
}

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// 0 if the file is absent or holds no number.
std::size_t size_in(const std::string& path) { return parse(first_line_of(path)).value_or(0); }

// mountinfo writes blank, tab, newline and backslash in paths as \ooo.
std::string unescape(std::string_view text) {
  const auto octal = [](char c) { return c >= '0' && c <= '7'; };
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && octal(text[i + 1]) && octal(text[i + 2]) &&
        octal(text[i + 3])) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                                 (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

std::optional<struct statx> facts_of(const std::string& path) {
  struct statx facts{};
  if (os::System::real().stat_path(path.c_str(), STATX_TYPE, &facts) < 0) return {};
  return facts;
}

std::optional<Number> holder_of(const std::string& path) {
  const auto facts = facts_of(path);
  if (!facts) return {};
  return Number{facts->stx_dev_major, facts->stx_dev_minor};
}

struct Mount {
  Number number;
  std::string point;
  std::string_view kind;
  std::string source;
  std::string_view options;  // of the file system, not of the mount
};

// "36 35 98:0 /root /mount/point rw,noatime master:1 - ext4 /dev/vda rw,errors=continue"
std::optional<Mount> parse_mount(std::string_view line) {
  take(line, ' ');
  take(line, ' ');
  const auto number = parse_number(take(line, ' '));
  take(line, ' ');
  const std::string_view point = take(line, ' ');
  const std::size_t separator = line.find(" - ");
  if (!number || separator == std::string_view::npos) return {};
  line.remove_prefix(separator + 3);
  const std::string_view kind = take(line, ' ');
  const std::string_view source = take(line, ' ');
  return Mount{*number, unescape(point), kind, unescape(source), line};
}

std::string upper_directory(std::string_view options) {
  while (!options.empty()) {
    std::string_view option = take(options, ',');
    if (take(option, '=') == "upperdir") return unescape(option);
  }
  return {};
}

// Collects the hints of a device and of all devices below it.
class Inspection {
 public:
  explicit Inspection(const SystemTree& tree) : tree_(tree) {}

  void visit(Number number, unsigned depth) {
    if (depth > depth_max || std::ranges::find(visited_, number) != visited_.end()) return;
    visited_.push_back(number);
    const std::string folder = tree_.sys + "/dev/block/" + to_text(number);
    if (os::read_text(folder + "/dev").empty()) {
      visit_mount(number, depth);
      return;
    }
    // The folder of a partition lies in that of its disk, which has the queue.
    const bool partition = !os::read_text(folder + "/partition").empty();
    const std::string disk = partition ? folder + "/.." : folder;
    take_hints(disk);
    const std::size_t visited_before = visited_.size();
    visit_slaves(disk + "/slaves", depth);
    const std::string backing_file = first_line_of(disk + "/loop/backing_file");
    if (!backing_file.empty()) {
      const bool before = device_.prefers_huge_pages;
      if (const auto holder = holder_of(backing_file)) visit(*holder, depth + 1);
      device_.prefers_huge_pages = before;  // requests end at the loop device, in the page cache
    }
    if (visited_.size() == visited_before) {
      physical_.insert(first_line_of(disk + "/dev"));
      add_nodes(disk);
      if (os::real_path(disk + "/device/driver").ends_with("/virtio_blk")) {
        device_.prefers_huge_pages = true;
      }
    }
  }

  Device result() && {
    if (device_.request_bytes_max > 0) {
      device_.block_bytes =
          std::clamp(std::bit_floor(device_.request_bytes_max), 256 * KiB, 1 * MiB);
    }
    device_.huge_page_block_bytes =
        std::clamp(std::bit_floor(huge_request_bytes_max_), device_.block_bytes, 4 * MiB);
    device_.disks = static_cast<unsigned>(std::max<std::size_t>(physical_.size(), 1));
    const std::size_t wanted = device_.disks * in_flight_bytes / device_.block_bytes;
    const std::size_t held = queue_requests_ > 0 ? queue_requests_ : wanted;
    device_.queue_depth = static_cast<unsigned>(
        std::clamp<std::size_t>(std::min(wanted, held), queue_depth_min, queue_depth_max));
    device_.numa_node = numa_node();
    return std::move(device_);
  }

 private:
  static constexpr unsigned depth_max = 8;  // real stacks of devices are lower

  // Enough to keep the measured drives busy; more only adds latency (docs/performance.md).
  static constexpr std::size_t in_flight_bytes = 16 * MiB;
  static constexpr std::size_t queue_depth_min = 4;
  static constexpr std::size_t queue_depth_max = 128;

  void take_hints(const std::string& disk) {
    if (device_.name.empty()) {
      device_.name = name_of(disk);
      device_.number = first_line_of(disk + "/dev");
      device_.identity = identity_of(disk);
      device_.polled_queues = size_in(disk + "/queue/io_poll") > 0;
    }
    const std::string queue = disk + "/queue/";
    const std::size_t sectors_bytes = size_in(queue + "max_sectors_kb") * KiB;
    const std::size_t segments = size_in(queue + "max_segments");
    const std::size_t segment_bytes = size_in(queue + "max_segment_size");
    limit(device_.request_bytes_max, sectors_bytes);
    limit(device_.request_bytes_max, segments * page_bytes());
    limit(huge_request_bytes_max_, sectors_bytes);
    limit(huge_request_bytes_max_, segments * std::min(segment_bytes, huge_page_bytes));
    // The disks limit what a stack of devices holds, so the lowest device counts.
    if (const std::size_t held = size_in(queue + "nr_requests"); held > 0) queue_requests_ = held;
    const std::size_t logical = size_in(queue + "logical_block_size");
    if (std::has_single_bit(logical)) {
      device_.logical_block_bytes = std::max(device_.logical_block_bytes, logical);
    }
  }

  // In both, 0 means unknown.
  static void limit(std::size_t& known, std::size_t bytes) {
    if (bytes > 0) known = known == 0 ? bytes : std::min(known, bytes);
  }

  static std::string name_of(const std::string& disk) {
    const std::string text = os::read_text(disk + "/uevent");
    for (std::string_view lines = text; !lines.empty();) {
      std::string_view line = take(lines, '\n');
      if (take(line, '=') == "DEVNAME") return std::string(line);
    }
    return {};
  }

  // Serial numbers stay with the drive; name and size are the next best.
  [[nodiscard]] std::string identity_of(const std::string& disk) const {
    for (const char* file :
         {"/wwid", "/device/wwid", "/serial", "/device/serial", "/dm/uuid", "/md/uuid"}) {
      if (std::string text = trimmed(first_line_of(disk + file)); !text.empty()) return text;
    }
    return device_.name + "-" + first_line_of(disk + "/size");
  }

  template <class Use>
  static void for_each_in(const std::string& folder, Use use) {
    std::error_code error;
    std::filesystem::directory_iterator entry(folder, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      use(entry->path());
    }
  }

  void visit_slaves(const std::string& folder, unsigned depth) {
    for_each_in(folder, [&](const std::filesystem::path& path) {
      const auto slave = parse_number(first_line_of(path.string() + "/dev"));
      if (slave) visit(*slave, depth + 1);
    });
  }

  // A bus knows the NUMA node of what is attached to it. -1 if nothing from the device upwards
  // knows it.
  [[nodiscard]] int node_above(const std::string& device) const {
    const std::string top = os::real_path(tree_.sys);
    std::string folder = os::real_path(device);
    for (; folder.size() > top.size(); folder.resize(folder.rfind('/'))) {
      const auto node = parse(first_line_of(folder + "/numa_node"));
      if (node && *node < os::numa_nodes_max) return static_cast<int>(*node);
    }
    return -1;
  }

  // A drive that several controllers share hangs below an NVMe subsystem, which is on no bus. Links
  // lead from there to the controllers.
  void add_nodes(const std::string& disk) {
    bool found = false;
    for_each_in(disk + "/device", [&](const std::filesystem::path& path) {
      if (!path.filename().string().starts_with("nvme")) return;
      const int node = node_above(path.string());
      if (node >= 0) nodes_.insert(node);
      found = found || node >= 0;
    });
    if (!found) nodes_.insert(node_above(disk + "/device"));
  }

  [[nodiscard]] int numa_node() const {
    if (nodes_.size() != 1 || *nodes_.begin() < 0) return -1;
    const int node = *nodes_.begin();
    const auto known = os::read_numa_nodes(tree_.sys + "/devices/system/node");
    const bool exists = std::ranges::find(known, node, &os::NumaNode::number) != known.end();
    return exists && known.size() > 1 ? node : -1;
  }

  // sysfs does not know anonymous device numbers (btrfs, overlay, tmpfs, network file systems).
  // Each btrfs subvolume has another number, which not even mountinfo knows.
  void visit_mount(Number number, unsigned depth) {
    const auto is_mount = [number](const Mount& mount) { return mount.number == number; };
    const auto is_subvolume = [number](const Mount& mount) {
      return mount.kind == "btrfs" && holder_of(mount.point) == number;
    };
    auto below = find_below(is_mount);
    if (!below) below = find_below(is_subvolume);
    if (below) visit(*below, depth + 1);
  }

  template <class Matches>
  std::optional<Number> find_below(Matches matches) const {
    const std::string text = os::read_text(tree_.mountinfo);
    for (std::string_view lines = text; !lines.empty();) {
      const auto mount = parse_mount(take(lines, '\n'));
      if (!mount || !matches(*mount)) continue;
      if (const auto below = device_under(*mount)) return below;
    }
    return {};
  }

  std::optional<Number> device_under(const Mount& mount) const {
    if (mount.kind == "overlay") return holder_of(upper_directory(mount.options));
    if (!mount.source.starts_with("/dev/")) return {};
    const auto facts = facts_of(mount.source);
    if (facts && S_ISBLK(facts->stx_mode)) {
      return Number{facts->stx_rdev_major, facts->stx_rdev_minor};
    }
    // A container may lack a node for the device, but sysfs still knows its name.
    const std::string name = mount.source.substr(mount.source.rfind('/') + 1);
    return parse_number(first_line_of(tree_.sys + "/class/block/" + name + "/dev"));
  }

  const SystemTree& tree_;
  std::vector<Number> visited_;
  std::set<std::string> physical_;  // numbers of the disks at the bottom
  std::set<int> nodes_;             // of these disks; -1: unknown
  std::size_t queue_requests_ = 0;
  std::size_t huge_request_bytes_max_ = 0;  // request_bytes_max for memory of huge pages
  Device device_;
};

// The cache of device_of(). Made on first use and never destroyed, because threads may ask before
// and after main().
constinit std::mutex devices_guard;
constinit std::map<Number, Device>* devices = nullptr;

std::mutex& devices_mutex() { return devices_guard; }
[[maybe_unused]] const int device_fork_watch = os::hold_during_forks<devices_mutex>();

}  // namespace

Device inspect_device(unsigned major, unsigned minor, const SystemTree& tree) {
  Inspection inspection(tree);
  inspection.visit({major, minor}, 0);
  return std::move(inspection).result();
}

const Device& device_of(unsigned major, unsigned minor) {
  const Number number{major, minor};
  {
    const std::lock_guard lock(devices_mutex());
    if (devices == nullptr) devices = new std::map<Number, Device>();
    if (const auto found = devices->find(number); found != devices->end()) return found->second;
  }
  Device device = inspect_device(major, minor);
  take_profile(device);
  const std::lock_guard lock(devices_mutex());
  return devices->try_emplace(number, std::move(device)).first->second;
}

}  // namespace tensorferry::files

namespace tensorferry {

Device device_of(const std::string& path) {
  struct statx facts{};
  const int code = os::System::real().stat_path(path.c_str(), STATX_TYPE, &facts);
  if (code < 0) {
    throw Error({.operation = "find device",
                 .path = path,
                 .code = -code,
                 .hint = "give a path on the drive"});
  }
  if (S_ISBLK(facts.stx_mode)) return files::device_of(facts.stx_rdev_major, facts.stx_rdev_minor);
  return files::device_of(facts.stx_dev_major, facts.stx_dev_minor);
}

}  // namespace tensorferry
