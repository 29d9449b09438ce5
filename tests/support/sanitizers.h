// What the build's sanitizer cannot do, so that a test skips with the reason.
#pragma once

namespace tensorferry::support {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool address_sanitized = true;
#else
inline constexpr bool address_sanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool thread_sanitized = true;
#else
inline constexpr bool thread_sanitized = false;
#endif

// nullptr where a process whose threads are busy may fork and its child go on with all of C++.
constexpr const char* no_fork_among_busy_threads() {
  if (address_sanitized) {
    return "AddressSanitizer's allocator takes no lock for a fork: the child may inherit a held "
           "one";
  }
  if (thread_sanitized) return "ThreadSanitizer allows no threads after such a fork";
  return nullptr;
}

}  // namespace tensorferry::support
