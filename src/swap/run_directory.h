// A directory of one run's own on a drive: made, owned, swept and removed. Nothing in it is ever
// followed or trusted: the files are made new, by names in open directories.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "os/system.h"

namespace tensorferry::swap {

// Lies at <given>/tensorferry-swap-<uid>/<run>.<rank>.<pid>.<n>. A file "owner" in it is locked as
// long as the process lives: a directory whose owner can be locked is a dead run's.
class RunDirectory {
 public:
  // Also removes what dead runs of this user have left in the same place.
  [[nodiscard]] static Result<std::unique_ptr<RunDirectory>> make(os::System& system,
                                                                  const std::string& given,
                                                                  const std::string& run,
                                                                  unsigned rank);
  // Removes it with its files, except in a child of fork().
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // Makes the file for the tensors, 0600, and returns a descriptor that the caller closes.
  [[nodiscard]] Result<int> make_file();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  RunDirectory(os::System& system, std::string given);
  [[nodiscard]] Status open_given();
  [[nodiscard]] Status open_shared();
  [[nodiscard]] Status lock_shared();
  void sweep(const std::string& run);
  void remove_run(int directory, const std::string& name);
  [[nodiscard]] Status make_own(const std::string& run, unsigned rank);
  [[nodiscard]] Error failure(const char* operation, int code, std::string hint) const;

  os::System& system_;
  const std::uint64_t generation_;
  const std::string given_;
  std::string path_;  // of what is dealt with
  std::string name_;  // of our own, in the shared one
  std::vector<std::string> notes_;
  int given_fd_ = -1;
  int shared_fd_ = -1;
  int own_fd_ = -1;
  int owner_fd_ = -1;
};

}  // namespace tensorferry::swap
