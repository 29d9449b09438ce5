// A directory for our own files alone.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry::bench {

// Makes a directory with a new name inside `directory`, and removes it with its files at the end.
// Touches nothing else in `directory`.
class Scratch {
 public:
  // Throws Error with a hint if `directory` is missing, is not a directory, is not writable, or has
  // less than `bytes_needed` free.
  Scratch(const std::string& directory, std::uint64_t bytes_needed);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Throws Error (ENOSPC), with the needed and the free bytes, if `directory` has too few free.
void check_space(const std::string& directory, std::uint64_t bytes_needed);

}  // namespace tensorferry::bench
