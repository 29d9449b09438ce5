// The complete list of what cannot work in a build with a sanitizer. A test that needs one of these
// skips with the reason given here. All other tests run.
#pragma once

namespace tensorferry::support {

// g++ defines a macro, clang a feature.
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

// Each returns nullptr if a test may rely on the thing that its name denies.

// The size of the process is the memory that the test has taken.
constexpr const char* no_memory_figures() {
  return sanitized ? "a sanitizer takes memory too" : nullptr;
}

// mlock() locks, or fails over the limit.
constexpr const char* no_mlock() {
  return sanitized ? "mlock() does nothing under a sanitizer" : nullptr;
}

// A process with busy threads may fork, and the child may use all of C++.
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

// A child has nothing at the addresses of memory that it does not inherit.
constexpr const char* no_holes_in_children() {
  return thread_sanitized ? "ThreadSanitizer starts a thread in a child before anything else runs "
                            "there, and its stack may lie where the memory was"
                          : nullptr;
}

}  // namespace tensorferry::support
