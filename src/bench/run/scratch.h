// A directory of our own for the files we make, and nobody else's.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry::bench {

// Makes a directory with a new name inside `directory` and removes it, with what is in it, at the
// end. Nothing else in `directory` is touched.
class Scratch {
 public:
  // Throws Error with a hint when `directory` is missing, not a directory, cannot be written, or
  // has less than `bytes_needed` free.
  Scratch(const std::string& directory, std::uint64_t bytes_needed);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Throws Error (ENOSPC) that names the needed and the free bytes when `directory` has not as many.
void check_space(const std::string& directory, std::uint64_t bytes_needed);

}  // namespace tensorferry::bench
