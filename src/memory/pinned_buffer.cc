#include "tensorferry/pinned_buffer.h"

#include <cerrno>
#include <utility>

#include "memory/region.h"
#include "tensorferry/error.h"

namespace tensorferry {

namespace {
const std::string& freed_reason() {
  static const std::string& text = *new std::string("the memory has been freed");
  return text;
}

std::shared_ptr<memory::Region> make_region(std::size_t bytes, int numa_node) {
  os::System& system = os::System::real();
  memory::check_numa_node(numa_node, system).or_throw();
  return memory::Region::create(bytes, system, numa_node).or_throw();
}
}  // namespace

PinnedBuffer::PinnedBuffer(std::size_t bytes, const PinnedBufferOptions& options)
    : region_(make_region(bytes, options.numa_node)) {
  memory::list_region(region_, options.cuda);
  memory::register_listed_with_cuda();
}

PinnedBuffer::~PinnedBuffer() {
  if (region_ != nullptr) memory::unlist_region(*region_);
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&&) noexcept = default;

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  PinnedBuffer taken(std::move(other));
  std::swap(region_, taken.region_);
  return *this;
}

std::byte* PinnedBuffer::data() const noexcept {
  return region_ != nullptr ? region_->data() : nullptr;
}

std::size_t PinnedBuffer::size() const noexcept {
  return region_ != nullptr ? region_->bytes() : 0;
}

bool PinnedBuffer::locked() const noexcept {
  return region_ != nullptr && region_->lock_reason().empty();
}

const std::string& PinnedBuffer::lock_reason() const noexcept {
  return region_ != nullptr ? region_->lock_reason() : freed_reason();
}

const std::string& PinnedBuffer::huge_page_reason() const noexcept {
  return region_ != nullptr ? region_->huge_page_reason() : freed_reason();
}

const std::string& PinnedBuffer::numa_reason() const noexcept {
  return region_ != nullptr ? region_->numa_reason() : freed_reason();
}

void PinnedBuffer::free() {
  if (region_ == nullptr) {
    throw Error({.operation = "free page-locked memory",
                 .code = EINVAL,
                 .hint = "this PinnedBuffer has already been freed or moved from"});
  }
  memory::unlist_region(*region_);
  region_.reset();
}

bool is_pinned(std::span<const std::byte> bytes) noexcept {
  return memory::find_region(bytes) != nullptr;
}

}  // namespace tensorferry
