// Nodes from fake sysfs trees, what is asked of a recording system, and one look at the real one.
#include "os/numa.h"

#include <gtest/gtest.h>
#include <linux/mempolicy.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/alignment.h"
#include "support/numa_system.h"
#include "support/temp_dir.h"

namespace tensorferry::os {
namespace {

namespace fs = std::filesystem;
using support::NumaSystem;
using Texts = std::vector<std::string>;

const std::vector<NumaNode> two_nodes = {{0, {0, 1}}, {1, {2, 3}}};

class NodeFolder {
 public:
  void write(const std::string& name, const std::string& text) const {
    const fs::path path = fs::path(dir_.path()) / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  [[nodiscard]] std::vector<NumaNode> read() const { return read_numa_nodes(dir_.path()); }

 private:
  const support::TempDir dir_;
};

TEST(Numa, nodes_have_their_numbers_and_processors) {
  const NodeFolder folder;
  folder.write("online", "0-1,4");
  folder.write("node0/cpulist", "0-2,8,10-11");
  folder.write("node1/cpulist", "3");
  folder.write("node4/cpulist", "");  // memory alone
  const std::vector<NumaNode> nodes = folder.read();
  ASSERT_EQ(nodes.size(), 3U);
  EXPECT_EQ(nodes[0].number, 0);
  EXPECT_EQ(nodes[0].processors, (std::vector<unsigned>{0, 1, 2, 8, 10, 11}));
  EXPECT_EQ(nodes[1].number, 1);
  EXPECT_EQ(nodes[1].processors, (std::vector<unsigned>{3}));
  EXPECT_EQ(nodes[2].number, 4);
  EXPECT_TRUE(nodes[2].processors.empty());
}

TEST(Numa, without_a_list_there_is_one_node) {
  for (const char* online : {"", "x", "-1", "1024", "0-99999999999", "0-4294967295"}) {
    const NodeFolder folder;
    folder.write("online", online);
    const std::vector<NumaNode> nodes = folder.read();
    ASSERT_EQ(nodes.size(), 1U) << online;
    EXPECT_EQ(nodes[0].number, 0);
  }
  EXPECT_EQ(read_numa_nodes("/nonexistent").size(), 1U);
}

TEST(Numa, garbage_ends_a_list) {
  const NodeFolder folder;
  folder.write("online", "0");
  const auto processors = [&](const std::string& list) {
    folder.write("node0/cpulist", list);
    return folder.read().at(0).processors;
  };
  const std::vector<unsigned> good = {0, 1};
  for (const char* tail : {",", ",x", ",1", ",0-3", ",3-2", ",8191-8192", " 2", ",2-", ",-2"}) {
    EXPECT_EQ(processors(std::string("0-1") + tail), good) << tail;
  }
}

TEST(Numa, a_thread_runs_and_allocates_on_the_node) {
  NumaSystem system(two_nodes);
  EXPECT_EQ(prefer_node(system, 1), "");
  EXPECT_EQ(system.asked(), (Texts{"thread runs on 2 3", "thread prefers 1"}));
}

TEST(Numa, a_thread_keeps_to_the_processors_that_it_may_use) {
  NumaSystem system(two_nodes);
  system.allowed = {0, 3};
  EXPECT_EQ(prefer_node(system, 1), "");
  system.allowed = {0};
  EXPECT_EQ(prefer_node(system, 1), "");
  EXPECT_EQ(system.asked(), (Texts{"thread runs on 3", "thread prefers 1", "thread prefers 1"}));
}

TEST(Numa, a_thread_keeps_a_memory_policy_that_it_has) {
  NumaSystem system(two_nodes);
  system.policy = MPOL_INTERLEAVE;
  EXPECT_EQ(prefer_node(system, 0), "");
  EXPECT_EQ(system.asked(), (Texts{"thread runs on 0 1"}));
}

TEST(Numa, memory_comes_from_the_node) {
  NumaSystem system(two_nodes);
  std::vector<std::byte> memory(4096);
  EXPECT_EQ(prefer_node(system, 1, memory), "");
  EXPECT_EQ(system.asked(), (Texts{"4096 bytes prefer 1"}));
}

TEST(Numa, nothing_is_asked_without_a_choice) {
  std::vector<std::byte> memory(4096);
  NumaSystem one_node({{0, {0, 1, 2, 3}}});
  NumaSystem two(two_nodes);
  for (const int node : {-1, 0, 1, 7}) {
    EXPECT_EQ(prefer_node(one_node, node), "");
    EXPECT_EQ(prefer_node(one_node, node, memory), "");
  }
  for (const int node : {-1, 2, 7}) {
    EXPECT_EQ(prefer_node(two, node), "");
    EXPECT_EQ(prefer_node(two, node, memory), "");
  }
  EXPECT_EQ(one_node.asked(), Texts{});
  EXPECT_EQ(two.asked(), Texts{});
}

TEST(Numa, a_refusal_is_a_reason_and_the_rest_is_still_asked) {
  NumaSystem system(two_nodes);
  system.error = EPERM;
  const std::string reason = prefer_node(system, 1);
  EXPECT_EQ(reason,
            "sched_setaffinity for NUMA node 1: EPERM; a container allows it with "
            "--cap-add=SYS_NICE");
  EXPECT_EQ(system.asked().size(), 2U);
  system.allowed = {};
  system.error = EINVAL;
  EXPECT_EQ(prefer_node(system, 1), "set_mempolicy for NUMA node 1: EINVAL");
  std::vector<std::byte> memory(4096);
  EXPECT_EQ(prefer_node(system, 1, memory), "mbind for NUMA node 1: EINVAL");
}

TEST(Numa, a_policy_that_cannot_be_read_is_a_reason_too) {
  NumaSystem system(two_nodes);
  system.policy = -ENOSYS;
  EXPECT_EQ(prefer_node(system, 1), "set_mempolicy for NUMA node 1: ENOSYS");
}

// The real calls on a machine that seems to have another node. tests/house/test_numa.py looks at
// them with strace.
class OneMoreNode : public System {
 public:
  std::vector<NumaNode> numa_nodes() override {
    std::vector<NumaNode> nodes = System::numa_nodes();
    nodes.push_back({nodes.back().number + 1, {}});
    return nodes;
  }
};

TEST(Numa, the_kernel_accepts_the_calls) {
  OneMoreNode system;
  const NumaNode node = system.numa_nodes().front();
  std::byte* const memory = system.map(page_bytes());
  ASSERT_NE(memory, nullptr);
  std::string refused = prefer_node(system, node.number, {memory, page_bytes()});
  int policy = 0;
  std::vector<unsigned> processors;
  std::thread([&] {  // the policy ends with the thread
    refused += prefer_node(system, node.number);
    policy = system.memory_policy();
    system.affinity(processors);
  })
      .join();
  system.unmap(memory, page_bytes());
  if (refused.find("EPERM") != std::string::npos || refused.find("ENOSYS") != std::string::npos) {
    GTEST_SKIP() << refused;
  }
  EXPECT_EQ(refused, "");
  EXPECT_EQ(policy, MPOL_PREFERRED);
  EXPECT_FALSE(processors.empty());
}

TEST(Numa, the_kernel_refuses_a_node_that_does_not_exist) {
  OneMoreNode system;
  const int missing = system.numa_nodes().back().number;
  std::string refused;
  std::thread([&] { refused = prefer_node(system, missing); }).join();
  EXPECT_NE(refused.find("set_mempolicy for NUMA node " + std::to_string(missing)),
            std::string::npos)
      << refused;
}

}  // namespace
}  // namespace tensorferry::os
