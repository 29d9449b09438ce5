// An operating system with NUMA nodes of the test's choice. Records what the library asks for them
// instead of asking the kernel. All other calls are the real ones.
#pragma once

#include <linux/mempolicy.h>

#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "os/system.h"

namespace tensorferry::support {

// Thread-safe, once the fields are set. Must outlive everything that uses it.
class NumaSystem : public os::System {
 public:
  explicit NumaSystem(std::vector<os::NumaNode> nodes) : nodes_(std::move(nodes)) {}

  std::vector<unsigned> allowed = {0, 1, 2, 3};  // processors of every thread
  int policy = MPOL_DEFAULT;                     // of every thread
  int error = 0;                                 // that every change fails with

  // "thread runs on 2 3", "thread prefers 1", "4096 bytes prefer 1": in the order of the calls.
  [[nodiscard]] std::vector<std::string> asked() const {
    const std::lock_guard lock(mutex_);
    return asked_;
  }

  std::vector<os::NumaNode> numa_nodes() override { return nodes_; }
  int affinity(std::vector<unsigned>& processors) override {
    processors = allowed;
    return 0;
  }
  int set_affinity(const std::vector<unsigned>& processors) override {
    std::string text = "thread runs on";
    for (const unsigned processor : processors) text += " " + std::to_string(processor);
    return note(std::move(text));
  }
  int memory_policy() override { return policy; }
  int prefer_node_for_thread(int node) override {
    return note("thread prefers " + std::to_string(node));
  }
  int prefer_node_for_memory(std::byte* /*memory*/, std::size_t bytes, int node) override {
    return note(std::to_string(bytes) + " bytes prefer " + std::to_string(node));
  }

 private:
  int note(std::string text) {
    const std::lock_guard lock(mutex_);
    asked_.push_back(std::move(text));
    return -error;
  }

  const std::vector<os::NumaNode> nodes_;
  mutable std::mutex mutex_;
  std::vector<std::string> asked_;
};

}  // namespace tensorferry::support
