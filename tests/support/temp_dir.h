// A folder of one test, removed with everything in it when the test ends.
#pragma once

#include <string>

namespace tensorferry::support {

// Lies in the working directory, so on a real disk where ctest runs on one (a tmpfs would prove
// little). Not for threads.
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
