// Profiles: one small text file per device, a name and a value on each line.
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>

#include "base/alignment.h"
#include "files/device.h"
#include "os/environment.h"
#include "os/system.h"
#include "tensorferry/error.h"

namespace tensorferry {

namespace {

constexpr std::size_t block_bytes_max = GiB;
constexpr unsigned queue_depth_max = 4096;
constexpr unsigned workers_max = 256;
constexpr std::uint64_t bytes_per_second_max = 1'000'000'000'000'000;
constexpr std::size_t text_bytes_max = 4 * KiB;

std::string profile_directory() {
  if (const auto chosen = os::variable("TENSORFERRY_PROFILES")) return *chosen;
  std::string config = os::variable("XDG_CONFIG_HOME").value_or("");
  if (config.empty()) {
    const std::string home = os::variable("HOME").value_or("");
    if (!home.empty()) config = home + "/.config";
  }
  return config.empty() ? config : config + "/tensorferry/profiles";
}

// A file name for an identity.
std::string file_name_of(const std::string& identity) {
  constexpr std::size_t length_max = 120;
  std::string name = identity.substr(0, length_max);
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0 && c != '.' && c != '-'; }, '_');
  return name + ".profile";
}

template <class Number>
bool parse(std::string_view text, Number max, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value > 0 && value <= max;
}

bool apply(Profile& profile, const std::string& name, const std::string& value) {
  if (name == "block_bytes") return parse(value, block_bytes_max, profile.block_bytes);
  if (name == "queue_depth") return parse(value, queue_depth_max, profile.queue_depth);
  if (name == "workers") return parse(value, workers_max, profile.workers);
  if (name == "read_bytes_per_second") {
    return parse(value, bytes_per_second_max, profile.read_bytes_per_second);
  }
  if (name == "write_bytes_per_second") {
    return parse(value, bytes_per_second_max, profile.write_bytes_per_second);
  }
  if (name != "engine") return false;
  try {
    profile.engine = parse_engine_kind(value);
  } catch (const Error&) {
    return false;
  }
  return true;
}

Error failure(const std::string& path, int code, std::string hint) {
  return Error({.operation = "save profile", .path = path, .code = code, .hint = std::move(hint)});
}

}  // namespace

std::string profile_path(const Device& device) {
  const std::string directory = profile_directory();
  if (directory.empty() || device.name.empty() || device.identity.empty()) return {};
  return directory + "/" + file_name_of(device.identity);
}

std::string save_profile(const Device& device, const Profile& profile) {
  const std::string path = profile_path(device);
  if (path.empty()) {
    throw failure(path, ENOENT,
                  "no block device, or no directory for profiles; set HOME or "
                  "TENSORFERRY_PROFILES");
  }
  std::ostringstream text;
  text << "# Measured by `tensorferry tune` on " << device.name
       << ". A Handle uses it for settings that its options\n"
       << "# leave open. Remove this file to go back to the defaults.\n"
       << "engine " << to_string(profile.engine) << "\nblock_bytes " << profile.block_bytes
       << "\nqueue_depth " << profile.queue_depth << "\nworkers " << profile.workers << '\n';
  if (profile.read_bytes_per_second > 0) {
    text << "read_bytes_per_second " << profile.read_bytes_per_second << '\n';
  }
  if (profile.write_bytes_per_second > 0) {
    text << "write_bytes_per_second " << profile.write_bytes_per_second << '\n';
  }
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (error) throw failure(path, error.value(), "the directory of the profile cannot be made");
  constexpr mode_t mode = 0666;  // minus the umask: other users may use it too
  const int kept = os::replace_file(path, text.str(), mode);
  if (kept < 0) throw failure(path, -kept, "check owner, mode and free space of the directory");
  return path;
}

namespace files {

void take_profile(Device& device) {
  const std::string path = profile_path(device);
  if (path.empty()) return;
  const std::string text = os::read_text(path);
  if (text.empty()) return;
  Profile profile;
  bool sound = text.size() <= text_bytes_max;
  std::istringstream lines(text);
  for (std::string line; sound && std::getline(lines, line);) {
    if (line.empty() || line.front() == '#') continue;
    const std::size_t blank = line.find(' ');
    sound =
        blank != std::string::npos && apply(profile, line.substr(0, blank), line.substr(blank + 1));
  }
  if (!sound || profile.block_bytes == 0 || profile.queue_depth == 0 || profile.workers == 0) {
    device.profile_problem =
        "the profile " + path + " is damaged and is not used; run tensorferry tune again";
    return;
  }
  device.profile = profile;
}

}  // namespace files

}  // namespace tensorferry
