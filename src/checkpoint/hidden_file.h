// The file behind a NewFile: hidden beside the name that it will have, and gone if nothing comes of
// it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/result.h"
#include "os/system.h"
#include "tensorferry/file.h"

namespace tensorferry::checkpoint {

// Not thread-safe. Its name is ".NAME.PID-NUMBER.tensorferry", and it is locked as long as its
// maker lives: whoever makes the next one for the same name removes those that nobody holds. A
// forked child that destroys it removes nothing.
class HiddenFile {
 public:
  [[nodiscard]] static Result<std::unique_ptr<HiddenFile>> create(os::System& system,
                                                                  const std::string& path,
                                                                  unsigned permissions);
  ~HiddenFile();  // removes the file unless it has its name
  HiddenFile(const HiddenFile&) = delete;
  HiddenFile& operator=(const HiddenFile&) = delete;

  [[nodiscard]] const File& file() const noexcept { return file_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  // Syncs the file, gives it its name, syncs the directory.
  [[nodiscard]] Status commit();

 private:
  HiddenFile(os::System& system, std::string path);
  [[nodiscard]] Status open_directory();
  // Reads the mode of the file that is going to be replaced, if there is one.
  [[nodiscard]] Status learn_mode(unsigned& permissions, bool& replaces);
  void remove_abandoned();
  [[nodiscard]] Status make(unsigned permissions);
  [[nodiscard]] Error failure(const char* operation, int code, std::string hint = "") const;

  os::System& system_;
  const std::uint64_t generation_;
  const std::string path_;  // without a link at its end
  std::string folder_;
  std::string name_;    // of the file to be
  std::string hidden_;  // empty: there is none
  int directory_ = -1;
  int lock_ = -1;  // an open descriptor of the hidden file
  File file_{nullptr};
};

}  // namespace tensorferry::checkpoint
