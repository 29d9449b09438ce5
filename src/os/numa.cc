#include "os/numa.h"

#include <linux/mempolicy.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <iterator>
#include <optional>
#include <string_view>
#include <system_error>

#include "base/errno_name.h"

namespace tensorferry::os {

namespace {

// The numbers in a list like "0-3,8,10-11". What does not ascend below `limit` ends the list.
std::vector<unsigned> numbers_in(std::string_view list, std::size_t limit) {
  std::vector<unsigned> numbers;
  const char* const end = list.data() + list.size();
  for (const char* at = list.data();;) {
    unsigned first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc()) break;
    unsigned last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc()) break;
    }
    if (last >= limit || (!numbers.empty() && first <= numbers.back())) break;
    for (unsigned number = first; number <= last; ++number) numbers.push_back(number);
    if (parsed.ptr == end || *parsed.ptr != ',') break;
    at = parsed.ptr + 1;
  }
  return numbers;
}

// The node, if the machine has it and others.
std::optional<NumaNode> one_of_several(System& system, int node) {
  if (node < 0) return {};
  const std::vector<NumaNode> nodes = system.numa_nodes();
  const auto found = std::ranges::find(nodes, node, &NumaNode::number);
  if (nodes.size() < 2 || found == nodes.end()) return {};
  return *found;
}

int run_on(System& system, const NumaNode& node) {
  std::vector<unsigned> allowed;
  if (const int got = system.affinity(allowed); got < 0) return got;
  std::vector<unsigned> wanted;
  std::ranges::set_intersection(allowed, node.processors, std::back_inserter(wanted));
  return wanted.empty() ? 0 : system.set_affinity(wanted);
}

std::string refusal(const char* call, int node, int result) {
  std::string reason =
      std::string(call) + " for NUMA node " + std::to_string(node) + ": " + errno_name(-result);
  if (result == -EPERM) reason += "; a container allows it with --cap-add=SYS_NICE";
  return reason;
}

}  // namespace

std::vector<NumaNode> read_numa_nodes(const std::string& folder) {
  std::vector<NumaNode> nodes;
  for (const unsigned number : numbers_in(read_text(folder + "/online"), numa_nodes_max)) {
    const std::string list = read_text(folder + "/node" + std::to_string(number) + "/cpulist");
    nodes.push_back({static_cast<int>(number), numbers_in(list, processors_max)});
  }
  if (nodes.empty()) nodes.emplace_back();
  return nodes;
}

std::string prefer_node(System& system, int node) {
  const auto wanted = one_of_several(system, node);
  if (!wanted) return {};
  const int ran = run_on(system, *wanted);
  int policy = system.memory_policy();
  if (policy == MPOL_DEFAULT) policy = system.prefer_node_for_thread(node);
  if (ran < 0) return refusal("sched_setaffinity", node, ran);
  return policy < 0 ? refusal("set_mempolicy", node, policy) : std::string();
}

std::string prefer_node(System& system, int node, std::span<std::byte> memory) {
  if (!one_of_several(system, node)) return {};
  const int bound = system.prefer_node_for_memory(memory.data(), memory.size(), node);
  return bound < 0 ? refusal("mbind", node, bound) : std::string();
}

}  // namespace tensorferry::os
