// The base of the contract suite of the engines (src/engines/contract_test.cc): a file of known
// bytes, requests on it, and an engine to try.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/alignment.h"
#include "engines/engine.h"
#include "support/hang_limit.h"
#include "support/memory.h"

namespace tensorferry::engines {

using support::hang_limit;
using support::Memory;
using support::UntouchedMemory;

// The content of the test file: every 8 bytes are a function of their offset and a seed.
inline std::uint64_t word_at(std::uint64_t offset, std::uint64_t seed) {
  return (offset / 8 + (seed << 40)) * 0x9e3779b97f4a7c15U;
}

inline void fill(std::byte* memory, std::size_t bytes, std::uint64_t offset, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes; i += 8) {
    const std::uint64_t word = word_at(offset + i, seed);
    std::memcpy(memory + i, &word, 8);
  }
}

inline ::testing::AssertionResult holds(const std::byte* memory, std::size_t bytes,
                                        std::uint64_t offset, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, memory + i, 8);
    if (word != word_at(offset + i, seed)) {
      return ::testing::AssertionFailure() << "wrong bytes at file offset " << offset + i;
    }
  }
  return ::testing::AssertionSuccess();
}

// An engine under test.
struct Tested {
  EngineKind kind = EngineKind::threads;
  Polling polling = Polling::off;

  // Where no device has polled queues, `completion` polls an ordinary ring.
  [[nodiscard]] Result<std::unique_ptr<Engine>> open(unsigned depth) const {
    if (polling == Polling::off) return open_engine(kind, depth, os::System::real());
    if (polling == Polling::submission) return open_uring_engine(depth, polling);
    auto polled = open_uring_engine(depth, Polling::off);
    auto rest = open_uring_engine(depth, Polling::off);
    if (!polled.ok()) return polled;
    if (!rest.ok()) return rest;
    return make_polling_engine(std::move(polled.value()), std::move(rest.value()), depth);
  }

  friend std::ostream& operator<<(std::ostream& out, const Tested& tested) {
    out << to_string(tested.kind);
    return tested.polling == Polling::off ? out << ""
                                          : out << "_polls_" << to_string(tested.polling);
  }
};

class EngineContract : public ::testing::TestWithParam<Tested> {
 protected:
  static constexpr std::size_t file_bytes = 8 * MiB;
  static constexpr std::uint64_t seed = 7;
  static constexpr unsigned depth = 16;
  using Clock = std::chrono::steady_clock;

  void SetUp() override {
    path_ = (std::filesystem::current_path() / "engine-contract-XXXXXX").string();
    buffered_fd_ = ::mkstemp(path_.data());
    ASSERT_GE(buffered_fd_, 0);
    const Memory data(file_bytes);
    fill(data.at(0), file_bytes, 0, seed);
    ASSERT_EQ(::pwrite(buffered_fd_, data.at(0), file_bytes, 0), ssize_t{file_bytes});
    ASSERT_EQ(::fsync(buffered_fd_), 0);
    fd_ = ::open(path_.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd_ < 0) GTEST_SKIP() << "the working directory's file system has no O_DIRECT";
    if (auto opened = GetParam().open(depth); !opened.ok()) {
      GTEST_SKIP() << opened.error().what();
    }
  }

  void TearDown() override {
    if (fd_ >= 0) ::close(fd_);
    if (buffered_fd_ >= 0) ::close(buffered_fd_);
    ::unlink(path_.c_str());
  }

  static std::unique_ptr<Engine> open(unsigned engine_depth = depth) {
    auto engine = GetParam().open(engine_depth).or_throw();
    EXPECT_EQ(engine->attach(), 0);
    return engine;
  }

  [[nodiscard]] Request request(RequestKind kind, std::byte* memory, std::size_t bytes,
                                std::uint64_t offset, std::uint64_t tag = 1) const {
    Request made;
    made.tag = tag;
    made.kind = kind;
    made.fd = fd_;
    made.memory = memory;
    made.bytes = static_cast<std::uint32_t>(bytes);
    made.offset = offset;
    return made;
  }

  // Makes `depth` reads of neighbouring blocks, tagged from `first_tag` on.
  [[nodiscard]] std::vector<Request> reads(const Memory& memory, std::size_t bytes,
                                           std::uint64_t first_tag = 0,
                                           std::uint64_t offset = 0) const {
    std::vector<Request> made;
    for (std::uint64_t i = 0; i < depth; ++i) {
      made.push_back(request(RequestKind::read, memory.at(i * bytes), bytes, offset + i * bytes,
                             first_tag + i));
    }
    return made;
  }

  // Reaps until `count` completions have come. Fails instead of hanging.
  static std::vector<Completion> reap_all(Engine& engine, std::size_t count) {
    std::vector<Completion> all;
    std::vector<Completion> some(depth);
    const auto deadline = Clock::now() + hang_limit;
    while (all.size() < count) {
      const int got = reap(engine, some, std::chrono::seconds(1));
      if (got < 0) {
        ADD_FAILURE() << "reap: " << std::strerror(-got);
        return all;
      }
      if (got > 0) all.insert(all.end(), some.begin(), some.begin() + got);
      if (Clock::now() > deadline) {
        ADD_FAILURE() << "only " << all.size() << " of " << count << " completions came";
        return all;
      }
    }
    return all;
  }

  // Work of the kernel's for this thread, such as what is left of the ring of an earlier test, ends
  // a wait like a signal.
  static int reap(Engine& engine, std::span<Completion> out, Engine::Nanoseconds limit) {
    int got = engine.reap(out, limit);
    while (got == -EINTR) got = engine.reap(out, limit);
    return got;
  }

  // Runs one request from start to end. Returns its result, or -error if submit() refused it.
  static int run(Engine& engine, const Request& request) {
    const Submitted submitted = engine.submit(std::span(&request, 1));
    if (submitted.taken == 0) {
      EXPECT_GT(submitted.error, 0);
      return -submitted.error;
    }
    const auto completions = reap_all(engine, 1);
    if (completions.size() != 1) return -ENODATA;
    EXPECT_EQ(completions[0].tag, request.tag);
    return completions[0].result;
  }

  static void expect_nothing_more(Engine& engine) {
    std::vector<Completion> some(depth);
    EXPECT_EQ(reap(engine, some, std::chrono::milliseconds(20)), 0);
  }

  std::string path_;
  int fd_ = -1;
  int buffered_fd_ = -1;
};

}  // namespace tensorferry::engines
