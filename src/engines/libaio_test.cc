// What libaio's engines leave behind. The suite of contract_test.cc has the rest.
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <vector>

#include "os/system.h"
#include "support/engine_contract.h"

namespace tensorferry::engines {
namespace {

// The kernel maps the events of each context.
int contexts_of_this_process() {
  const std::string maps = os::read_text("/proc/self/maps");
  constexpr std::string_view context = "/[aio]";
  int count = 0;
  for (auto at = maps.find(context); at != std::string::npos; at = maps.find(context, at + 1)) {
    ++count;
  }
  return count;
}

class LibaioContexts : public EngineContract {};

INSTANTIATE_TEST_SUITE_P(Engines, LibaioContexts, ::testing::Values(Tested{EngineKind::libaio}),
                         ::testing::PrintToStringParamName());

TEST_P(LibaioContexts, serve_one_engine_after_the_other) {
  const Memory memory(64 * KiB);
  open();
  const int before = contexts_of_this_process();
  EXPECT_GE(before, 1) << "the context of the engine that has ended";
  for (int i = 0; i < 50; ++i) {
    const auto engine = open();
    if (i % 3 == 0) engine->wake();  // a wake that nobody saw is not for the next engine
    if (i % 3 == 1) {
      ASSERT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 64 * KiB, 0)), 64 * KiB);
      expect_nothing_more(*engine);
    }
    ASSERT_EQ(contexts_of_this_process(), before);
  }
  const auto engine = open();
  expect_nothing_more(*engine);
}

TEST_P(LibaioContexts, that_are_idle_are_few) {
  const int before = contexts_of_this_process();
  {
    std::vector<std::unique_ptr<Engine>> engines;
    for (int i = 0; i < 20; ++i) engines.push_back(open_libaio_engine(100).or_throw());
  }
  EXPECT_LE(contexts_of_this_process(), before + 5);
}

TEST_P(LibaioContexts, stay_with_the_parent_at_a_fork) {
  open();  // leaves a context
  const pid_t child = ::fork();
  if (child == 0) {
    const Memory memory(64 * KiB);
    const auto engine = open();
    const int moved = run(*engine, request(RequestKind::read, memory.at(0), 64 * KiB, 0));
    ::_exit(moved == 64 * KiB ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  const Memory memory(64 * KiB);
  const auto engine = open();
  EXPECT_EQ(run(*engine, request(RequestKind::read, memory.at(0), 64 * KiB, 0)), 64 * KiB);
}

}  // namespace
}  // namespace tensorferry::engines
