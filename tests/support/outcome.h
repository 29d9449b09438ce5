// How an operation ends, as a value.
#pragma once

#include <cerrno>
#include <chrono>
#include <optional>

#include "support/hang_limit.h"
#include "tensorferry/operation.h"

namespace tensorferry::support {

// Waits for the operation. None after success; ETIMEDOUT if it does not end within the limit.
[[nodiscard]] inline std::optional<Error> outcome(const Operation& operation,
                                                  std::chrono::seconds limit = hang_limit) {
  try {
    if (operation.wait_for(limit)) return operation.error();
  } catch (const Error& error) {
    return error;
  }
  return Error({.operation = "wait", .code = ETIMEDOUT, .hint = "the operation did not end"});
}

// The same as an errno: 0 after success.
[[nodiscard]] inline int outcome_code(const Operation& operation) {
  const std::optional<Error> error = outcome(operation);
  return error ? error->code() : 0;
}

}  // namespace tensorferry::support
