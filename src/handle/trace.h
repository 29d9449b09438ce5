// Writes a Chrome trace of every operation and its requests to the file that TENSORFERRY_TRACE
// names. Without the variable there is no Trace, and asking costs one load.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "tensorferry/error.h"

namespace tensorferry::handle {

// A request that has come back from the kernel, with the kernel's own number.
struct EndedRequest {
  const char* verb;
  std::uint64_t operation;  // the id of its operation
  std::uint64_t offset;
  std::uint32_t bytes;
  std::int32_t result;
  std::chrono::steady_clock::time_point begin;
};

struct EndedOperation {
  const char* verb;
  std::uint64_t id;
  std::string_view path;
  std::uint64_t bytes;  // moved
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
  const Error* error;  // nullptr after success
};

// Thread-safe. The file is valid JSON after every flush: when 256 KiB have gathered, when a handle
// closes, and when the process exits.
class Trace {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // The trace of this process, or nullptr. Reads the variable once, and not at all in a privileged
  // program; "%p" in it becomes the process id. Only this user can read the file: see
  // os::open_own_file(). A forked child does not write into its parent's trace.
  [[nodiscard]] static Trace* active() noexcept;

  // Why the trace that the variable asks for is missing or incomplete; else empty.
  [[nodiscard]] static std::string problem();

  void operation(const EndedOperation& operation);
  void request(const EndedRequest& request, Time end);
  void work(const std::string& name, Time begin, Time end);  // of the calling thread
  void flush();

 private:
  explicit Trace(int fd);
  static Trace* open() noexcept;
  void add(const std::string& event);
  void write_out();

  const int fd_;
  const std::uint64_t generation_;
  std::mutex mutex_;
  std::string gathered_;
  bool ended_ = false;  // after a failed write
  std::uint64_t written_ = 0;
};

}  // namespace tensorferry::handle
