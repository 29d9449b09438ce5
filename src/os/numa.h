// NUMA nodes: keeps threads and memory on the node of a drive. All of it is preference: where the
// kernel refuses, everything works as on a machine with one node.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "os/system.h"

namespace tensorferry::os {

// The most that Linux can be built for.
inline constexpr std::size_t processors_max = 8192;
inline constexpr std::size_t numa_nodes_max = 1024;

// The nodes in a folder like /sys/devices/system/node, ordered by number. If it has none, as on a
// kernel without NUMA, one node with the number 0.
[[nodiscard]] std::vector<NumaNode> read_numa_nodes(const std::string& folder);

// Both do nothing if `node` is -1, if the machine has one node, or if it has no such node. They
// return why the kernel refused, or "".
//
// Makes the calling thread run on the processors of the node, as far as it may use them now; if it
// may use none of them, it stays where it is. New pages that the thread touches first come from the
// node, unless the thread has a memory policy already (numactl).
[[nodiscard]] std::string prefer_node(System& system, int node);
// Makes the pages of a mapping come from the node. Call it before they are touched.
[[nodiscard]] std::string prefer_node(System& system, int node, std::span<std::byte> memory);

}  // namespace tensorferry::os
