// What `full` makes durable: all files at once, then each directory that holds one of them at that
// time, once; and what the error says if that fails.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "handle/handle_fixture.h"

namespace tensorferry::handle {
namespace {

using Kind = Gate::Event::Kind;

ino_t inode_of(int fd) {
  struct stat facts{};
  EXPECT_EQ(::fstat(fd, &facts), 0);
  return facts.st_ino;
}

ino_t inode_of(const std::string& path) {
  struct stat facts{};
  EXPECT_EQ(::stat(path.c_str(), &facts), 0) << path;
  return facts.st_ino;
}

// Notes every sync. Only the engine `threads` and inline callers sync through the system.
class SyncLog : public os::System {
 public:
  int fsync(int fd) override {
    {
      const std::lock_guard lock(mutex_);
      synced_.push_back(inode_of(fd));
    }
    return System::fsync(fd);
  }
  // The syncs since the last call.
  [[nodiscard]] std::vector<ino_t> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(synced_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<ino_t> synced_;
};

class DurabilityTest : public ::testing::Test {
 protected:
  DurabilityTest() {
    for (const char* name : {"one", "two"}) std::filesystem::create_directory(dir.file(name));
  }

  // Makes files in both directories in turn, and a write to each.
  void make_writes(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::string name = dir.file(i % 2 == 0 ? "one/" : "two/") + std::to_string(i);
      writes.push_back({memory.bytes(), File::open(name, Access::write), 0});
      files.insert(inode_of(name));
    }
  }

  // The number of syncs that are held at the gate or have passed it.
  std::vector<ino_t> synced(Kind kind) {
    std::vector<ino_t> found;
    for (const auto& event : gate.events()) {
      if (event.kind != kind || !engines::is_sync(event.request.kind)) continue;
      found.push_back(kind == Kind::submitted ? inode_of(event.request.fd) : 0);
    }
    return found;
  }

  // Whether that number reaches `count` before the hang limit.
  bool sync_count(Kind kind, std::size_t count) {
    const auto deadline = Operation::Clock::now() + hang_limit;
    while (synced(kind).size() < count && Operation::Clock::now() < deadline) {
      std::this_thread::yield();
    }
    return synced(kind).size() >= count;
  }

  support::TempDir dir;
  Memory memory{4096};
  Gate gate;
  std::vector<WriteTransfer> writes;
  std::set<ino_t> files;
};

// --- Which directory ---------------------------------------------------------------------------

TEST_F(DurabilityTest, full_syncs_the_directory_that_holds_the_file_after_a_rename) {
  SyncLog log;
  Seams seams;
  seams.system = &log;
  Handle handle = make_handle({.engine = EngineKind::threads}, seams);
  const File file = files::open(log, dir.file("one/data"), Access::read_write);
  const std::map<std::string, std::function<void()>> calls{
      {"sync", [&] { handle.sync(file, Durability::full).wait(); }},
      {"write", [&] { handle.write(memory.bytes(), file, 0, Durability::full).wait(); }},
      {"write_now", [&] { handle.write_now(memory.bytes(), file, 0, Durability::full); }},
      {"write_many",
       [&] {
         const WriteTransfer one{memory.bytes(), file, 0};
         handle.write_many({&one, 1}, Durability::full).wait();
       }},
  };
  std::string from = "one";
  std::string to = "two";
  for (const auto& [name, call] : calls) {
    call();
    EXPECT_EQ(log.take(),
              std::vector({inode_of(dir.file(from + "/data")), inode_of(dir.file(from))}))
        << name;
    std::filesystem::rename(dir.file(from + "/data"), dir.file(to + "/data"));
    std::swap(from, to);
    call();
    EXPECT_EQ(log.take(),
              std::vector({inode_of(dir.file(from + "/data")), inode_of(dir.file(from))}))
        << name << " after the rename";
  }
}

TEST_F(DurabilityTest, full_syncs_the_directory_of_the_time_of_the_sync_not_of_the_call) {
  const File file = File::open(dir.file("one/data"), Access::read_write);
  Handle handle = gate.open_handle({});
  const Operation operation = handle.write(memory.bytes(), file, 0, Durability::full);
  ASSERT_TRUE(gate.holds(1));
  std::filesystem::rename(dir.file("one/data"), dir.file("two/data"));
  gate.let_pass(2);  // the bytes and the file
  ASSERT_TRUE(sync_count(Kind::submitted, 2));
  EXPECT_EQ(synced(Kind::submitted).back(), inode_of(dir.file("two")));
  gate.open();
  EXPECT_EQ(outcome_code(operation), 0);
}

TEST_F(DurabilityTest, a_file_that_is_deleted_has_no_directory_to_sync) {
  const File file = File::open(dir.file("one/data"), Access::read_write);
  ASSERT_EQ(::unlink(dir.file("one/data").c_str()), 0);
  gate.open();
  Handle handle = gate.open_handle({});
  EXPECT_EQ(outcome_code(handle.sync(file, Durability::full)), 0);
  EXPECT_EQ(synced(Kind::completed).size(), 1U);
}

// --- Many files --------------------------------------------------------------------------------

TEST_F(DurabilityTest, many_files_are_synced_at_once_and_then_each_directory_once) {
  constexpr std::size_t count = 12;
  make_writes(count);
  Handle handle = gate.open_handle({.queue_depth = 32});
  const Operation operation = handle.write_many(writes, Durability::full);
  ASSERT_TRUE(gate.holds(count));
  gate.let_pass(count);  // the bytes
  ASSERT_TRUE(sync_count(Kind::submitted, count));
  ASSERT_TRUE(gate.holds(count)) << "all files are under way together";
  const auto first = synced(Kind::submitted);
  EXPECT_EQ(std::set(first.begin(), first.end()), files);

  gate.let_pass(count - 1);
  ASSERT_TRUE(sync_count(Kind::completed, count - 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(synced(Kind::submitted).size(), count) << "no directory before the last file";

  gate.let_pass(1);
  ASSERT_TRUE(gate.holds(2)) << "both directories are under way together";
  const auto all = synced(Kind::submitted);
  EXPECT_EQ(std::set(all.begin() + count, all.end()),
            std::set({inode_of(dir.file("one")), inode_of(dir.file("two"))}));
  EXPECT_FALSE(operation.done());
  gate.open();
  EXPECT_EQ(outcome_code(operation), 0);
  EXPECT_EQ(synced(Kind::completed).size(), count + 2);
}

TEST_F(DurabilityTest, one_directory_by_several_paths_is_synced_once) {
  std::filesystem::create_directory_symlink(dir.file("one"), dir.file("alias"));
  for (const char* name : {"one/a", "alias/b", "one/../one/c"}) {
    writes.push_back({memory.bytes(), File::open(dir.file(name), Access::write), 0});
  }
  gate.open();
  Handle handle = gate.open_handle({});
  EXPECT_EQ(outcome_code(handle.write_many(writes, Durability::full)), 0);
  EXPECT_EQ(synced(Kind::completed).size(), 4U);
}

TEST_F(DurabilityTest, after_a_failed_sync_of_a_file_no_directory_is_synced_and_none_twice) {
  make_writes(6);
  gate.sync_result = -EIO;
  Handle handle = gate.open_handle({});
  const Operation operation = handle.write_many(writes, Durability::full);
  ASSERT_TRUE(gate.holds(6));
  gate.let_pass(6);
  ASSERT_TRUE(sync_count(Kind::submitted, 6));
  gate.open();
  const auto error = outcome(operation);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), EIO);
  const auto tried = synced(Kind::submitted);
  EXPECT_EQ(std::set(tried.begin(), tried.end()), files) << "each file once, and nothing else";
  EXPECT_EQ(tried.size(), files.size());
  EXPECT_EQ(handle.stats().failed_operations, 1U);
}

TEST_F(DurabilityTest, a_directory_that_fails_is_named_beside_the_file) {
  make_writes(1);
  Handle handle = gate.open_handle({});
  const Operation operation = handle.write_many(writes, Durability::full);
  gate.let_pass(2);
  ASSERT_TRUE(sync_count(Kind::submitted, 2));
  gate.sync_result = -EIO;
  gate.open();
  const auto error = outcome(operation);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->path(), writes.front().file.path());
  EXPECT_NE(error->hint().find(std::filesystem::canonical(dir.file("one")).string()),
            std::string::npos)
      << error->what();
}

TEST_F(DurabilityTest, a_directory_that_is_not_found_is_the_operations_error) {
  class NoDirectories : public os::System {
    int open(const char* path, int flags, mode_t mode) override {
      return (flags & O_DIRECTORY) == O_DIRECTORY ? -EACCES : System::open(path, flags, mode);
    }
  } system;
  gate.open();
  Handle handle = gate.open_handle({}, &system);
  const File file = files::open(system, dir.file("one/data"), Access::write);
  const auto error = outcome(handle.write(memory.bytes(), file, 0, Durability::full));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), EACCES);
  EXPECT_EQ(error->path(), std::filesystem::canonical(dir.file("one")).string());
  EXPECT_EQ(outcome_code(handle.write(memory.bytes(), file, 0, Durability::data)), 0);
}

// --- Every engine ------------------------------------------------------------------------------

class DurabilityOnEngine : public HandleTest {};
TENSORFERRY_ON_EVERY_ENGINE(DurabilityOnEngine);

TEST_P(DurabilityOnEngine, many_files_are_made_durable_whatever_the_depth) {
  for (const unsigned depth : {1U, 2U, 64U}) {
    Handle handle({.engine = GetParam(), .queue_depth = depth, .workers = 2});
    Memory memory = Memory::with_pattern(5000, 0, 7);
    std::vector<WriteTransfer> writes;
    for (int i = 0; i < 40; ++i) {
      const std::string name = dir.file("file" + std::to_string(i));
      writes.push_back({memory.bytes(), File::open(name, Access::write), 0});
    }
    for (const Durability durability : {Durability::data, Durability::full}) {
      ASSERT_EQ(outcome_code(handle.write_many(writes, durability)), 0);
    }
    EXPECT_EQ(handle.stats().operations, 2U);
  }
}

}  // namespace
}  // namespace tensorferry::handle
