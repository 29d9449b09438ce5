// Makes the kernel refuse system calls, as containers do.
#pragma once

#include <span>
#include <string>

namespace tensorferry::support {

// Makes each of the system calls (SYS_...) fail with `error`, in every thread of this process and
// for ever. For use in run_in_child(). Returns "", or why that failed.
[[nodiscard]] std::string refuse_system_calls(std::span<const int> calls, int error);
[[nodiscard]] std::string refuse_system_call(int call, int error);

// Makes io_uring_register() fail with `error` for one of its operations (IORING_REGISTER_...), as a
// kernel does that does not have it. As refuse_system_calls() otherwise.
[[nodiscard]] std::string refuse_ring_registration(unsigned operation, int error);

// Limits locked memory as for an ordinary user: sets the memlock limit to `bytes` and drops the
// capability that bypasses it. Returns "", or why that failed.
[[nodiscard]] std::string limit_locked_memory(std::size_t bytes);

}  // namespace tensorferry::support
