// F9: `auto` replaces what is missing, keeps the reason and moves the same bytes. An explicit
// choice is an error that says why. The kernel itself refuses (seccomp, limits, file systems).
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "rig.h"
#include "support/child.h"
#include "support/loop_device.h"
#include "support/sanitizers.h"
#include "support/seccomp.h"

namespace tensorferry::faults::fallback {
namespace {

using support::Call;
using support::LoopDevice;
using support::Mount;
using support::pattern;
using support::read_whole_file;
using support::refuse_system_call;
using support::run_in_child;
using support::write_whole_file;

constexpr std::uint32_t seed = 81;
constexpr std::size_t file_bytes = 3 * MiB + 777;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Empty if `handle` writes and reads a file exactly, aligned or not, page-locked or not.
std::string bytes_fault(Handle& handle, const std::string& path) {
  const File file = File::open(path, Access::read_write);
  GuardedMemory out(file_bytes, 3);
  out.fill(0, seed);
  handle.write(out.bytes(), file, 0, Durability::data).wait();
  if (auto fault = pattern_fault(read_whole_file(path), 0, seed); !fault.empty()) return fault;
  for (const std::uint64_t offset : {0U, 1U, 4096U, 100'001U}) {
    GuardedMemory in(file_bytes - offset, offset % 64);
    handle.read(in.bytes(), file, offset).wait();
    if (auto fault = in.fault(offset, seed); !fault.empty()) return fault;
    GuardedMemory small(5000);
    handle.read_now(small.bytes(), file, offset);
    if (auto fault = small.fault(offset, seed); !fault.empty()) return fault;
  }
  PinnedBuffer pinned(2 * MiB);
  handle.read(pinned.bytes(), file, 4096).wait();
  return pattern_fault(pinned.bytes(), 4096, seed);
}

// Empty if the explicit choice of `kind` is refused with an error that holds all of `words`.
std::string refusal_fault(EngineKind kind, int code, const std::vector<std::string>& words) {
  try {
    const Handle handle({.engine = kind});
    return "the handle opened";
  } catch (const Error& error) {
    if (error.code() != code) return error.what();
    for (const std::string& word : words) {
      if (!contains(error.what(), word)) return "no \"" + word + "\" in: " + error.what();
    }
    return {};
  }
}

// Empty if `auto` chooses `engine`, keeps a reason with all of `words`, and moves bytes exactly.
std::string choice_fault(const std::string& path, std::string_view engine,
                         const std::vector<std::string>& words) {
  Handle handle;
  if (handle.engine() != engine) return "auto chose " + std::string(handle.engine());
  for (const std::string& word : words) {
    if (!contains(handle.engine_reason(), word)) {
      return "no \"" + word + "\" in: " + handle.engine_reason();
    }
  }
  const File file = File::open(path, Access::read_write);
  if (auto fault = bytes_fault(handle, path); !fault.empty()) return fault;
  GuardedMemory memory(2 * MiB);
  const Operation operation = handle.read(memory.bytes(), file, 0);
  operation.wait();
  if (operation.engine() != engine)
    return "the operation ran on " + std::string(operation.engine());
  const Stats stats = handle.stats();
  if (engine != "io_uring" && (stats.fallbacks == 0 || stats.fallback_reasons.empty())) {
    return "the fallback was not counted";
  }
  return {};
}

class Fallback : public ::testing::Test {
 protected:
  support::TempDir dir_;
  std::string path_ = dir_.file("data");
};

// Refuses each of its calls with each error, and allows the others.
struct Refused {
  int call;
  const char* name;
  int error;
};

class IoUringRefused : public Fallback, public ::testing::WithParamInterface<Refused> {};

INSTANTIATE_TEST_SUITE_P(
    Calls, IoUringRefused,
    ::testing::Values(Refused{SYS_io_uring_setup, "io_uring_setup", EPERM},
                      Refused{SYS_io_uring_setup, "io_uring_setup", ENOSYS},
                      Refused{SYS_io_uring_enter, "io_uring_enter", EPERM},
                      Refused{SYS_io_uring_enter, "io_uring_enter", ENOSYS},
                      Refused{SYS_io_uring_register, "io_uring_register", EPERM},
                      Refused{SYS_io_uring_register, "io_uring_register", ENOSYS}),
    [](const auto& tested) {
      return std::string(tested.param.name) + "_" + strerrorname_np(tested.param.error);
    });

TEST_P(IoUringRefused, auto_takes_libaio_and_says_why) {
  const auto child = run_in_child([&] {
    if (auto fault = refuse_system_call(GetParam().call, GetParam().error); !fault.empty()) {
      return fault;
    }
    return choice_fault(path_, "libaio", {GetParam().name, strerrorname_np(GetParam().error)});
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(IoUringRefused, an_explicit_choice_is_an_error_that_says_why) {
  const auto child = run_in_child([&] {
    if (auto fault = refuse_system_call(GetParam().call, GetParam().error); !fault.empty()) {
      return fault;
    }
    return refusal_fault(EngineKind::io_uring, GetParam().error,
                         {GetParam().name, strerrorname_np(GetParam().error)});
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(IoUringRefused, other_explicit_choices_are_not_touched) {
  const auto child = run_in_child([&] {
    if (auto fault = refuse_system_call(GetParam().call, GetParam().error); !fault.empty()) {
      return fault;
    }
    for (const EngineKind kind : {EngineKind::libaio, EngineKind::threads}) {
      Handle handle({.engine = kind});
      if (handle.engine() != to_string(kind)) return std::string("another engine");
      if (auto fault = bytes_fault(handle, path_); !fault.empty()) return fault;
    }
    return std::string();
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(IoUringRefused, with_libaio_refused_too_auto_takes_threads) {
  const auto child = run_in_child([&] {
    if (auto fault = refuse_system_call(GetParam().call, GetParam().error); !fault.empty()) {
      return fault;
    }
    if (auto fault = refuse_system_call(SYS_io_setup, EAGAIN); !fault.empty()) return fault;
    return choice_fault(path_, "threads", {GetParam().name, "io_setup", "aio-max-nr"});
  });
  EXPECT_TRUE(child.passed()) << child;
}

// The real limit is system-wide: to lower it would break other programs, so the test makes the
// refusal.
TEST_F(Fallback, io_setup_refused_for_aio_max_nr_is_an_error_that_names_the_limit) {
  const auto child = run_in_child([&] {
    if (auto fault = refuse_system_call(SYS_io_setup, EAGAIN); !fault.empty()) return fault;
    if (auto fault = refusal_fault(EngineKind::libaio, EAGAIN, {"io_setup", "aio-max-nr"});
        !fault.empty()) {
      return fault;
    }
    return choice_fault(path_, "io_uring", {});
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_F(Fallback, io_setup_refused_by_a_filter_is_an_error_that_says_so) {
  for (const int code : {EPERM, ENOSYS}) {
    const auto child = run_in_child([&] {
      if (auto fault = refuse_system_call(SYS_io_setup, code); !fault.empty()) return fault;
      return refusal_fault(EngineKind::libaio, code, {"io_setup"});
    });
    EXPECT_TRUE(child.passed()) << child;
  }
}

TEST_F(Fallback, libaio_counts_as_working_only_if_requests_come_back) {
  for (const auto& [call, name] :
       {std::pair(SYS_io_submit, "io_submit"), std::pair(SYS_io_getevents, "io_getevents")}) {
    const auto child = run_in_child([&, refused = call, said = name] {
      const std::vector<int> calls{static_cast<int>(refused), SYS_io_uring_setup};
      if (auto fault = support::refuse_system_calls(calls, EPERM); !fault.empty()) return fault;
      auto fault = refusal_fault(EngineKind::libaio, EPERM, {said});
      return fault.empty() ? choice_fault(path_, "threads", {said}) : fault;
    });
    EXPECT_TRUE(child.passed()) << child;
  }
}

TEST_F(Fallback, every_engine_works_where_all_the_others_are_refused) {
  const std::vector<std::pair<EngineKind, std::vector<int>>> cases = {
      {EngineKind::io_uring, {SYS_io_setup}},
      {EngineKind::libaio, {SYS_io_uring_setup, SYS_io_uring_enter}},
      {EngineKind::threads, {SYS_io_setup, SYS_io_uring_setup, SYS_io_uring_enter}},
  };
  for (const auto& [kind, refused] : cases) {
    const auto child = run_in_child([&, engine = kind, calls = refused] {
      if (auto fault = support::refuse_system_calls(calls, ENOSYS); !fault.empty()) return fault;
      Handle handle({.engine = engine});
      return bytes_fault(handle, path_);
    });
    EXPECT_TRUE(child.passed()) << to_string(kind) << ": " << child;
  }
}

// ---- files without O_DIRECT ---------------------------------------------------------------------

class NoDirect : public ::testing::TestWithParam<EngineKind> {};

INSTANTIATE_TEST_SUITE_P(Engines, NoDirect, all_engines_and_auto, engine_name);

TEST_P(NoDirect, a_file_system_without_it_works_with_a_reason_and_the_same_bytes) {
  if (const auto reason = support::mounts_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const Mount disk("ramfs");
  Handle handle({.engine = GetParam()});
  EXPECT_EQ(bytes_fault(handle, disk.file("data")), "");
  const File file = File::open(disk.file("data"), Access::read);
  EXPECT_FALSE(file.direct());
  EXPECT_NE(file.direct_reason(), "");
  EXPECT_EQ(file.memory_alignment(), 1U);
  EXPECT_EQ(file.offset_alignment(), 1U);
  GuardedMemory buffer(2 * MiB);
  const Operation operation = handle.read(buffer.bytes(), file, 0);
  ASSERT_ENDED_WELL(operation);
  if (GetParam() == EngineKind::automatic) {
    EXPECT_EQ(operation.engine(), "threads") << operation.engine_reason();
    EXPECT_TRUE(contains(operation.engine_reason(), "O_DIRECT")) << operation.engine_reason();
    EXPECT_GT(handle.stats().fallbacks, 0U);
  } else {
    EXPECT_EQ(operation.engine(), to_string(GetParam()));
  }
}

TEST_P(NoDirect, a_refused_open_with_o_direct_falls_back_to_the_page_cache) {
  const support::TempDir dir;
  write_whole_file(dir.file("data"), pattern(file_bytes, 0, seed));
  Rig rig({.engine = GetParam()});
  rig.system.add({.call = Call::open,
                  .times = support::SystemRule::always,
                  .open_flags = O_DIRECT,
                  .error = EINVAL});
  const File file = rig.open_file(dir.file("data"));
  EXPECT_FALSE(file.direct());
  EXPECT_NE(file.direct_reason(), "");
  GuardedMemory buffer(file_bytes - 5, 1);
  ASSERT_ENDED_WELL(rig.handle.read(buffer.bytes(), file, 5));
  EXPECT_EQ(buffer.fault(5, seed), "");
  ASSERT_ENDED_WELL(rig.handle.write(buffer.bytes(), file, 5, Durability::full));
  EXPECT_EQ(pattern_fault(read_whole_file(dir.file("data")), 0, seed), "");
}

// ---- files that cannot be opened a second time --------------------------------------------------

class OpenedOnce : public ::testing::TestWithParam<EngineKind> {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "becoming another user and hiding /proc need root";
    if (!File::open(dir_.file("trial"), Access::write).direct()) GTEST_SKIP() << "no O_DIRECT here";
    ASSERT_EQ(::chmod(dir_.path().c_str(), 0777), 0);
  }

  // Empty if many writes with ragged ends leave exactly their bytes: queued and inline, before and
  // after the first one that needs the page cache.
  static std::string ragged_fault(EngineKind engine, const File& file, const std::string& path) {
    Handle handle({.engine = engine, .block_bytes = 64 * KiB});
    GuardedMemory out(file_bytes, 3);
    out.fill(0, seed);
    std::vector<Operation> operations;
    std::size_t at = 0;
    for (std::size_t i = 0; at < file_bytes; ++i) {
      const std::size_t wanted = i == 0 ? MiB : 1 + i * 9'973;
      const auto part = out.bytes().subspan(at, std::min(wanted, file_bytes - at));
      if (i % 5 == 4) {
        handle.write_now(part, file, at);
      } else {
        operations.push_back(handle.write(part, file, at));
      }
      at += part.size();
    }
    for (const Operation& operation : operations) operation.wait();
    const std::vector<std::string> reasons = handle.stats().fallback_reasons;
    if (std::ranges::none_of(reasons,
                             [](const auto& one) { return contains(one, "second time"); })) {
      return "the fallback was not counted";
    }
    if (::chmod(path.c_str(), 0600) != 0) return "chmod";
    const auto written = read_whole_file(path);
    return written.size() == file_bytes ? pattern_fault(written, 0, seed) : "another length";
  }

  support::TempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(Engines, OpenedOnce, all_engines_and_auto, engine_name);

TEST_P(OpenedOnce, a_file_made_read_only_takes_writes_of_any_length) {
  const auto child = run_in_child([&]() -> std::string {
    if (auto fault = support::become_nobody(); !fault.empty()) return fault;
    const std::string path = dir_.file("data");
    const File file = File::open(path, Access::write, 0444);
    if (auto fault = ragged_fault(GetParam(), file, path); !fault.empty()) return fault;
    return contains(file.direct_reason(), "mode") ? "" : file.direct_reason();
  });
  EXPECT_TRUE(child.passed()) << child;
}

TEST_P(OpenedOnce, without_proc_and_renamed_a_file_takes_writes_of_any_length) {
  const auto child = run_in_child([&]() -> std::string {
    if (auto fault = support::hide_proc(); !fault.empty()) return fault;
    const File file = File::open(dir_.file("data"), Access::write);
    if (::rename(dir_.file("data").c_str(), dir_.file("new").c_str()) != 0) return "rename";
    if (auto fault = ragged_fault(GetParam(), file, dir_.file("new")); !fault.empty()) return fault;
    return contains(file.direct_reason(), "/proc") ? "" : file.direct_reason();
  });
  EXPECT_TRUE(child.passed()) << child;
}

// ---- memory -------------------------------------------------------------------------------------

class MemoryLimit : public ::testing::TestWithParam<EngineKind> {
 protected:
  support::TempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(Engines, MemoryLimit, all_engines_and_auto, engine_name);

TEST_P(MemoryLimit, over_the_memlock_limit_everything_works_unlocked_and_says_why) {
  if (const char* why = support::no_mlock()) GTEST_SKIP() << why;
  for (const std::size_t limit : {std::size_t{0}, 64 * KiB, 3 * MiB}) {
    const auto child = run_in_child([&]() -> std::string {
      if (auto fault = support::limit_locked_memory(limit); !fault.empty()) return fault;
      const PinnedBuffer large(16 * MiB);
      if (large.locked()) return "16 MiB were locked over a limit of " + std::to_string(limit);
      if (!contains(large.lock_reason(), "memlock") && !contains(large.lock_reason(), "ulimit")) {
        return "no cure in: " + large.lock_reason();
      }
      std::optional<Handle> opened;
      const auto refused = thrown_by([&] { opened.emplace(HandleOptions{.engine = GetParam()}); });
      if (refused) {
        // The kernel charges the ring too: it may refuse an explicit choice, with the reason.
        const bool ring = GetParam() == EngineKind::io_uring && refused->code() == ENOMEM;
        return ring && contains(refused->what(), "memlock") ? "" : refused->what();
      }
      Handle& handle = *opened;
      if (auto fault = bytes_fault(handle, dir_.file("data")); !fault.empty()) return fault;
      const File file = File::open(dir_.file("data"), Access::read);
      handle.read(large.bytes().first(3 * MiB), file, 0).wait();
      return pattern_fault(large.bytes().first(3 * MiB), 0, seed);
    });
    EXPECT_TRUE(child.passed()) << "limit " << limit << ": " << child;
  }
}

TEST_P(MemoryLimit, memory_that_cannot_be_had_fails_the_operation_and_not_the_handle) {
  write_whole_file(dir_.file("data"), pattern(file_bytes, 0, seed));
  Rig rig({.engine = GetParam(), .block_bytes = 256 * KiB});
  const File file = rig.open_file(dir_.file("data"));
  rig.system.add({.call = Call::map, .times = support::SystemRule::always, .error = ENOMEM});
  GuardedMemory skewed(2 * MiB, 3);
  EXPECT_EQ(outcome_code(rig.handle.read(skewed.bytes(), file, 1)), ENOMEM);
  GuardedMemory aligned(2 * MiB);
  ASSERT_ENDED_WELL(rig.handle.read(aligned.bytes(), file, 0));
  EXPECT_EQ(aligned.fault(0, seed), "");
  rig.system.clear_rules();
  ASSERT_ENDED_WELL(rig.handle.read(skewed.bytes(), file, 1));
  EXPECT_EQ(skewed.fault(1, seed), "");
}

// ---- alignment ----------------------------------------------------------------------------------

class Alignment : public ::testing::TestWithParam<std::tuple<EngineKind, unsigned>> {};

INSTANTIATE_TEST_SUITE_P(
    Engines, Alignment,
    ::testing::Combine(::testing::Values(EngineKind::automatic, EngineKind::io_uring,
                                         EngineKind::libaio, EngineKind::threads),
                       ::testing::Values(512U, 4096U)),
    [](const auto& tested) {
      return std::string(to_string(std::get<0>(tested.param))) + "_" +
             std::to_string(std::get<1>(tested.param));
    });

TEST_P(Alignment, the_drives_own_sector_size_is_found_and_kept) {
  const auto [engine, sector] = GetParam();
  if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  LoopDevice device(64 * MiB, sector);
  device.make_file_system("ext4");
  device.mount();
  Handle handle({.engine = engine});
  EXPECT_EQ(bytes_fault(handle, device.file("data")), "");
  const File file = File::open(device.file("data"), Access::read);
  EXPECT_TRUE(file.direct()) << file.direct_reason();
  EXPECT_EQ(file.offset_alignment(), sector);
}

TEST_P(Alignment, a_block_device_is_a_file_like_any_other) {
  const auto [engine, sector] = GetParam();
  if (const auto reason = LoopDevice::unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const LoopDevice device(16 * MiB, sector);
  Handle handle({.engine = engine});
  const File file = File::open(device.device(), Access::read_write);
  EXPECT_EQ(file.size(), 16 * MiB);
  EXPECT_TRUE(file.direct()) << file.direct_reason();
  EXPECT_EQ(file.offset_alignment(), sector);
  GuardedMemory out(5 * MiB + 13, 5);
  out.fill(777, seed);
  ASSERT_ENDED_WELL(handle.write(out.bytes(), file, 777, Durability::full));
  GuardedMemory in(5 * MiB + 13, 9);
  ASSERT_ENDED_WELL(handle.read(in.bytes(), file, 777));
  EXPECT_EQ(in.fault(777, seed), "");
  GuardedMemory beyond(8192);
  EXPECT_TRUE(outcome(handle.read(beyond.bytes(), file, 16 * MiB - 4096)).has_value());
  EXPECT_TRUE(outcome(handle.write(beyond.bytes(), file, 16 * MiB - 4096)).has_value());
}

}  // namespace
}  // namespace tensorferry::faults::fallback
