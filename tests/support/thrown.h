// The error that a call throws, as a value.
#pragma once

#include <optional>

#include "tensorferry/error.h"

namespace tensorferry::support {

// None if it throws nothing.
template <class Call>
[[nodiscard]] std::optional<Error> thrown_by(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// An Error of code 0 if it throws nothing.
template <class Call>
[[nodiscard]] Error error_of(Call call) {
  return thrown_by(call).value_or(Error({}));
}

}  // namespace tensorferry::support
