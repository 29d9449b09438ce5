#include "os/environment.h"

#include <stdlib.h>
#include <sys/auxv.h>

namespace tensorferry::os {

bool privileged() noexcept { return ::getauxval(AT_SECURE) != 0; }

std::optional<std::string> variable(const char* name) {
  const char* value = ::secure_getenv(name);
  if (value == nullptr) return std::nullopt;
  return value;
}

}  // namespace tensorferry::os
