// What a call throws, as a value.
#pragma once

#include "tensorferry/error.h"

namespace tensorferry::support {

// An Error of code 0 where it throws nothing.
template <class Call>
[[nodiscard]] Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return Error({});
}

}  // namespace tensorferry::support
