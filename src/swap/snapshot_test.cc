// Snapshots of a swap space: what they keep, whatever happens to the space.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/child.h"
#include "support/faulty_system.h"
#include "support/loop_device.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "swap/space.h"
#include "swap/swap_fixture.h"

namespace tensorferry {
namespace {

using handle::error_of;
using handle::Gate;
using handle::Memory;
using handle::outcome_code;
using support::pattern_fault;

namespace fs = std::filesystem;

class SnapshotTest : public ::testing::Test {
 protected:
  [[nodiscard]] SwapOptions options() const {
    SwapOptions made = swap::options_in(dir, 4 * MiB);
    made.checksums = SwapChecksums::computed;
    return made;
  }

  // Names of files of snapshots in the directory.
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    const std::string folder = dir.path() + "/tensorferry-snapshots-" + std::to_string(::geteuid());
    if (!fs::exists(folder)) return found;
    for (const auto& entry : fs::directory_iterator(folder)) {
      found.push_back(entry.path().filename());
    }
    std::ranges::sort(found);
    return found;
  }

  support::TempDir dir;
};

void put_tensor(SwapSpace& space, const std::string& key, std::size_t bytes, std::uint32_t seed) {
  Memory memory = Memory::with_pattern(bytes, 0, seed);
  space.put(key, memory.bytes()).wait();
}

// Empty if the tensor has the right bytes.
std::string wrong_in(SwapSpace& space, const std::string& key, std::size_t bytes,
                     std::uint32_t seed) {
  Memory memory(bytes);
  space.get(key, memory.bytes()).wait();
  return pattern_fault(memory.bytes(), 0, seed);
}

SwapSnapshot snapshot_of(SwapSpace& space, const std::string& name, std::vector<std::string> keys,
                         std::vector<std::string> replaced = {}) {
  return space.snapshot(name, keys, replaced);
}

std::uint64_t allocated_bytes(const std::string& path) {
  struct stat facts{};
  return ::stat(path.c_str(), &facts) == 0 ? static_cast<std::uint64_t>(facts.st_blocks) * 512 : 0;
}

TEST_F(SnapshotTest, tensors_of_a_snapshot_stay_when_they_are_put_again_and_when_the_space_ends) {
  const std::vector<std::size_t> sizes = {0, 1, 4095, 4097, 70000, 3 * MiB + 1};
  SwapSnapshot taken;
  {
    SwapSpace space(options());
    std::vector<std::string> keys;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      keys.push_back("t" + std::to_string(i));
      put_tensor(space, keys.back(), sizes[i], static_cast<std::uint32_t>(i));
    }
    taken = snapshot_of(space, "first", keys);
    for (std::uint32_t round = 1; round < 4; ++round) {
      for (std::size_t i = 0; i < sizes.size(); ++i)
        put_tensor(space, keys[i], sizes[i], 90 + round);
    }
    space.drop("t5");
    EXPECT_EQ(wrong_in(space, "t4", sizes[4], 93), "");
  }
  SwapSpace next(options());
  put_tensor(next, "t4", 12, 7);  // is replaced
  next.attach(taken);
  EXPECT_EQ(next.stats().read_bytes, 0U);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::string key = "t" + std::to_string(i);
    EXPECT_EQ(next.size(key), sizes[i]);
    EXPECT_EQ(wrong_in(next, key, sizes[i], static_cast<std::uint32_t>(i)), "") << sizes[i];
  }
}

TEST_F(SnapshotTest, a_snapshot_outlives_a_killed_process_and_the_sweep_of_the_next) {
  const auto child = support::run_in_child([this]() -> std::string {
    SwapSpace space(options());
    put_tensor(space, "t", 2 * MiB, 5);
    (void)snapshot_of(space, "kept", {"t"});
    put_tensor(space, "t", 2 * MiB, 6);
    ::_exit(0);  // as if killed: nothing is removed
  });
  ASSERT_TRUE(child.passed()) << child;
  SwapSpace space(options());
  EXPECT_EQ(names(), std::vector<std::string>{"kept.0"});
  const std::string path =
      dir.path() + "/tensorferry-snapshots-" + std::to_string(::geteuid()) + "/kept.0";
  space.attach({"kept", {path}, {{"t", 2 * MiB, {{0, 0, 2 * MiB}}, std::nullopt}}});
  EXPECT_EQ(wrong_in(space, "t", 2 * MiB, 5), "");
}

TEST_F(SnapshotTest, a_snapshot_of_several_drives_comes_back) {
  const support::TempDir second;
  SwapOptions two = options();
  two.directories.push_back(second.path());
  SwapSnapshot taken;
  {
    SwapSpace space(two);
    put_tensor(space, "large", 9 * MiB, 1);
    put_tensor(space, "small", 100, 2);
    taken = snapshot_of(space, "s", {"large", "small"});
    put_tensor(space, "large", 9 * MiB, 3);
  }
  EXPECT_EQ(taken.files.size(), 2U);
  SwapSpace space(two);
  space.attach(taken);
  EXPECT_EQ(wrong_in(space, "large", 9 * MiB, 1), "");
  EXPECT_EQ(wrong_in(space, "small", 100, 2), "");
}

TEST_F(SnapshotTest, its_files_are_never_written_to_by_a_space_that_attaches_them) {
  SwapSnapshot taken;
  {
    SwapSpace space(options());
    put_tensor(space, "t", MiB, 1);
    taken = snapshot_of(space, "s", {"t"});
  }
  {
    SwapSpace space(options());
    space.attach(taken);
    const std::string name = space.directories().front() + "/attached.0";
    EXPECT_TRUE(fs::exists(name));
    for (std::uint32_t i = 0; i < 10; ++i) put_tensor(space, "t", MiB, 50 + i);
    EXPECT_EQ(wrong_in(space, "t", MiB, 59), "");
    EXPECT_FALSE(fs::exists(name)) << "the run keeps bytes that it does not need any more";
  }
  SwapSpace space(options());
  space.attach(taken);
  EXPECT_EQ(wrong_in(space, "t", MiB, 1), "");
}

TEST_F(SnapshotTest, tensors_of_an_older_snapshot_are_part_of_the_next_also_when_that_is_removed) {
  SwapSnapshot first;
  {
    SwapSpace space(options());
    put_tensor(space, "frozen", MiB, 1);
    put_tensor(space, "moving", MiB, 2);
    first = snapshot_of(space, "first", {"frozen", "moving"});
  }
  SwapSnapshot second;
  {
    SwapSpace space(options());
    space.attach(first);
    put_tensor(space, "moving", MiB, 3);
    for (const std::string& file : first.files) ASSERT_TRUE(fs::remove(file));
    second = snapshot_of(space, "second", {"frozen", "moving"});
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"second.0", "second.1"}));
  SwapSpace space(options());
  space.attach(second);
  EXPECT_EQ(wrong_in(space, "frozen", MiB, 1), "");
  EXPECT_EQ(wrong_in(space, "moving", MiB, 3), "");
}

TEST_F(SnapshotTest, a_dropped_snapshot_gives_its_space_back_to_the_living_space) {
  SwapSpace space(options());
  put_tensor(space, "t", 4 * MiB, 0);
  std::uint64_t settled_bytes = 0;
  std::string last;
  for (std::uint32_t i = 1; i <= 30; ++i) {
    const std::string name = "s" + std::to_string(i);
    const std::vector<std::string> replaced = {last};
    const SwapSnapshot taken = snapshot_of(space, name, {"t"}, replaced);
    EXPECT_EQ(space.drop_snapshot(last), i > 1);
    put_tensor(space, "t", 4 * MiB, i);
    EXPECT_EQ(space.stats().snapshots, 1U);
    EXPECT_EQ(space.stats().snapshot_bytes, 4 * MiB);
    last = name;
    if (i == 5) settled_bytes = space.stats().file_bytes;
    ASSERT_TRUE(fs::remove(taken.files.front()));
  }
  EXPECT_EQ(space.stats().file_bytes, settled_bytes);
  EXPECT_TRUE(space.drop_snapshot(last));
  EXPECT_FALSE(space.drop_snapshot(last));
  EXPECT_EQ(space.stats().snapshot_bytes, 0U);
}

TEST_F(SnapshotTest, the_first_read_of_a_changed_byte_fails) {
  SwapSnapshot taken;
  {
    SwapSpace space(options());
    put_tensor(space, "t", MiB + 10, 1);
    put_tensor(space, "other", MiB, 2);
    taken = snapshot_of(space, "s", {"t", "other"});
  }
  const int fd = ::open(taken.files.front().c_str(), O_WRONLY | O_CLOEXEC);
  const auto at = static_cast<off_t>(taken.tensors.front().extents.front().offset + MiB + 9);
  ASSERT_EQ(::pwrite(fd, "x", 1, at), 1);  // the last byte
  ::close(fd);
  SwapSpace space(options());
  space.attach(taken);
  Memory memory(MiB + 10);
  EXPECT_EQ(outcome_code(space.get("t", memory.bytes())), EBADMSG);
  EXPECT_EQ(outcome_code(space.fetch("t")->operation), EBADMSG);
  EXPECT_EQ(wrong_in(space, "other", MiB, 2), "");
}

TEST_F(SnapshotTest, pages_that_have_changed_places_are_seen) {
  SwapSnapshot taken;
  {
    SwapSpace space(options());
    Memory memory(16 * KiB);
    std::ranges::fill(memory.bytes(), std::byte{0});
    memory.bytes()[0] = std::byte{1};
    space.put("t", memory.bytes()).wait();
    taken = snapshot_of(space, "s", {"t"});
  }
  // The page with the one comes second.
  const int fd = ::open(taken.files.front().c_str(), O_WRONLY | O_CLOEXEC);
  const auto at = static_cast<off_t>(taken.tensors.front().extents.front().offset);
  ASSERT_EQ(::pwrite(fd, "\0", 1, at), 1);
  ASSERT_EQ(::pwrite(fd, "\1", 1, at + 4096), 1);
  ::close(fd);
  SwapSpace space(options());
  space.attach(taken);
  Memory memory(16 * KiB);
  EXPECT_EQ(outcome_code(space.get("t", memory.bytes())), EBADMSG);
}

TEST_F(SnapshotTest, the_checksum_does_not_depend_on_how_a_tensor_is_written) {
  std::vector<std::uint64_t> sums;
  for (const std::size_t block_bytes : {std::size_t{4096}, std::size_t{64} * KiB, 4 * MiB}) {
    SwapOptions blocks = options();
    blocks.handle.block_bytes = block_bytes;
    SwapSpace space(blocks);
    put_tensor(space, "t", MiB + 777, 3);
    sums.push_back(
        *snapshot_of(space, "s" + std::to_string(block_bytes), {"t"}).tensors[0].checksum);
  }
  EXPECT_EQ(sums, std::vector<std::uint64_t>(3, sums.front()));
}

TEST_F(SnapshotTest, a_snapshot_that_does_not_fit_its_files_is_refused) {
  SwapSpace space(options());
  put_tensor(space, "t", MiB, 1);
  const SwapSnapshot taken = snapshot_of(space, "s", {"t"});
  const auto code = [&](const SwapSnapshot& wrong) {
    return error_of([&] { space.attach(wrong); }).code();
  };
  SwapSnapshot wrong = taken;
  wrong.files[0] += "x";
  EXPECT_EQ(code(wrong), ENOENT);
  constexpr std::uint64_t huge = ~std::uint64_t{0} - 4095;
  const std::vector<std::vector<SwapSnapshot::Extent>> extents = {
      {},
      {{1, 0, MiB}},
      {{0, 1, MiB}},
      {{0, 0, MiB - 4096}},
      {{0, 0, MiB + 4096}},
      {{0, huge, MiB}},
      {{0, 0, huge}},
      {{0, 0, huge}, {0, 0, MiB}},
      {{0, std::uint64_t{1} << 40U, MiB}},
  };
  for (const auto& each : extents) {
    wrong = taken;
    wrong.tensors[0].extents = each;
    EXPECT_EQ(code(wrong), EINVAL);
  }
  EXPECT_EQ(wrong_in(space, "t", MiB, 1), "");
  // A link in the place of the file.
  wrong = taken;
  wrong.files[0] = dir.path() + "/a/link";
  fs::create_directory(dir.path() + "/a");
  fs::create_symlink(taken.files[0], wrong.files[0]);
  EXPECT_EQ(code(wrong), ELOOP);
}

TEST_F(SnapshotTest, names_that_are_taken_or_not_plain_are_refused) {
  SwapSpace space(options());
  put_tensor(space, "t", 10, 1);
  const auto code = [&](const std::string& name, const std::string& key = "t") {
    return error_of([&] { (void)snapshot_of(space, name, {key}); }).code();
  };
  EXPECT_EQ(code("../out"), EINVAL);
  EXPECT_EQ(code(""), EINVAL);
  EXPECT_EQ(code(std::string(201, 'x')), EINVAL);
  EXPECT_EQ(code("s", "nobody"), ENOENT);
  EXPECT_EQ(code("s"), 0);
  EXPECT_EQ(code("s"), EEXIST);
  SwapSpace other(options());
  put_tensor(other, "t", 10, 1);
  EXPECT_EQ(error_of([&] { (void)snapshot_of(other, "s", {"t"}); }).code(), EEXIST);
}

TEST_F(SnapshotTest, a_sync_that_fails_leaves_no_snapshot) {
  for (const support::Call call : {support::Call::fdatasync, support::Call::fsync}) {
    support::FaultySystem system;
    swap::Seams seams;
    seams.handle.system = &system;
    SwapOptions threads = options();
    threads.handle.engine = EngineKind::threads;
    SwapSpace space(threads, seams);
    put_tensor(space, "t", MiB, 1);
    system.add({.call = call, .error = EIO});
    EXPECT_EQ(error_of([&] { (void)snapshot_of(space, "s", {"t"}); }).code(), EIO);
    EXPECT_EQ(names(), std::vector<std::string>{});
    EXPECT_EQ(space.stats().snapshots, 0U);
    EXPECT_EQ(wrong_in(space, "t", MiB, 1), "");
  }
}

TEST_F(SnapshotTest, a_snapshot_waits_for_writes_that_are_under_way) {
  Gate gate;
  SwapOptions gated = options();
  gated.handle = Gate::settings();
  SwapSpace space(gated, swap::Seams{gate.seams()});
  Memory memory = Memory::with_pattern(MiB, 0, 4);
  const Operation put = space.put("t", memory.bytes());
  std::thread opener([&gate] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.open();
  });
  const SwapSnapshot taken = snapshot_of(space, "s", {"t"});
  EXPECT_TRUE(put.done());
  opener.join();
  SwapSpace other(options());
  other.attach(taken);
  EXPECT_EQ(wrong_in(other, "t", MiB, 4), "");
}

TEST_F(SnapshotTest, a_full_drive_refuses_a_snapshot_and_harms_neither_tensors_nor_older_ones) {
  if (const auto reason = support::LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  support::LoopDevice device(64 * MiB);
  device.make_file_system("ext4");
  device.mount();
  SwapOptions small = options();
  small.directories = {device.mount_point()};
  {
    SwapSpace space(small);
    for (std::uint32_t i = 0; i < 4; ++i) put_tensor(space, std::to_string(i), 3 * MiB, i);
    const std::vector<std::string> keys = {"0", "1", "2", "3"};
    SwapSnapshot older;
    Error full({});
    for (std::uint32_t round = 1; round < 10; ++round) {
      full = error_of([&] { older = snapshot_of(space, "s" + std::to_string(round), keys); });
      if (full.code() != 0) break;
      for (std::uint32_t i = 0; i < 4; ++i) {
        put_tensor(space, keys[i], 3 * MiB, 10 * round + i);
      }
    }
    EXPECT_EQ(full.code(), ENOSPC);
    EXPECT_NE(full.hint().find("needed"), std::string::npos) << full.what();
    EXPECT_GE(space.stats().snapshots, 2U);
    const auto rounds = static_cast<std::uint32_t>(space.stats().snapshots);
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(wrong_in(space, keys[i], 3 * MiB, 10 * rounds + i), "");
      put_tensor(space, keys[i], 3 * MiB, 99);  // the run goes on
    }
    SwapSpace next(small);
    next.attach(older);
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(wrong_in(next, keys[i], 3 * MiB, 10 * (rounds - 1) + i), "");
    }
    // What the new one replaces counts as free.
    EXPECT_EQ(error_of([&] { (void)snapshot_of(space, "new", keys, {"s1"}); }).code(), 0);
    EXPECT_TRUE(space.drop_snapshot("s1"));
    for (std::uint32_t i = 0; i < 4; ++i) put_tensor(space, keys[i], 3 * MiB, 100 + i);
  }
  device.unmount();
}

TEST_F(SnapshotTest, space_that_no_snapshot_needs_is_freed_only_after_the_run) {
  SwapSnapshot taken;
  {
    SwapSpace space(options());
    put_tensor(space, "t", 4 * MiB, 1);
    taken = snapshot_of(space, "s", {"t"});
    put_tensor(space, "t", 4 * MiB, 2);
    EXPECT_FALSE(trim_snapshot_file(taken.files[0], taken.tensors[0].extents, 2));
    EXPECT_EQ(wrong_in(space, "t", 4 * MiB, 2), "");
  }
  const std::uint64_t before = allocated_bytes(taken.files[0]);
  EXPECT_FALSE(trim_snapshot_file(taken.files[0], taken.tensors[0].extents, 2));
  EXPECT_EQ(allocated_bytes(taken.files[0]), before);
  if (!trim_snapshot_file(taken.files[0], taken.tensors[0].extents, 1)) {
    GTEST_SKIP() << "the file system cannot free a part of a file";
  }
  EXPECT_LT(allocated_bytes(taken.files[0]), before);
  EXPECT_GE(allocated_bytes(taken.files[0]), 4 * MiB);
  SwapSpace space(options());
  space.attach(taken);
  EXPECT_EQ(wrong_in(space, "t", 4 * MiB, 1), "");
}

TEST_F(SnapshotTest, nothing_is_freed_while_a_run_on_another_drive_reads_it) {
  const std::filesystem::path memory = "/dev/shm/snapshot_test." + std::to_string(::getpid());
  std::error_code refused;
  if (!std::filesystem::create_directory(memory, refused)) GTEST_SKIP() << "no other file system";
  SwapSnapshot first;
  SwapSnapshot second;
  {
    SwapSpace space(options());
    put_tensor(space, "t", 4 * MiB, 1);
    first = snapshot_of(space, "a", {"t"});
    put_tensor(space, "t", 4 * MiB, 2);
    second = snapshot_of(space, "b", {"t"});
  }
  {
    SwapOptions elsewhere = options();
    elsewhere.directories = {memory.string()};
    SwapSpace space(elsewhere);
    space.attach(first);
    std::filesystem::remove(first.files[0]);
    EXPECT_FALSE(trim_snapshot_file(second.files[0], second.tensors[0].extents, 1));
    EXPECT_EQ(wrong_in(space, "t", 4 * MiB, 1), "");
  }
  std::filesystem::remove_all(memory);
  (void)trim_snapshot_file(second.files[0], second.tensors[0].extents, 1);
  SwapSpace space(options());
  space.attach(second);
  EXPECT_EQ(wrong_in(space, "t", 4 * MiB, 2), "");
}

}  // namespace
}  // namespace tensorferry
