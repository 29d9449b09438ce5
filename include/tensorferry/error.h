// The one error type: what failed, where, what the system reported, and what to do about it.
// Inside the library an Error is a returned value; the public API throws it.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "tensorferry/export.h"

namespace tensorferry {

// Immutable and cheap to copy; copying never throws. Safe to share between threads.
class TENSORFERRY_EXPORT Error : public std::exception {
 public:
  struct Details {
    std::string operation;  // "read", "open", "io_uring_setup"
    std::string path = {};  // empty if no file is involved
    std::optional<std::uint64_t> offset = {};
    std::optional<std::uint64_t> length = {};
    int code = 0;           // an errno value
    std::string hint = {};  // what happened and what to do; may be empty
  };

  explicit Error(Details details);

  // "read: weights.bin: offset 4096, length 1048576: Input/output error (EIO): <hint>"
  [[nodiscard]] const char* what() const noexcept override;

  [[nodiscard]] const std::string& operation() const noexcept;
  [[nodiscard]] const std::string& path() const noexcept;
  [[nodiscard]] std::optional<std::uint64_t> offset() const noexcept;
  [[nodiscard]] std::optional<std::uint64_t> length() const noexcept;
  [[nodiscard]] int code() const noexcept;
  // The system's text for the code. Empty if the text would mislead because the code has a meaning
  // of ours that the hint explains: a deadline, a fork, bytes that differ.
  [[nodiscard]] const char* system_text() const noexcept;
  [[nodiscard]] const std::string& hint() const noexcept;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace tensorferry
