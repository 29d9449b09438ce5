// A witness sees every byte of an operation, whatever way it takes, and can fail it.
#include "handle/witness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "handle/handle_fixture.h"
#include "tensorferry/file.h"

namespace tensorferry::handle {
namespace {

// Counts how often it has seen each byte, and keeps the last value.
class Recorder final : public Witness {
 public:
  explicit Recorder(std::optional<Error> verdict = {}) : verdict_(std::move(verdict)) {}

  void see(const files::OpenFile& file, std::uint64_t offset,
           std::span<const std::byte> bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    std::vector<Seen>& seen = seen_[&file];
    seen.resize(std::max<std::size_t>(seen.size(), offset + bytes.size()));
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      Seen& here = seen[offset + i];
      ++here.times;
      here.value = bytes[i];
    }
  }
  std::optional<Error> verdict() noexcept override {
    ++verdicts;
    return verdict_;
  }

  // What is wrong with what it saw of a part whose bytes are `expected`; "" if nothing is.
  [[nodiscard]] std::string fault(const Part& part, std::span<const std::byte> expected) {
    const std::lock_guard lock(mutex_);
    const std::vector<Seen>& seen = seen_[part.file.get()];
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::size_t at = part.offset + i;
      const Seen here = at < seen.size() ? seen[at] : Seen();
      if (here.times == 1 && here.value == expected[i]) continue;
      return "byte " + std::to_string(at) + " was seen " + std::to_string(here.times) + " times" +
             (here.value == expected[i] ? "" : ", and is wrong");
    }
    return "";
  }

  int verdicts = 0;

 private:
  struct Seen {
    int times = 0;
    std::byte value{};
  };
  std::mutex mutex_;
  std::map<const files::OpenFile*, std::vector<Seen>> seen_;  // by the offset
  const std::optional<Error> verdict_;
};

Operation start(const Handle& handle, Direction direction, std::vector<Part> parts,
                const std::shared_ptr<Witness>& witness) {
  return handle.conductor()
      .transfer(direction, parts, Durability::none, Caller::goes_on, witness)
      .or_throw();
}

class WitnessTest : public HandleTest {};

// In place, through slots, ragged, small neighbours, neighbours with gaps, and a far one.
std::vector<std::pair<std::uint64_t, std::size_t>> places() {
  return {{0, 2 * MiB},         {2 * MiB, 777},          {2 * MiB + 777, 5'000},
          {2 * MiB + 9'000, 1}, {2 * MiB + 20'000, 333}, {2 * MiB + 40'001, MiB + 17}};
}

TEST_P(WitnessTest, sees_every_byte_of_a_read_once) {
  for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {  // of the memory
    const File one = File::open(make_file("one", 4 * MiB, 1), Access::read);
    const File two = File::open(make_file("two", 4 * MiB, 2), Access::read);
    Handle handle(options());
    const auto witness = std::make_shared<Recorder>();
    std::vector<Memory> memories;
    std::vector<Part> parts;
    for (const File& file : {one, two}) {
      for (const auto& [offset, bytes] : places()) {
        memories.emplace_back(bytes, shift);
        parts.push_back(part_of(memories.back().bytes(), file, offset));
      }
    }
    const Operation reading = start(handle, Direction::read, parts, witness);
    ASSERT_EQ(outcome_code(reading), 0);
    std::size_t asked = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::uint32_t seed = i < places().size() ? 1 : 2;
      ASSERT_EQ(support::pattern_fault(memories[i].bytes(), parts[i].offset, seed), "") << i;
      EXPECT_EQ(witness->fault(parts[i], memories[i].bytes()), "") << i;
      asked += parts[i].bytes;
    }
    EXPECT_EQ(reading.bytes(), asked);
    EXPECT_EQ(witness->verdicts, 1);
  }
}

TEST_P(WitnessTest, sees_every_byte_of_a_write_once) {
  for (const std::size_t shift : {std::size_t{0}, std::size_t{1}}) {
    const std::string path = dir.file("written" + std::to_string(shift));
    const File file = File::open(path, Access::write);
    Handle handle(options());
    const auto witness = std::make_shared<Recorder>();
    std::vector<Memory> memories;
    std::vector<Part> parts;
    for (const auto& [offset, bytes] : places()) {
      memories.push_back(Memory::with_pattern(bytes, offset, 3, shift));
      parts.push_back(part_of(memories.back().bytes(), file, offset));
    }
    ASSERT_EQ(outcome_code(start(handle, Direction::write, parts, witness)), 0);
    const auto written = support::read_whole_file(path);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(witness->fault(parts[i], memories[i].bytes()), "") << i;
      EXPECT_EQ(support::pattern_fault(std::span(written).subspan(parts[i].offset, parts[i].bytes),
                                       parts[i].offset, 3),
                "");
    }
    EXPECT_EQ(witness->verdicts, 1);
  }
}

// Writes half of what it is given, in whole sectors.
class WritesHalf : public os::System {
 public:
  ssize_t pwrite(int fd, const std::byte* memory, std::size_t bytes,
                 std::uint64_t offset) override {
    ++writes;
    return System::pwrite(fd, memory, std::min(align_up(bytes / 2, 4 * KiB), bytes), offset);
  }
  int writes = 0;
};

TEST(WitnessOfSlots, sees_a_write_while_it_is_on_its_way_and_once_however_many_attempts_it_takes) {
  const support::TempDir dir;
  const File file = File::open(dir.file("written"), Access::write);
  Gate gate;
  WritesHalf system;
  Handle handle = gate.open_handle({}, &system);
  const auto witness = std::make_shared<Recorder>();
  const Memory memory = Memory::with_pattern(MiB, 0, 3, 1);
  const Part part = part_of(memory.bytes(), file, 0);
  const Operation writing = start(handle, Direction::write, {part}, witness);
  ASSERT_TRUE(gate.holds(1));
  const auto deadline = Operation::Clock::now() + hang_limit;
  while (!witness->fault(part, memory.bytes()).empty() && Operation::Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(witness->fault(part, memory.bytes()), "") << "the drive has nothing yet";
  EXPECT_EQ(system.writes, 0);
  gate.open();
  ASSERT_EQ(outcome_code(writing), 0);
  EXPECT_GT(system.writes, 4);
  EXPECT_EQ(witness->fault(part, memory.bytes()), "");
  EXPECT_EQ(support::pattern_fault(support::read_whole_file(dir.file("written")), 0, 3), "");
}

TEST_P(WitnessTest, fails_the_operation_with_its_error) {
  const File file = File::open(make_file("data", MiB, 1), Access::read);
  Handle handle(options());
  Memory memory(MiB, 0);
  const auto witness = std::make_shared<Recorder>(
      Error({.operation = "verify", .path = file.path(), .offset = 4096, .code = EBADMSG}));
  const Operation reading =
      start(handle, Direction::read, {part_of(memory.bytes(), file, 0)}, witness);
  EXPECT_EQ(outcome_code(reading), EBADMSG);
  EXPECT_EQ(reading.error()->offset(), 4096U);
  handle.read_now(memory.bytes(), file);  // the handle still works
}

TEST_P(WitnessTest, is_not_asked_about_an_operation_that_has_failed) {
  const File file = File::open(make_file("short", MiB, 1), Access::read);
  Handle handle(options());
  Memory memory(2 * MiB, 0);
  const auto witness = std::make_shared<Recorder>();
  const Operation reading =
      start(handle, Direction::read, {part_of(memory.bytes(), file, 0)}, witness);
  EXPECT_EQ(outcome_code(reading), ENODATA);
  EXPECT_EQ(witness->verdicts, 0);
}

INSTANTIATE_TEST_SUITE_P(engines, WitnessTest,
                         ::testing::Values(EngineKind::automatic, EngineKind::io_uring,
                                           EngineKind::libaio, EngineKind::threads),
                         engine_name);

}  // namespace
}  // namespace tensorferry::handle
