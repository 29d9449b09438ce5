#include "bench/run/results.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "bench/run/owned_descriptor.h"
#include "tensorferry/error.h"
#include "tensorferry/version.h"

namespace tensorferry::bench {

namespace {

Error failure(const char* operation, const std::string& path, int code, std::string hint = {}) {
  return Error({.operation = operation,
                .path = path,
                .code = code != 0 ? code : EIO,
                .hint = std::move(hint)});
}

}  // namespace

Json begin_results(const std::string& command, const std::vector<std::string>& arguments,
                   std::span<const Volume> volumes) {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm utc{};
  gmtime_r(&now, &utc);
  Json results = {{"format", "tensorferry-results"},
                  {"version", results_version},
                  {"command", command},
                  {"arguments", arguments},
                  {"tensorferry", TENSORFERRY_VERSION},
                  {"started", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", utc)},
                  {"complete", false},
                  {"machine", machine_facts()},
                  {"places", Json::array()}};
  for (const Volume& volume : volumes) results["places"].push_back(to_json(volume));
  return results;
}

namespace {

namespace fs = std::filesystem;

// Whether a new file may replace the path. Pipes, terminals, links (also /dev/stdout) and files
// with several names must be written in place.
bool replaceable(const std::string& path) {
  struct stat facts{};
  if (lstat(path.c_str(), &facts) != 0) return errno == ENOENT;
  return S_ISREG(facts.st_mode) && facts.st_nlink == 1;
}

class Output {
 public:
  Output(const std::string& path, int flags, mode_t mode)
      : file_(path, O_WRONLY | O_CREAT | flags, mode) {}

  [[nodiscard]] bool opened() const noexcept { return file_.opened(); }

  // Gives the new file the owner and mode of the old one.
  void take_rights_of(const struct stat& before) const {
    if (fchown(file_.get(), before.st_uid, before.st_gid) != 0) errno = 0;  // only root may do so
    fchmod(file_.get(), before.st_mode & 07777U);
  }

  [[nodiscard]] bool write_all(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t wrote = write(file_.get(), text.data(), text.size());
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return false;
      text.remove_prefix(static_cast<std::size_t>(wrote));
    }
    return true;
  }

 private:
  OwnedDescriptor file_;
};

void replace_text(const std::string& path, const std::string& text) {
  constexpr mode_t mode_of_new_files = 0666;  // before the umask
  constexpr mode_t mode_until_known = 0600;
  struct stat before{};
  const bool exists = lstat(path.c_str(), &before) == 0;
  const std::string fresh = path + ".new-" + std::to_string(getpid());
  const auto give_up = [&](int code) {
    unlink(fresh.c_str());
    return failure("write", path, code);
  };
  {
    const Output output(fresh, O_EXCL, exists ? mode_until_known : mode_of_new_files);
    if (!output.opened()) throw failure("write", path, errno);
    if (exists) output.take_rights_of(before);
    if (!output.write_all(text)) throw give_up(errno);
  }
  if (rename(fresh.c_str(), path.c_str()) != 0) throw give_up(errno);
}

}  // namespace

void check_writable(const std::string& path) {
  struct stat facts{};
  if (stat(path.c_str(), &facts) == 0) {
    if (S_ISDIR(facts.st_mode)) throw failure("write", path, EISDIR);
    if (access(path.c_str(), W_OK) != 0) throw failure("write", path, errno);
    return;
  }
  const std::string parent = fs::path(path).parent_path().string();
  if (access(parent.empty() ? "." : parent.c_str(), W_OK) != 0) {
    throw failure("write", path, errno, errno == ENOENT ? "create its directory first" : "");
  }
}

void write_text(const std::string& path, const std::string& text) {
  check_writable(path);
  if (replaceable(path)) {
    replace_text(path, text);
    return;
  }
  const Output output(path, O_TRUNC, 0666);
  if (!output.opened() || !output.write_all(text)) throw failure("write", path, errno);
}

void write_json(const std::string& path, const Json& json) {
  write_text(path, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

Json read_json(const std::string& path) {
  // Reading a pipe would block.
  if (fs::exists(path) && !fs::is_regular_file(path)) {
    throw failure("read", path, EINVAL, "name a regular file");
  }
  errno = 0;
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in || in.bad()) throw failure("read", path, errno);
  // Deep nesting would exhaust the stack when it is written or compared.
  static constexpr int depth_max = 100;
  const auto not_too_deep = [&path](int depth, Json::parse_event_t, const Json&) {
    if (depth <= depth_max) return true;
    throw failure("read", path, EBADMSG,
                  fmt::format("it is nested deeper than {} levels", depth_max));
  };
  try {
    return Json::parse(text.str(), not_too_deep);
  } catch (const Json::exception& error) {      // also for numbers such as 1e999
    const std::string_view why = error.what();  // "[json.exception...] parse error at line ..."
    const std::size_t tag = why.find("] ");
    throw failure("read", path, EBADMSG,
                  std::string(tag == std::string_view::npos ? why : why.substr(tag + 2)));
  }
}

}  // namespace tensorferry::bench
