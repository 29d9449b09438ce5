// Faults of checkpoints: power cuts and kills in the middle of a save (F8), a full disk (F6), syncs
// that fail (F3) and flipped bits (F14). The old file or the new one, whole; damage is found.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <thread>

#include "handle/conductor.h"
#include "rig.h"
#include "support/loop_device.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::faults::save {
namespace {

using support::LoopDevice;
using support::Mount;
using support::PowerCut;

// Tensors whose bytes tell which save they come from.
class Model {
 public:
  explicit Model(std::vector<std::size_t> sizes) : sizes_(std::move(sizes)) {}

  void save(Handle& handle, const std::string& path, std::uint32_t version) const {
    std::vector<support::Memory> memories;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      memories.push_back(support::Memory::with_pattern(sizes_[i], i, version, i % 3));
    }
    save(handle, path, version, memories);
  }
  void save(Handle& handle, const std::string& path, std::uint32_t version,
            const std::vector<support::Memory>& memories) const {
    std::vector<TensorWrite> tensors;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      tensors.push_back({"t" + std::to_string(i), DType::u8, {sizes_[i]}, memories[i].bytes()});
    }
    save_safetensors(handle, path, tensors, {.metadata = {{{"version", std::to_string(version)}}}});
  }

  // The version of the file if all of it is there and of one version; else throws, or returns 0.
  [[nodiscard]] std::uint32_t version_of(Handle& handle, const std::string& path) const {
    const Safetensors file = Safetensors::open(path);
    std::uint32_t version = 0;
    for (const auto& [key, value] :
         file.metadata().value_or(std::map<std::string, std::string>())) {
      if (key == "version") std::from_chars(value.data(), value.data() + value.size(), version);
    }
    std::vector<support::Memory> memories;
    std::vector<TensorRead> reads;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < sizes_.size(); ++i) names.push_back("t" + std::to_string(i));
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      memories.emplace_back(sizes_[i]);
      reads.push_back({names[i], memories.back().bytes()});
    }
    file.read(handle, reads, Verify::required).wait();
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (!pattern_fault(memories[i].bytes(), i, version).empty()) return 0;
    }
    return version;
  }

 private:
  std::vector<std::size_t> sizes_;
};

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename() != "lost+found") names.push_back(entry.path().filename());
  }
  return names;
}

// How long a call takes, at least a millisecond.
template <class Call>
std::uint64_t microseconds_of(Call call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  const auto taken = std::chrono::steady_clock::now() - begin;
  return 1000 + static_cast<std::uint64_t>(
                    std::chrono::duration_cast<std::chrono::microseconds>(taken).count());
}

int rounds(int count) { return soaking() ? 4 * count : count; }

TEST(CheckpointFaults, after_a_power_cut_the_old_file_or_the_new_one_is_whole) {
  if (const auto reason = LoopDevice::unavailable_reason("ext4"); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  LoopDevice device(64 * MiB);
  device.make_file_system("ext4");
  const Model model({300'000, 5'000, 1, 900'001});
  Handle handle;
  std::mt19937_64 dice(1);
  std::uint32_t version = 1;
  int acknowledged = 0;
  int new_ones = 0;
  device.mount();
  model.save(handle, device.file("model"), version);
  const std::uint64_t usual =
      microseconds_of([&] { model.save(handle, device.file("model"), version); });
  for (int round = 0; round < rounds(100); ++round) {
    const std::uint32_t next = version + 1;
    std::atomic<bool> saved{false};
    std::thread saver([&] {
      saved = !thrown_by([&] { model.save(handle, device.file("model"), next); }).has_value();
    });
    std::this_thread::sleep_for(std::chrono::microseconds(dice() % (2 * usual)));
    const bool known = saved;
    device.cut_power(round % 3 == 0 ? PowerCut::journal_flushed : PowerCut::journal_lost);
    saver.join();
    device.unmount();
    device.mount();
    const std::uint32_t found = model.version_of(handle, device.file("model"));
    ASSERT_TRUE(found == version || found == next) << "round " << round << ": " << found;
    if (known) {
      ASSERT_EQ(found, next) << "round " << round << ": an acknowledged save was lost";
    }
    acknowledged += known ? 1 : 0;
    new_ones += found == next ? 1 : 0;
    version = found;
  }
  EXPECT_GT(acknowledged, 0) << "no save ended before the cut";
  EXPECT_LT(new_ones, rounds(100)) << "no save was cut";
  model.save(handle, device.file("model"), version + 1);
  EXPECT_EQ(names_in(device.mount_point()), std::vector<std::string>{"model"});
  device.unmount();
}

TEST(CheckpointFaults, after_a_kill_the_old_file_or_the_new_one_is_whole) {
  const support::TempDir dir;
  const std::string path = dir.file("model");
  const Model model({3'000'000, 70'000, 1, 2'000'001});
  std::mt19937_64 dice(2);
  std::uint32_t version = 1;
  int new_ones = 0;
  std::uint64_t usual = 0;
  {
    Handle handle;
    usual = microseconds_of([&] { model.save(handle, path, version); });
  }
  int acknowledged_saves = 0;
  for (int round = 0; round < rounds(60); ++round) {
    std::array<int, 2> told{};
    ASSERT_EQ(::pipe2(told.data(), O_CLOEXEC), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Handle handle;
      for (std::uint32_t next = version + 1;; ++next) {
        model.save(handle, path, next);
        if (::write(told[1], &next, sizeof(next)) != sizeof(next)) ::_exit(1);
      }
    }
    ::close(told[1]);
    std::this_thread::sleep_for(std::chrono::microseconds(dice() % (4 * usual)));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    Handle handle;
    std::uint32_t acknowledged = version;
    while (::read(told[0], &acknowledged, sizeof(acknowledged)) > 0) ++acknowledged_saves;
    ::close(told[0]);
    const std::uint32_t found = model.version_of(handle, path);
    ASSERT_TRUE(found == acknowledged || found == acknowledged + 1)
        << "round " << round << ": " << found << ", and version " << acknowledged << " was saved";
    new_ones += found > version ? 1 : 0;
    version = found;
    ASSERT_LE(names_in(dir.path()).size(), 2U) << "each save removes what a killed one left";
  }
  EXPECT_GT(new_ones, 0) << "no save ever ended";
  EXPECT_GT(acknowledged_saves, 0) << "no save ever returned";
  Handle handle;
  model.save(handle, path, version + 1);
  EXPECT_EQ(names_in(dir.path()), std::vector<std::string>{"model"});
}

TEST(CheckpointFaults, a_disk_full_at_every_4_kib_of_a_save_leaves_the_old_file_alone) {
  if (const auto reason = support::mounts_unavailable_reason(); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  const Mount disk("tmpfs", "size=10m");
  const std::string path = disk.file("model");
  const Model model({4 * MiB - 100'000, 77'777});
  Handle handle;
  model.save(handle, path, 1);
  std::vector<support::Memory> next;
  next.push_back(support::Memory::with_pattern(4 * MiB - 100'000, 0, 2));
  next.push_back(support::Memory::with_pattern(77'777, 1, 2));
  struct stat old{};
  ASSERT_EQ(::stat(path.c_str(), &old), 0);
  const int filler = ::open(disk.file("filler").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(filler, 0);
  const auto free_bytes = [&] {
    struct statfs facts{};
    ::fstatfs(filler, &facts);
    return static_cast<std::uint64_t>(facts.f_bfree) * static_cast<std::uint64_t>(facts.f_bsize);
  };
  int full = 0;
  bool saved = false;
  const std::uint64_t space = free_bytes();
  ASSERT_EQ(::fallocate(filler, 0, 0, static_cast<off_t>(space)), 0);
  for (std::uint64_t free = 0; free <= 4 * MiB; free += 4096) {
    ASSERT_EQ(::ftruncate(filler, static_cast<off_t>(space - free)), 0);
    const auto error = thrown_by([&] { model.save(handle, path, 2, next); });
    ASSERT_EQ(names_in(disk.path()).size(), 2U) << "free " << free << ": something is left behind";
    saved = !error.has_value();
    if (saved) break;  // from here on there is space enough
    ASSERT_EQ(error->code(), ENOSPC) << error->what();
    ++full;
    struct stat now{};
    ASSERT_EQ(::stat(path.c_str(), &now), 0);
    ASSERT_EQ(now.st_ino, old.st_ino) << "free " << free;
    ASSERT_EQ(now.st_mtim.tv_nsec, old.st_mtim.tv_nsec);
    if (full % 100 == 0) {
      ASSERT_EQ(model.version_of(handle, path), 1U) << "free " << free;
    }
  }
  EXPECT_GT(full, 900);
  ASSERT_EQ(::ftruncate(filler, 0), 0);
  if (!saved) model.save(handle, path, 2, next);
  EXPECT_EQ(model.version_of(handle, path), 2U) << "it works again with space";
  ::close(filler);
}

// Fails one sync, counted from the first.
class SyncsThatFail final : public os::System {
 public:
  explicit SyncsThatFail(int failing) : failing_(failing) {}
  int fsync(int fd) override { return ++syncs == failing_ ? -EIO : System::fsync(fd); }
  int fdatasync(int fd) override { return ++syncs == failing_ ? -EIO : System::fdatasync(fd); }
  int syncs = 0;

 private:
  int failing_;
};

Handle handle_with(os::System& system) {
  handle::Seams seams;
  seams.system = &system;
  return handle::make_handle({}, std::move(seams));
}

TEST(CheckpointFaults, every_sync_that_fails_fails_the_save) {
  const support::TempDir dir;
  const std::string path = dir.file("model");
  const Model model({100'000, 1});
  int syncs = 0;
  {
    SyncsThatFail counting(0);
    Handle handle = handle_with(counting);
    model.save(handle, path, 1);
    syncs = counting.syncs;
  }
  ASSERT_GE(syncs, 2) << "the file and the directory";
  for (int failing = 1; failing <= syncs; ++failing) {
    SyncsThatFail system(failing);
    Handle handle = handle_with(system);
    const auto error = thrown_by([&] { model.save(handle, path, 2); });
    ASSERT_TRUE(error.has_value()) << "sync " << failing;
    EXPECT_EQ(error->code(), EIO);
    EXPECT_EQ(system.syncs, failing) << "a failed sync is never repeated";
    Handle reader;
    const std::uint32_t found = model.version_of(reader, path);
    EXPECT_EQ(found, failing < syncs ? 1U : 2U) << "only the directory's sync follows the name";
    EXPECT_EQ(names_in(dir.path()), std::vector<std::string>{"model"});
  }
}

// Holds requests back for so long that the save asks for its progress meanwhile.
struct SlowRig : Rig {
  SlowRig() : Rig({.engine = EngineKind::threads, .block_bytes = 64 * KiB, .workers = 1}) {
    engine.delay_max = std::chrono::milliseconds(500);
  }
};

TEST(CheckpointFaults, a_progress_that_throws_ends_the_write_first) {
  const support::TempDir dir;
  SlowRig rig;
  const auto memory = support::Memory::with_pattern(8 * MiB, 0, 1);
  const std::vector<TensorWrite> tensors{{"t", DType::u8, {8 * MiB}, memory.bytes()}};
  const auto throws = [](std::uint64_t, std::uint64_t) -> bool {
    throw std::runtime_error("enough");
  };
  EXPECT_THROW(save_safetensors(rig.handle, dir.file("model"), tensors, {.progress = throws}),
               std::runtime_error);
  const std::uint64_t requests = rig.engine.requests();
  EXPECT_EQ(rig.handle.stats().operations, 1U) << "the write is still in flight";
  EXPECT_LT(requests, 128U) << "the write was not cancelled";
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(rig.engine.requests(), requests) << "something goes on";
  EXPECT_TRUE(names_in(dir.path()).empty());
}

TEST(CheckpointFaults, of_ten_thousand_flipped_bits_every_one_in_a_tensor_is_named) {
  const support::TempDir dir;
  const std::string path = dir.file("model");
  Handle handle;
  const Model model({40'000, 1, 12'345, 8, 70'000, 300});
  model.save(handle, path, 1);
  const Safetensors whole = Safetensors::open(path);
  const std::uint64_t bytes = std::filesystem::file_size(path);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  std::mt19937_64 dice(3);
  int in_tensors = 0;
  for (int round = 0; round < 10'000; ++round) {
    const std::uint64_t at = dice() % bytes;
    unsigned char byte = 0;
    ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
    const auto flipped = static_cast<unsigned char>(byte ^ (1U << (dice() % 8)));
    ASSERT_EQ(::pwrite(fd, &flipped, 1, static_cast<off_t>(at)), 1);
    const auto error = thrown_by([&] { (void)model.version_of(handle, path); });
    for (const TensorInfo& tensor : whole.tensors()) {
      if (at < tensor.offset || at >= tensor.offset + tensor.bytes) continue;
      ++in_tensors;
      ASSERT_TRUE(error.has_value()) << "byte " << at;
      ASSERT_EQ(error->code(), EBADMSG);
      ASSERT_EQ(error->offset(), tensor.offset);
      ASSERT_NE(error->hint().find("'" + tensor.name + "'"), std::string::npos) << error->what();
    }
    ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
  }
  ::close(fd);
  EXPECT_GT(in_tensors, 8'000);
  EXPECT_EQ(model.version_of(handle, path), 1U);
}

}  // namespace
}  // namespace tensorferry::faults::save
