#include "handle/inline_mover.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/alignment.h"
#include "files/growth.h"
#include "handle/retry.h"
#include "handle/trace.h"
#include "handle/transfer.h"
#include "tensorferry/copy.h"
#include "tensorferry/operation.h"

namespace tensorferry::handle {

namespace {

using engines::RequestKind;

// The longest transfer in place if the user chose no block size.
constexpr std::uint64_t transfer_bytes_max = MiB;
// Longer ones of a GPU are faster in the engine.
constexpr std::uint64_t gpu_transfer_bytes_max = 256 * KiB;
// Beyond what goes through a slot: for the alignment at both ends.
constexpr std::size_t slot_margin_bytes = 128 * KiB;

}  // namespace

InlineMover::InlineMover(os::System& system, std::shared_ptr<Ledger> ledger,
                         std::size_t block_bytes, std::uint64_t uncut_bytes_max,
                         std::size_t slot_bytes_max, ProcessLimits& limits) noexcept
    : system_(system),
      ledger_(std::move(ledger)),
      transfer_bytes_max_(block_bytes > 0 ? block_bytes : transfer_bytes_max),
      uncut_bytes_max_(std::min(uncut_bytes_max, transfer_bytes_max)),
      slot_bytes_(uncut_bytes_max_ + slot_margin_bytes),
      slot_bytes_max_(slot_bytes_max),
      limits_(limits) {}

bool InlineMover::fits(Direction direction, const Part& part) const noexcept {
  if (part.bytes > transfer_bytes_max_) return false;
  if (part.bytes <= uncut_bytes_max_ && part.gpu < 0) return true;
  if (part.gpu >= 0) return part.bytes <= gpu_transfer_bytes_max;
  return direction == Direction::write || !part.file->direct();
}

std::optional<Status> InlineMover::try_transfer(Direction direction, const Part& part,
                                                const os::GpuFence* fence, Durability durability) {
  const auto begin = Operation::Clock::now();
  files::OpenFile& file = *part.file;
  const Piece piece{part.memory, part.bytes, 0};
  const std::size_t granularity = granularity_of(file);
  const Plan plan(direction, part.offset, {&piece, 1}, rules_of(part),
                  {.block_bytes = align_up(std::max<std::size_t>(part.bytes, 1), granularity),
                   .slot_block_bytes = align_down(slot_bytes_, granularity)});
  std::unique_ptr<Slot> slot;
  if (plan.needs_slots()) {
    if (plan.slot_bytes() > uncut_bytes_max_) return std::nullopt;
    slot = take_slot();
    if (slot == nullptr) return std::nullopt;
  }
  const bool may_tear = direction == Direction::write && plan.block_count() > 1;
  std::optional<files::Growth> growth =
      may_tear ? files::Growth::begin(part.file, {{part.offset, part.offset + part.bytes}})
               : std::nullopt;
  const std::uint64_t id = Trace::active() != nullptr ? next_operation_id() : 0;
  Status status = part.gpu >= 0 && slot ? prepare(*slot, part, fence) : Status(Nothing{});
  for (std::uint64_t i = 0; i < plan.block_count() && status.ok(); ++i) {
    status = move_block(direction, part, plan, plan.block(i), slot.get(), id);
  }
  if (slot != nullptr) {
    const std::lock_guard lock(mutex_);
    slots_.push_back(std::move(slot));
  }
  if (growth && status.ok()) growth->keep();
  growth.reset();  // cuts off what a failed write has added
  if (status.ok()) status = sync(file, durability);

  ledger_->add(&Stats::inline_operations);
  if (status.ok()) ledger_->add_moved(direction, part.bytes);
  ledger_->operation_ended({.verb = verb_of(direction),
                            .id = id,
                            .path = file.path(),
                            .bytes = status.ok() ? part.bytes : 0,
                            .begin = begin,
                            .end = Operation::Clock::now(),
                            .error = status.ok() ? nullptr : &status.error()});
  return status;
}

Status InlineMover::move_block(Direction direction, const Part& part, const Plan& plan,
                               const Block& block, Slot* slot, std::uint64_t id) {
  files::OpenFile& file = *part.file;
  const bool was_direct = file.direct();
  int fd = file.direct_fd();
  if (block.descriptor == Descriptor::buffered) {
    Result<int> buffered = file.buffered_fd();
    if (!buffered.ok()) return buffered.error();
    fd = buffered.value();
    if (was_direct && !file.direct()) ledger_->note_fallback(file.direct_reason());
  }
  const bool bounced = block.memory == nullptr;
  std::byte* memory = bounced ? slot->memory->data() : block.memory;
  // An inline transfer has one piece of memory.
  std::byte* users = part.memory + (block.wanted_offset - plan.offset());
  if (bounced) ledger_->add(&Stats::bounced_bytes, block.wanted_bytes);
  if (bounced && direction == Direction::write) {
    Status copied = copy_slot(direction, part, *slot, memory, users, block.wanted_bytes);
    if (!copied.ok()) return copied;
  }
  Attempt attempt =
      first_attempt(direction, block, static_cast<std::uint32_t>(file.offset_alignment()));
  for (;;) {
    const std::uint64_t offset = block.offset + attempt.done;
    const std::size_t bytes = attempt.bytes - attempt.done;
    const auto begin = Operation::Clock::now();
    const ssize_t result = direction == Direction::read
                               ? system_.pread(fd, memory + attempt.done, bytes, offset)
                               : system_.pwrite(fd, memory + attempt.done, bytes, offset);
    ledger_->request_ended({.verb = verb_of(direction),
                            .operation = id,
                            .offset = offset,
                            .bytes = static_cast<std::uint32_t>(bytes),
                            .result = static_cast<std::int32_t>(result),
                            .begin = begin});
    const Judgement judgement =
        judge_block(attempt, block, file, static_cast<std::int32_t>(result));
    if (judgement.verdict == Verdict::done) break;
    if (judgement.verdict == Verdict::ended || judgement.verdict == Verdict::fail) {
      return transfer_error(attempt, block, file, judgement.code);
    }
    ledger_->request_repeats(static_cast<std::int32_t>(result));
    std::this_thread::sleep_for(retry_delay(attempt.fruitless));
  }
  if (!bounced || direction == Direction::write) return Nothing{};
  return copy_slot(direction, part, *slot, memory + (block.wanted_offset - block.offset), users,
                   block.wanted_bytes);
}

Status InlineMover::prepare(Slot& slot, const Part& part, const os::GpuFence* fence) {
  const auto of_gpu = [&](const auto& stream) { return stream->device() == part.gpu; };
  auto found = std::find_if(slot.streams.begin(), slot.streams.end(), of_gpu);
  if (found == slot.streams.end()) {
    (void)slot.memory->register_with_cuda();
    ledger_->note_unknown_to_cuda(slot.memory->cuda_reason());
    auto stream = os::GpuStream::open(part.gpu);
    if (!stream.ok()) return explain(stream.error());
    slot.streams.push_back(std::move(stream.value()));
    found = std::prev(slot.streams.end());
  }
  std::iter_swap(slot.streams.begin(), found);  // the one to use comes first
  if (fence == nullptr) return Nothing{};
  return explain(slot.streams.front()->wait_for(*fence));
}

Status InlineMover::copy_slot(Direction direction, const Part& part, Slot& slot, std::byte* in_slot,
                              std::byte* users, std::size_t bytes) {
  const bool fills = direction == Direction::read;
  if (part.gpu < 0) {
    copy({fills ? users : in_slot, bytes}, {fills ? in_slot : users, bytes});
    return Nothing{};
  }
  os::GpuStream& stream = *slot.streams.front();
  CudaStatus started = stream.copy(fills ? users : in_slot, fills ? in_slot : users, bytes);
  CudaStatus finished = stream.finish();
  return explain(started.ok() ? std::move(finished) : std::move(started));
}

Status InlineMover::sync(files::OpenFile& file, Durability durability) {
  if (durability == Durability::none) return Nothing{};
  if (durability == Durability::data) {
    const int synced = system_.fdatasync(file.main_fd());
    if (synced < 0) return sync_error(RequestKind::sync_data, file, nullptr, -synced);
    return Nothing{};
  }
  int synced = system_.fsync(file.main_fd());
  if (synced < 0) return sync_error(RequestKind::sync_full, file, nullptr, -synced);
  const auto directory = file.directory();
  if (!directory.ok()) return directory.error();
  if (directory.value() == nullptr) return Nothing{};
  synced = system_.fsync(directory.value()->fd());
  if (synced < 0) {
    return sync_error(RequestKind::sync_full, file, directory.value().get(), -synced);
  }
  return Nothing{};
}

std::unique_ptr<InlineMover::Slot> InlineMover::take_slot() {
  const std::lock_guard lock(mutex_);
  if (!slots_.empty()) {
    auto slot = std::move(slots_.back());
    slots_.pop_back();
    return slot;
  }
  if ((slot_count_ + 1) * slot_bytes_ > slot_bytes_max_) return nullptr;
  auto share = ProcessShare::try_take(limits_, {.slot_bytes = slot_bytes_});
  if (!share) return nullptr;
  auto region = memory::Region::create(slot_bytes_, system_);
  if (!region.ok()) return nullptr;
  const std::string& reason = region.value()->lock_reason();
  if (!reason.empty()) ledger_->note_fallback(reason);
  ++slot_count_;
  return std::make_unique<Slot>(std::move(*share), std::move(region.value()));
}

}  // namespace tensorferry::handle
