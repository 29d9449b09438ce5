// What the tests of this room share: engines, files on a real disk, and an engine that holds every
// request until the test lets it pass.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/alignment.h"
#include "engines/engine.h"
#include "handle/conductor.h"
#include "os/system.h"
#include "support/memory.h"
#include "support/outcome.h"
#include "support/pattern.h"
#include "support/sanitizers.h"
#include "support/temp_dir.h"
#include "support/thrown.h"
#include "tensorferry/aio.h"
#include "tensorferry/handle.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::handle {

using support::error_of;
using support::hang_limit;
using support::Memory;
using support::outcome;
using support::outcome_code;

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t below(std::uint64_t limit) { return between(0, limit - 1); }
  std::uint64_t between(std::uint64_t least, std::uint64_t most) {
    return std::uniform_int_distribution<std::uint64_t>(least, most)(engine_);
  }
  bool coin() { return below(2) == 0; }
  template <class List>
  void shuffle(List& list) {
    std::shuffle(list.begin(), list.end(), engine_);
  }

 private:
  std::mt19937_64 engine_;
};

// Threads that repeat a round until the test ends them or one finds a fault.
class Users {
 public:
  // make(number) returns the round of each thread, which returns a fault or "".
  template <class Make>
  Users(std::size_t count, Make make) : faults_(count) {
    for (std::size_t user = 0; user < count; ++user) {
      threads_.emplace_back([this, user, make] {
        auto round = make(user);
        while (!over_ && faults_[user].empty()) faults_[user] = round();
      });
    }
  }
  ~Users() { (void)end(); }
  Users(const Users&) = delete;
  Users& operator=(const Users&) = delete;

  // Ends them and returns the faults.
  std::string end() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    std::string all;
    for (const std::string& fault : faults_) all += fault;
    return all;
  }

 private:
  std::atomic<bool> over_{false};
  std::vector<std::string> faults_;
  std::vector<std::thread> threads_;
};

[[nodiscard]] inline std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) count += entry.exists();
  return count;
}
[[nodiscard]] inline std::size_t open_descriptors() { return entries_of("/proc/self/fd"); }
[[nodiscard]] inline std::size_t threads() { return entries_of("/proc/self/task"); }

// A line of /proc/self/status or /proc/vmstat as a number; 0 if it is missing.
[[nodiscard]] inline std::uint64_t kernel_figure(const char* file, const std::string& name) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name)) return std::stoull(line.substr(line.find_first_of("0123456789")));
  }
  return 0;
}

// A folder on a real disk, and the engine under test.
class HandleTest : public ::testing::TestWithParam<EngineKind> {
 protected:
  void SetUp() override {
    if (auto opened = engines::open_engine(GetParam(), 1, os::System::real()); !opened.ok()) {
      GTEST_SKIP() << opened.error().what();
    }
  }

  [[nodiscard]] static HandleOptions options() { return {.engine = GetParam()}; }

  // A file of `bytes` bytes of pattern `seed`.
  std::string make_file(const std::string& name, std::size_t bytes, std::uint32_t seed) {
    support::write_whole_file(dir.file(name), support::pattern(bytes, 0, seed));
    return dir.file(name);
  }

  support::TempDir dir;
};

[[nodiscard]] inline std::string engine_name(const ::testing::TestParamInfo<EngineKind>& tested) {
  return std::string(to_string(tested.param));
}

#define TENSORFERRY_ON_EVERY_ENGINE(suite)                                              \
  INSTANTIATE_TEST_SUITE_P(                                                             \
      engines, suite,                                                                   \
      ::testing::Values(EngineKind::io_uring, EngineKind::libaio, EngineKind::threads), \
      engine_name)

// A handle whose requests wait until the test lets them pass, oldest or newest first. Keeps what
// was submitted and what has passed.
class Gate {
 public:
  struct Event {
    enum class Kind : std::uint8_t { submitted, completed } kind;
    engines::Request request;
  };

  // The gate must outlive the handle; open it before the handle is destroyed, unless cancelled
  // requests may pass by themselves (`cancellable`).
  [[nodiscard]] Handle open_handle(const HandleOptions& options, os::System* system = nullptr) {
    return make_handle(settings(options), seams(system));
  }

  // The same settings, for a test that opens the handle itself.
  [[nodiscard]] static HandleOptions settings(HandleOptions options = {}) {
    options.engine = EngineKind::threads;
    options.workers = 1;  // several would take each other's requests
    return options;
  }
  [[nodiscard]] Seams seams(os::System* system = nullptr) {
    Seams seams;
    seams.system = system;
    seams.open_engine = [this](EngineKind, unsigned, os::System& os) {
      return Result<std::unique_ptr<engines::Engine>>(std::make_unique<HeldEngine>(*this, os));
    };
    return seams;
  }

  void let_pass(std::size_t count) {
    const std::lock_guard lock(mutex_);
    passes_ += count;
    changed_.notify_all();
  }
  void open() { let_pass(std::size_t{1} << 40); }
  void close() {
    const std::lock_guard lock(mutex_);
    passes_ = 0;
  }

  // Whether this many requests are held at once before the hang limit.
  [[nodiscard]] bool holds(std::size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, hang_limit, [&] { return held_.size() >= count; });
  }
  [[nodiscard]] std::size_t held() {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }
  [[nodiscard]] std::vector<Event> events() {
    const std::lock_guard lock(mutex_);
    return events_;
  }

  // Set before the handle is opened. Lanes want engines that serve any thread.
  engines::Service service = engines::Service::one_thread;
  bool cancellable = true;                // the same
  int sync_result = 0;                    // of every sync
  bool pretend = false;                   // reads and writes succeed without a byte moved
  bool newest_first = false;              // of those that are held
  std::function<void()> on_wake = [] {};  // called by the thread that wakes the worker

 private:
  class HeldEngine final : public engines::Engine {
   public:
    HeldEngine(Gate& gate, os::System& system) : gate_(gate), system_(system) {}

    [[nodiscard]] EngineKind kind() const noexcept override { return EngineKind::threads; }
    [[nodiscard]] engines::Capabilities capabilities() const noexcept override {
      return {.service = gate_.service};
    }
    int attach() override { return 0; }

    engines::Submitted submit(std::span<const engines::Request> requests) override {
      const std::lock_guard lock(gate_.mutex_);
      for (const auto& request : requests) {
        gate_.held_.push_back(request);
        gate_.events_.push_back({Event::Kind::submitted, request});
      }
      gate_.changed_.notify_all();
      return {requests.size(), 0};
    }

    int reap(std::span<engines::Completion> out, Nanoseconds limit) override {
      std::unique_lock lock(gate_.mutex_);
      const auto ready = [this] {
        return woken_ || !ended_.empty() || (gate_.passes_ > 0 && !gate_.held_.empty());
      };
      if (limit == forever) {
        gate_.changed_.wait(lock, ready);
      } else {
        gate_.changed_.wait_for(lock, limit, ready);
      }
      woken_ = false;
      if (ended_.empty() && gate_.passes_ > 0 && !gate_.held_.empty()) {
        const auto next = gate_.newest_first ? gate_.held_.end() - 1 : gate_.held_.begin();
        const engines::Request request = *next;
        gate_.held_.erase(next);
        --gate_.passes_;
        ended_.push_back({request.tag, carry_out(request)});
        gate_.events_.push_back({Event::Kind::completed, request});
      }
      if (ended_.empty()) return 0;
      out[0] = ended_.front();
      ended_.pop_front();
      return 1;
    }

    void wake() noexcept override {
      gate_.on_wake();
      const std::lock_guard lock(gate_.mutex_);
      woken_ = true;
      gate_.changed_.notify_all();
    }

    void cancel(std::uint64_t tag) noexcept override {
      const std::lock_guard lock(gate_.mutex_);
      const auto found = std::find_if(gate_.held_.begin(), gate_.held_.end(),
                                      [tag](const auto& request) { return request.tag == tag; });
      if (!gate_.cancellable || found == gate_.held_.end()) return;
      gate_.held_.erase(found);
      ended_.push_back({tag, -ECANCELED});
      gate_.changed_.notify_all();  // another thread may reap
    }

   private:
    std::int32_t carry_out(const engines::Request& request) {
      ssize_t result = gate_.sync_result;
      if (gate_.pretend && !engines::is_sync(request.kind)) {
        result = request.bytes;
      } else if (request.kind == engines::RequestKind::read) {
        result = system_.pread(request.fd, request.memory, request.bytes, request.offset);
      } else if (request.kind == engines::RequestKind::write) {
        result = system_.pwrite(request.fd, request.memory, request.bytes, request.offset);
      }
      return static_cast<std::int32_t>(result);
    }

    Gate& gate_;
    os::System& system_;
    bool woken_ = false;
    std::deque<engines::Completion> ended_;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<engines::Request> held_;
  std::vector<Event> events_;
  std::size_t passes_ = 0;
};

// Reads and writes of a small file in small blocks, each of which waits at the gate.
class GateTest : public ::testing::Test {
 protected:
  static constexpr std::size_t block = 4 * KiB;

  GateTest() {
    support::write_whole_file(path, support::pattern(64 * block, 0, 1));
    file.emplace(File::open(path, Access::read_write));
  }

  [[nodiscard]] static HandleOptions options(unsigned depth = 32) {
    return {.block_bytes = block, .queue_depth = depth};
  }

  [[nodiscard]] std::vector<engines::Request> requests(Gate::Event::Kind kind) {
    std::vector<engines::Request> found;
    for (const auto& event : gate.events()) {
      if (event.kind == kind) found.push_back(event.request);
    }
    return found;
  }

  support::TempDir dir;
  std::string path = dir.file("data");
  std::optional<File> file;
  Gate gate;
};

}  // namespace tensorferry::handle
