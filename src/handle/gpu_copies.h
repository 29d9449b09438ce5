// The copies of one worker between its slots and the memory of GPUs. The worker starts them and
// looks now and then which have ended; the drive works meanwhile. Only the worker's thread uses it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "base/result.h"
#include "handle/plan.h"
#include "handle/transfer.h"
#include "os/gpu_stream.h"

namespace tensorferry::handle {

class GpuCopies {
 public:
  // Starts to copy the wanted bytes of a block from its slot to the run's memory for a read, and
  // the other way for a write. Both must stay until collect() reports `tag`. After an Error nothing
  // is under way.
  [[nodiscard]] Status start(std::uint32_t tag, const Run& run, const Block& block, std::byte* slot,
                             Direction direction);

  // Calls ended(tag, status) for each copy that has ended since.
  template <class Ended>
  void collect(Ended ended);

  [[nodiscard]] bool empty() const noexcept { return under_way_ == 0; }

 private:
  // Both directions of a device run at the same time.
  struct Lane {
    int gpu = 0;
    Direction direction = Direction::read;
    std::unique_ptr<os::GpuStream> stream;
    std::deque<std::pair<std::uint32_t, std::uint64_t>> copies;  // tag and mark, oldest first
  };

  [[nodiscard]] Result<Lane*> lane(int gpu, Direction direction);

  std::vector<Lane> lanes_;
  std::size_t under_way_ = 0;
};

template <class Ended>
void GpuCopies::collect(Ended ended) {
  // By index: `ended` may start others.
  for (std::size_t i = 0; i < lanes_.size(); ++i) {  // NOLINT(modernize-loop-convert)
    while (!lanes_[i].copies.empty()) {
      const auto [tag, mark] = lanes_[i].copies.front();
      const CudaResult<bool> reached = lanes_[i].stream->reached(mark);
      if (reached.ok() && !reached.value()) break;
      lanes_[i].copies.pop_front();
      --under_way_;
      if (!reached.ok()) (void)lanes_[i].stream->finish();  // the memory is free after this
      ended(tag, reached.ok() ? Status(Nothing{}) : Status(explain(reached.error())));
    }
  }
}

}  // namespace tensorferry::handle
