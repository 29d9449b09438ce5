// What cannot work in a build with a sanitizer. This is the whole list: a test that needs one of
// these skips, with the reason that stands here, and all others run.
#pragma once

namespace tensorferry::support {

// g++ tells by a macro, clang by a feature.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool address_sanitized = true;
#elif defined(__has_feature)
inline constexpr bool address_sanitized = __has_feature(address_sanitizer);
#else
inline constexpr bool address_sanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool thread_sanitized = true;
#elif defined(__has_feature)
inline constexpr bool thread_sanitized = __has_feature(thread_sanitizer);
#else
inline constexpr bool thread_sanitized = false;
#endif

inline constexpr bool sanitized = address_sanitized || thread_sanitized;

// Each is nullptr where a test may rely on what its name denies.

// The process is as large as what the test has taken.
constexpr const char* no_memory_figures() {
  return sanitized ? "a sanitizer takes memory of its own" : nullptr;
}

// mlock() locks, or fails over the limit.
constexpr const char* no_mlock() {
  return sanitized ? "a sanitizer makes nothing of mlock()" : nullptr;
}

// A process whose threads are busy may fork, and its child go on with all of C++.
constexpr const char* no_fork_among_busy_threads() {
#if defined(__SANITIZE_ADDRESS__) && !defined(__clang__)
  if (address_sanitized) {
    return "AddressSanitizer's allocator of g++ takes no lock for a fork: the child may inherit a "
           "held one";
  }
#endif
  if (thread_sanitized) return "ThreadSanitizer allows no threads after such a fork";
  return nullptr;
}

// In a child nothing lies where memory was that the child does not inherit.
constexpr const char* no_holes_in_children() {
  return thread_sanitized ? "ThreadSanitizer starts a thread in a child before anything else runs "
                            "there, and its stack may lie where the memory was"
                          : nullptr;
}

}  // namespace tensorferry::support
