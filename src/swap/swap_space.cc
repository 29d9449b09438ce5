// The public API.
#include "tensorferry/swap_space.h"

#include <utility>

#include "os/system.h"
#include "swap/space.h"

namespace tensorferry {

namespace {

std::optional<SwapBuffer> buffer_of(std::shared_ptr<swap::Lease> lease) {
  if (lease == nullptr) return std::nullopt;
  return SwapBuffer(std::move(lease));
}

}  // namespace

std::span<std::byte> SwapBuffer::bytes() const noexcept { return lease_->bytes(); }
std::span<std::byte> SwapView::bytes() const noexcept { return mapping_->bytes(); }

bool in_swap_buffer(std::span<const std::byte> memory) {
  return swap::Arena::holder(memory) != nullptr;
}

SwapSpace::SwapSpace(const SwapOptions& options) : SwapSpace(options, swap::Seams{}) {}
SwapSpace::SwapSpace(const SwapOptions& options, const swap::Seams& seams)
    : space_(new swap::Space(options, seams), os::DeleteOwn{}) {}

SwapSpace::~SwapSpace() {
  if (space_ != nullptr) space_->close();
}

SwapSpace::SwapSpace(SwapSpace&&) noexcept = default;

SwapSpace& SwapSpace::operator=(SwapSpace&& other) noexcept {
  SwapSpace taken(std::move(other));
  std::swap(space_, taken.space_);
  return *this;
}

Operation SwapSpace::put(std::string_view key, std::span<const std::byte> memory,
                         CudaStream stream) {
  return space_->put(key, memory, stream);
}

Operation SwapSpace::get(std::string_view key, std::span<std::byte> memory, std::uint64_t offset,
                         CudaStream stream) {
  return space_->get(key, memory, offset, stream);
}

bool SwapSpace::prefetch(std::string_view key) { return space_->prefetch(key); }

std::optional<SwapSpace::Fetched> SwapSpace::fetch(std::string_view key,
                                                   Clock::time_point deadline) {
  return space_->fetch(key, deadline);
}

std::optional<SwapBuffer> SwapSpace::take(std::size_t bytes, Clock::time_point deadline) {
  return buffer_of(space_->take(bytes, deadline));
}

std::optional<SwapBuffer> SwapSpace::take(std::size_t bytes, const Operation& until,
                                          Clock::time_point deadline) {
  return buffer_of(space_->take(bytes, deadline, &until));
}

bool SwapSpace::drop(std::string_view key) { return space_->drop(key); }
SwapView SwapSpace::view(std::span<const SwapPart> parts) { return SwapView(space_->view(parts)); }
void SwapSpace::reserve(std::uint64_t bytes) { space_->reserve(bytes); }

SwapSnapshot SwapSpace::snapshot(const std::string& name, std::span<const std::string> keys,
                                 std::span<const std::string> replaced) {
  return space_->snapshot(name, keys, replaced);
}

bool SwapSpace::drop_snapshot(const std::string& name) { return space_->drop_snapshot(name); }
std::vector<std::string> SwapSpace::snapshots() const { return space_->snapshots(); }
void SwapSpace::attach(const SwapSnapshot& snapshot) { space_->attach(snapshot); }
SwapStats SwapSpace::stats() const { return space_->stats(); }

std::optional<std::uint64_t> SwapSpace::size(std::string_view key) const {
  return space_->size(key);
}

const std::vector<std::string>& SwapSpace::directories() const noexcept {
  return space_->store().paths();
}

const std::vector<std::string>& SwapSpace::notes() const noexcept {
  return space_->store().notes();
}

std::string SwapSpace::engine_reason() const { return space_->handle().engine_reason(); }

}  // namespace tensorferry
