// Workers and their slots keep to the NUMA node of the drive.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "engines/engine.h"
#include "handle/crew.h"
#include "handle/ledger.h"
#include "handle/settings.h"
#include "support/numa_system.h"
#include "tensorferry/device.h"

namespace tensorferry::handle {
namespace {

using Texts = std::vector<std::string>;

// Starts a crew of two workers for a drive on this node and ends it.
std::shared_ptr<Ledger> work(os::System& system, int numa_node) {
  Device device;
  device.numa_node = numa_node;
  const CrewOptions options =
      crew_options({.workers = 2}, EngineKind::threads, device, SlotShares::workers);
  auto ledger = std::make_shared<Ledger>();
  const auto crew =
      Crew::start(options, "chosen", engines::open_engine, system, ledger, {}).or_throw();
  EXPECT_TRUE(crew->start_workers().ok());
  crew->finish(OpenReads::cancel);
  EXPECT_TRUE(crew->wait_for_end({}));
  return ledger;
}

TEST(NumaWorkers, keep_to_the_node_of_the_drive) {
  support::NumaSystem system({{0, {0, 1}}, {1, {2, 3}}});
  work(system, 1);
  Texts asked = system.asked();
  std::ranges::sort(asked);
  EXPECT_EQ(asked, (Texts{"thread prefers 1", "thread prefers 1", "thread runs on 2 3",
                          "thread runs on 2 3"}));
}

TEST(NumaWorkers, ask_nothing_if_the_node_is_unknown) {
  support::NumaSystem system({{0, {0, 1}}, {1, {2, 3}}});
  work(system, -1);
  EXPECT_EQ(system.asked(), Texts{});
}

TEST(NumaWorkers, work_where_the_kernel_refuses_and_keep_the_reason) {
  support::NumaSystem system({{0, {0, 1}}, {1, {2, 3}}});
  system.error = EPERM;
  const Stats stats = work(system, 1)->stats();
  ASSERT_FALSE(stats.fallback_reasons.empty());
  EXPECT_NE(stats.fallback_reasons.front().find("NUMA node 1: EPERM"), std::string::npos);
}

}  // namespace
}  // namespace tensorferry::handle
