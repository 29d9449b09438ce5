// The directory of one run on a drive. Makes it, locks it and removes it, and removes the
// directories of dead runs. Follows no links and trusts nothing it finds: it makes its files new,
// by names relative to open directories.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "os/system.h"

namespace tensorferry::swap {

// The path is <given>/tensorferry-swap-<uid>/<run>.<rank>.<pid>.<n>. The process keeps the file
// "owner" in it locked: if that can be locked, the run is dead.
class RunDirectory {
 public:
  // Also removes the directories of this user's dead runs in `given`.
  [[nodiscard]] static Result<std::unique_ptr<RunDirectory>> make(os::System& system,
                                                                  const std::string& given,
                                                                  const std::string& run,
                                                                  unsigned rank);
  // Removes the directory with its files, except in a child of fork().
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  // Makes the file for the tensors, 0600, and returns a descriptor that the caller closes.
  [[nodiscard]] Result<int> make_file();

  // Gives an open file of another run a name here as well, so that its bytes stay as long as this
  // run. Returns false if that is not possible, as for a file on another drive.
  bool hold(int fd, std::size_t number);
  // Takes the name away that hold() has given, if it has.
  void let_go(std::size_t number);

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
  std::string path_;  // of the directory in use at this step: given, shared, own
  std::string name_;  // of our own directory, in the shared one
  std::vector<std::string> notes_;
  int given_fd_ = -1;
  int shared_fd_ = -1;
  int own_fd_ = -1;
  int owner_fd_ = -1;
};

}  // namespace tensorferry::swap
