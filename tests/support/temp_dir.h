// A folder for one test. Its end removes it with everything in it.
#pragma once

#include <string>

namespace tensorferry::support {

// It lies in the working directory, which ctest has on a real disk (a tmpfs would prove little).
// Not thread-safe.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace tensorferry::support
