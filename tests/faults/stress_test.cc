// F12: many threads use many handles for everything at once. Every byte is right and (with
// ThreadSanitizer) nothing races.
#include <atomic>
#include <random>
#include <thread>

#include "rig.h"
#include "support/sanitizers.h"

namespace tensorferry::faults {
namespace {

using support::pattern;
using support::read_whole_file;
using support::write_whole_file;

constexpr std::uint32_t seed = 101;
constexpr std::size_t thread_count = 6;
constexpr std::size_t share_bytes = 1 * MiB + 1000;  // of each thread; the seams are unaligned
constexpr std::size_t file_bytes = thread_count * share_bytes;

constexpr int slowdown = support::sanitized ? 8 : 1;

int rounds(int count) { return (soaking() ? 20 : 1) * count / slowdown; }

// The work of one thread, with handles that all threads share, in its own part of the file. It
// keeps complaints, since assertions belong to the main thread.
class Guest {
 public:
  Guest(std::size_t number, std::vector<Handle*> handles, File file)
      : dice_(number),
        begin_(number * share_bytes),
        handles_(std::move(handles)),
        file_(std::move(file)),
        version_(static_cast<std::uint32_t>(seed)) {}

  void work(int count) {
    for (int i = 0; i < count && complaint_.empty(); ++i) {
      try {
        act();
      } catch (const std::exception& problem) {
        complaint_ = problem.what();
      }
    }
  }

  [[nodiscard]] const std::string& complaint() const { return complaint_; }
  [[nodiscard]] std::uint32_t version() const { return version_; }

 private:
  Handle& handle() { return *handles_[dice_() % handles_.size()]; }

  void act() {
    switch (dice_() % 7) {
      case 0:
        write_all();
        break;
      case 1:
        read_some();
        break;
      case 2:
        read_many();
        break;
      case 3:
        read_now();
        break;
      case 4:
        cancel_one();
        break;
      case 5:
        handle().sync(file_, dice_() % 2 == 0 ? Durability::data : Durability::full).wait();
        break;
      default:
        (void)handle().stats();
        (void)handle().engine_reason();
        break;
    }
  }

  void write_all() {
    const auto next = static_cast<std::uint32_t>(version_ + 1);
    GuardedMemory buffer(share_bytes, dice_() % 32);
    buffer.fill(begin_, next);
    Handle& used = handle();
    // In two halves at once.
    const std::size_t half = dice_() % share_bytes;
    const Operation first = used.write(buffer.bytes().first(half), file_, begin_);
    const Operation second = used.write(buffer.bytes().subspan(half), file_, begin_ + half);
    first.wait();
    second.wait();
    version_ = next;
  }

  void read_some() {
    PinnedBuffer memory(1 + dice_() % share_bytes);
    const std::uint64_t offset = begin_ + dice_() % (share_bytes - memory.size() + 1);
    const Operation operation = handle().read(memory.bytes(), file_, offset);
    while (!operation.wait_for(std::chrono::milliseconds(1))) (void)operation.bytes();
    complain(pattern_fault(memory.bytes(), offset, version_));
  }

  void read_many() {
    GuardedMemory buffer(100 * 4000, 1);
    std::vector<ReadTransfer> reads;
    for (std::uint64_t i = 0; i < 100; ++i) {
      reads.push_back({buffer.bytes().subspan(i * 4000, 4000), file_, begin_ + i * 4000});
    }
    std::shuffle(reads.begin(), reads.end(), dice_);
    handle().read_many(reads).wait();
    complain(buffer.fault(begin_, version_));
  }

  void read_now() {
    GuardedMemory buffer(1 + dice_() % 20'000, dice_() % 16);
    const std::uint64_t offset = begin_ + dice_() % 500'000;
    handle().read_now(buffer.bytes(), file_, offset);
    complain(buffer.fault(offset, version_));
  }

  void cancel_one() {
    GuardedMemory buffer(share_bytes);
    const Operation operation = handle().read(buffer.bytes(), file_, begin_);
    operation.cancel();
    const auto error = outcome(operation);
    if (error && error->code() != ECANCELED) complain(error->what());
    if (!error) complain(buffer.fault(begin_, version_));
  }

  void complain(const std::string& text) {
    if (complaint_.empty()) complaint_ = text;
  }

  std::mt19937_64 dice_;
  std::uint64_t begin_;
  std::vector<Handle*> handles_;
  File file_;
  std::uint32_t version_;
  std::string complaint_;
};

TEST(Stress, threads_that_share_handles_read_and_write_exactly) {
  const support::TempDir dir;
  write_whole_file(dir.file("data"), pattern(file_bytes, 0, seed));
  Handle uring({.engine = EngineKind::automatic, .queue_depth = 16, .workers = 2});
  Handle libaio({.engine = EngineKind::libaio, .block_bytes = 64 * KiB, .queue_depth = 4});
  Handle threads({.engine = EngineKind::threads, .queue_depth = 8, .workers = 2});
  Handle drained({.block_bytes = 32 * KiB,
                  .queue_depth = 4,
                  .submit = Submit::single,
                  .overlap = Overlap::off});
  const File file = File::open(dir.file("data"), Access::read_write);
  std::vector<Guest> guests;
  for (std::size_t i = 0; i < thread_count; ++i) {
    guests.emplace_back(i, std::vector<Handle*>{&uring, &libaio, &threads, &drained}, file);
  }
  std::vector<std::thread> running;
  for (Guest& guest : guests) running.emplace_back([&] { guest.work(rounds(150)); });
  for (std::thread& thread : running) thread.join();
  const auto found = read_whole_file(dir.file("data"));
  ASSERT_EQ(found.size(), file_bytes);
  for (std::size_t i = 0; i < thread_count; ++i) {
    EXPECT_EQ(guests[i].complaint(), "") << "thread " << i;
    const auto share = std::span(found).subspan(i * share_bytes, share_bytes);
    EXPECT_EQ(pattern_fault(share, i * share_bytes, guests[i].version()), "") << "thread " << i;
  }
}

TEST(Stress, threads_that_open_and_close_handles_and_memory_of_their_own_do_not_meet) {
  const support::TempDir dir;
  write_whole_file(dir.file("data"), pattern(file_bytes, 0, seed));
  std::vector<std::thread> running;
  std::atomic<int> bad{0};
  for (std::size_t t = 0; t < 4; ++t) {
    running.emplace_back([&, t] {
      std::mt19937_64 dice(t);
      constexpr EngineKind kinds[] = {EngineKind::io_uring, EngineKind::threads,
                                      EngineKind::automatic, EngineKind::libaio};
      for (int round = 0; round < std::max(rounds(40), 3); ++round) {
        Handle handle({.engine = kinds[dice() % 4], .queue_depth = 4, .workers = 2});
        const File file = File::open(dir.file("data"), Access::read);
        std::vector<PinnedBuffer> memory;
        std::vector<Operation> operations;
        for (std::size_t i = 0; i < 6; ++i) {
          memory.emplace_back(300'000);
          operations.push_back(handle.read(memory.back().bytes(), file, i * 5000));
        }
        for (std::size_t i = 0; i < 6; ++i) {
          if (outcome(operations[i])) ++bad;
          if (!pattern_fault(memory[i].bytes(), i * 5000, seed).empty()) ++bad;
        }
        // Frees it in flight: the operation keeps the memory.
        PinnedBuffer early(500'000);
        const Operation last = handle.read(early.bytes(), file, 0);
        early.free();
        if (outcome(last)) ++bad;
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  EXPECT_EQ(bad, 0);
}

// All threads write one file through faulty engines: no byte is lost.
TEST(Stress, threads_on_faulty_engines_lose_nothing) {
  const support::TempDir dir;
  write_whole_file(dir.file("data"), pattern(file_bytes, 0, seed));
  Rig rig({.engine = EngineKind::io_uring, .block_bytes = 64 * KiB, .queue_depth = 8, .workers = 3},
          5);
  rig.engine.refuse_probability = 0.1;
  rig.engine.refuse_errors = {EAGAIN, EBUSY, ENOMEM};
  rig.engine.delay_max = std::chrono::microseconds(100);
  rig.engine.reorder = true;
  rig.engine.judge = [](const engines::Request& request, std::uint64_t index) -> support::Fault {
    if (index % 7 != 0 || request.bytes < 2) return {};
    return {support::Fault::Kind::shorten, request.bytes / 2, 0};
  };
  const File file = rig.open_file(dir.file("data"));
  std::vector<Guest> guests;
  for (std::size_t i = 0; i < thread_count; ++i) {
    guests.emplace_back(i, std::vector<Handle*>{&rig.handle}, file);
  }
  std::vector<std::thread> running;
  for (Guest& guest : guests) running.emplace_back([&] { guest.work(rounds(60)); });
  for (std::thread& thread : running) thread.join();
  const auto found = read_whole_file(dir.file("data"));
  for (std::size_t i = 0; i < thread_count; ++i) {
    EXPECT_EQ(guests[i].complaint(), "") << "thread " << i;
    const auto share = std::span(found).subspan(i * share_bytes, share_bytes);
    EXPECT_EQ(pattern_fault(share, i * share_bytes, guests[i].version()), "") << "thread " << i;
  }
}

}  // namespace
}  // namespace tensorferry::faults
