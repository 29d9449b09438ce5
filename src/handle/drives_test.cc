// One handle over several drives: each has a crew of its own, and one operation may use them all.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"
#include "support/faulty_engine.h"
#include "support/loop_device.h"

namespace tensorferry::handle {
namespace {

constexpr std::size_t drive_bytes = 8 * MiB;

class Drives : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto why = support::LoopDevice::unavailable_reason("ext4"); !why.empty()) {
      GTEST_SKIP() << why;
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      auto& drive = *drives_.emplace_back(std::make_unique<support::LoopDevice>(64 * MiB));
      drive.make_file_system("ext4");
      drive.mount();
      support::write_whole_file(drive.file("data"), support::pattern(drive_bytes, 0, i));
      files_.push_back(File::open(drive.file("data"), Access::read_write));
    }
  }
  void TearDown() override {
    files_.clear();
    for (const auto& drive : drives_) drive->unmount();
  }

  // A handle whose first crew, that of the drive which is used first, waits at the gate.
  [[nodiscard]] Handle with_first_drive_held() {
    Seams seams = gate_.seams();
    seams.open_engine = [this, held = seams.open_engine](EngineKind kind, unsigned depth,
                                                         os::System& system) {
      if (engines_opened_++ == 0) return held(kind, depth, system);
      return engines::open_engine(EngineKind::threads, depth, system);
    };
    HandleOptions options;
    options.workers = 1;
    return make_handle(options, seams);
  }

  [[nodiscard]] std::string read_fault(const Memory& memory, std::uint32_t drive) {
    return support::pattern_fault(memory.bytes(), 0, drive);
  }

  std::vector<std::unique_ptr<support::LoopDevice>> drives_;
  std::vector<File> files_;
  Gate gate_;
  int engines_opened_ = 0;
};

TEST_F(Drives, a_drive_that_hangs_holds_up_no_other) {
  Handle handle = with_first_drive_held();
  Memory slow(drive_bytes);
  Memory fast(drive_bytes);
  const Operation held = handle.read(slow.bytes(), files_[0]);
  ASSERT_TRUE(gate_.holds(1));
  for (int i = 0; i < 10; ++i) {
    const auto ended = support::outcome(handle.read(fast.bytes(), files_[1]));
    ASSERT_FALSE(ended) << ended->what();
    EXPECT_EQ(read_fault(fast, 1), "");
  }
  EXPECT_FALSE(held.done());
  gate_.open();
  held.wait();
  EXPECT_EQ(read_fault(slow, 0), "");
}

TEST_F(Drives, one_operation_reads_from_all) {
  Handle handle;
  Memory first(drive_bytes);
  Memory second(drive_bytes);
  const std::vector<ReadTransfer> transfers{{first.bytes(), files_[0]},
                                            {second.bytes(), files_[1]}};
  handle.read_many(transfers).wait();
  EXPECT_EQ(read_fault(first, 0), "");
  EXPECT_EQ(read_fault(second, 1), "");
  EXPECT_EQ(handle.stats().operations, 1U);
}

TEST_F(Drives, one_operation_writes_to_all_and_syncs_all) {
  Handle handle;
  const Memory first = Memory::with_pattern(drive_bytes, 0, 7);
  const Memory second = Memory::with_pattern(drive_bytes, 0, 8);
  const std::vector<WriteTransfer> transfers{{first.bytes(), files_[0]},
                                             {second.bytes(), files_[1]}};
  handle.write_many(transfers, Durability::full).wait();
  for (std::uint32_t i = 0; i < 2; ++i) {
    const auto whole = support::read_whole_file(drives_[i]->file("data"));
    EXPECT_EQ(support::pattern_fault(whole, 0, 7 + i), "");
  }
}

// One drive may fail before the other has its part of the operation.
TEST_F(Drives, operations_that_fail_at_once_on_one_leave_nothing_behind) {
  support::EngineFaults faults;
  faults.judge = [](const engines::Request&, std::uint64_t) {
    return support::Fault{support::Fault::Kind::fail, 0, EIO};
  };
  Seams seams;
  seams.open_engine = [&](EngineKind, unsigned depth, os::System& system) {
    return faults.open(EngineKind::threads, depth, system);
  };
  HandleOptions options;
  options.workers = 1;
  Handle handle = make_handle(options, seams);
  Memory first(4 * KiB);
  Memory second(4 * KiB);
  const std::vector<ReadTransfer> transfers{{first.bytes(), files_[0]},
                                            {second.bytes(), files_[1]}};
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(outcome_code(handle.read_many(transfers)), EIO);
  }
  handle.close();  // waits for all that it knows of
}

TEST_F(Drives, an_error_on_one_ends_the_operation_and_names_the_file) {
  Handle handle;
  Memory first(drive_bytes);
  Memory second(drive_bytes);
  files_[1].resize(MiB);
  const std::vector<ReadTransfer> transfers{{first.bytes(), files_[0]},
                                            {second.bytes(), files_[1]}};
  const auto ended = support::outcome(handle.read_many(transfers));
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->code(), ENODATA);
  EXPECT_EQ(ended->path(), drives_[1]->file("data"));
  handle.read(first.bytes(), files_[0]).wait();
}

TEST_F(Drives, an_operation_over_all_can_be_cancelled) {
  Handle handle = with_first_drive_held();
  Memory first(drive_bytes);
  Memory second(drive_bytes);
  const std::vector<ReadTransfer> transfers{{first.bytes(), files_[0]},
                                            {second.bytes(), files_[1]}};
  for (int i = 0; i < 5; ++i) {
    const Operation operation = handle.read_many(transfers);
    ASSERT_TRUE(gate_.holds(1));
    operation.cancel();
    EXPECT_EQ(support::outcome_code(operation), ECANCELED);
  }
}

TEST_F(Drives, closing_finishes_a_write_over_all) {
  Memory memory = Memory::with_pattern(drive_bytes, 0, 5);
  const std::vector<WriteTransfer> transfers{{memory.bytes(), files_[0]},
                                             {memory.bytes(), files_[1]}};
  std::optional<Operation> operation;
  {
    Handle handle;
    operation = handle.write_many(transfers, Durability::data);
  }
  EXPECT_TRUE(operation->done());
  EXPECT_FALSE(operation->error());
  for (const auto& drive : drives_) {
    EXPECT_EQ(support::pattern_fault(support::read_whole_file(drive->file("data")), 0, 5), "");
  }
}

// The thread that calls it is needed for the operation over both.
TEST_F(Drives, a_callback_may_destroy_the_handle_of_an_operation_over_all) {
  Memory memory = Memory::with_pattern(drive_bytes, 0, 6);
  Memory small(4 * KiB);
  std::thread([] {}).join();  // with the first one ThreadSanitizer starts one of its own
  const std::size_t before = threads();
  auto handle = std::make_unique<Handle>(with_first_drive_held());
  const Operation read = handle->read(small.bytes(), files_[0]);
  ASSERT_TRUE(gate_.holds(1));
  const std::vector<WriteTransfer> transfers{{memory.bytes(), files_[0]},
                                             {memory.bytes(), files_[1]}};
  const Operation write = handle->write_many(transfers);
  ASSERT_TRUE(gate_.holds(2));
  std::promise<void> gone;
  read.when_done([&] {
    handle.reset();
    gone.set_value();
  });
  gate_.let_pass(1);
  ASSERT_EQ(gone.get_future().wait_for(hang_limit), std::future_status::ready);
  gate_.open();
  EXPECT_EQ(outcome_code(write), 0);
  const auto limit = Operation::Clock::now() + hang_limit;
  while (threads() > before && Operation::Clock::now() < limit) std::this_thread::yield();
  EXPECT_LE(threads(), before) << "a worker has stayed";
}

TEST_F(Drives, the_handle_knows_what_each_has_done) {
  Handle handle;
  Memory memory(drive_bytes);
  for (const std::size_t drive : {0U, 1U, 1U}) handle.read(memory.bytes(), files_[drive]).wait();
  const std::vector<DeviceUse> uses = handle.conductor().device_use();
  ASSERT_EQ(uses.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const std::string number = device_of(drives_[i]->mount_point()).number;
    const auto found = std::ranges::find(uses, number, &DeviceUse::number);
    ASSERT_NE(found, uses.end());
    EXPECT_EQ(found->bytes, (i + 1) * drive_bytes);
    EXPECT_GT(found->busy_seconds, 0);
  }
}

TEST(FirstFileInMemory, leaves_a_drive_its_depth) {
  const support::TempDir dir;
  std::vector<File> files;
  const std::string in_memory = "/dev/shm/tensorferry-test-" + std::to_string(::getpid());
  for (const std::string& path : {in_memory, dir.file("data")}) {
    support::write_whole_file(path, support::pattern(drive_bytes, 0, 1));
    files.push_back(File::open(path, Access::read));
    std::filesystem::remove(path);
  }
  std::vector<unsigned> depths;
  Seams seams;
  seams.open_engine = [&](EngineKind, unsigned depth, os::System& system) {
    depths.push_back(depth);
    return engines::open_engine(EngineKind::threads, depth, system);
  };
  // The depth of each engine that a handle opens to read these files, in their order.
  const auto depths_of = [&](std::span<const File> read) {
    depths.clear();
    Handle handle = make_handle({}, seams);
    Memory memory(drive_bytes);
    for (const File& file : read) handle.read(memory.bytes(), file).wait();
    return depths;
  };
  const std::vector<unsigned> alone = depths_of(std::span(files).last(1));
  std::vector<unsigned> both = depths_of(files);
  ASSERT_GT(both.size(), alone.size());
  both.erase(both.begin(), both.end() - static_cast<std::ptrdiff_t>(alone.size()));
  EXPECT_EQ(both, alone);
}

TEST(EmptyCall, needs_no_crew_and_leaves_the_drive_its_settings) {
  const support::TempDir dir;
  support::write_whole_file(dir.file("data"), support::pattern(MiB, 0, 1));
  Handle handle;
  handle.read_many({}).wait();
  handle.write_many({}, Durability::full).wait();
  const File file = File::open(dir.file("data"), Access::read_write);
  handle.read({}, file).wait();
  handle.write({}, file, MiB).wait();
  EXPECT_EQ(handle.stats().operations, 4U);
  EXPECT_TRUE(handle.conductor().device_use().empty());
}

}  // namespace
}  // namespace tensorferry::handle
