#include "support/seccomp.h"

#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

namespace tensorferry::support {

namespace {

sock_filter statement(unsigned code, unsigned value) {
  return {static_cast<__u16>(code), 0, 0, value};
}

std::string complaint(const char* call) { return std::string(call) + ": " + std::strerror(errno); }

sock_filter skip_unless(unsigned value, unsigned char statements) {
  return {static_cast<__u16>(BPF_JMP | BPF_JEQ | BPF_K), 0, statements, value};
}

sock_filter refusal(int error) {
  return statement(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<__u32>(error));
}

std::string install(std::vector<sock_filter> program) {
  program.push_back(statement(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return complaint("PR_SET_NO_NEW_PRIVS");
  if (::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) != 0) {
    return complaint("seccomp");
  }
  return {};
}

}  // namespace

std::string refuse_system_calls(std::span<const int> calls, int error) {
  std::vector<sock_filter> program;
  program.push_back(statement(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  for (const int call : calls) {
    program.push_back(skip_unless(static_cast<__u32>(call), 1));
    program.push_back(refusal(error));
  }
  return install(std::move(program));
}

std::string refuse_ring_registration(unsigned operation, int error) {
  // The lower half of the second argument comes first: all processors here are little-endian.
  const unsigned argument = offsetof(seccomp_data, args) + sizeof(__u64);
  return install({statement(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                  skip_unless(SYS_io_uring_register, 3),
                  statement(BPF_LD | BPF_W | BPF_ABS, argument), skip_unless(operation, 1),
                  refusal(error)});
}

std::string refuse_system_call(int call, int error) {
  return refuse_system_calls(std::span(&call, 1), error);
}

std::string limit_locked_memory(std::size_t bytes) {
  const struct rlimit limit{bytes, bytes};
  if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return complaint("setrlimit");
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> sets{};
  if (::syscall(SYS_capget, &header, sets.data()) != 0) return complaint("capget");
  const __u32 keep = ~(1U << CAP_IPC_LOCK);
  sets[0].effective &= keep;
  sets[0].permitted &= keep;
  sets[0].inheritable &= keep;
  if (::syscall(SYS_capset, &header, sets.data()) != 0) return complaint("capset");
  return {};
}

}  // namespace tensorferry::support
