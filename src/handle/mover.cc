#include "handle/mover.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <thread>
#include <utility>

#include "base/alignment.h"
#include "tensorferry/copy.h"

namespace tensorferry::handle {

namespace {

using engines::Completion;
using engines::Engine;
using engines::is_sync;
using engines::RequestKind;

// One system call hands over up to this many requests.
constexpr std::size_t batch_max = 32;

constexpr int advice_collapse = 25;  // MADV_COLLAPSE, which older headers do not have

// Between attempts to reap while the kernel refuses even that.
constexpr std::chrono::milliseconds broken_reap_pause{1};

// How long to sleep before the next look at a GPU's copies. A copy of a block takes about 20 us. If
// nothing else is under way, somebody is waiting for it.
Engine::Nanoseconds copy_poll_pause(unsigned polls, bool others_go_on) noexcept {
  constexpr unsigned without_sleep = 100;
  if (others_go_on) return std::chrono::microseconds(100);
  return std::chrono::microseconds(polls < without_sleep ? 0 : 50);
}

// The memory of a block for which a slot would only be faster; nullptr if it needs one.
std::byte* memory_in_place(const Run& run, const Block& block) noexcept {
  const bool whole = block.offset == block.wanted_offset && block.bytes == block.wanted_bytes;
  const std::span<std::byte> all = run.plan.single_piece();
  if (!whole || all.empty() || run.gpu >= 0) return nullptr;
  std::byte* const memory = all.data() + (block.offset - run.plan.offset());
  return is_aligned(memory, run.file->memory_alignment()) ? memory : nullptr;
}

}  // namespace

Mover::Mover(const MoverOptions& options, std::unique_ptr<Engine> engine, Ledger& ledger,
             os::System& system, Background& background)
    : options_(options),
      ledger_(ledger),
      system_(system),
      background_(background),
      engine_(std::move(engine)),
      regions_(*engine_, ledger),
      files_(*engine_),
      flights_(options.queue_depth + reap_batch),
      completions_(reap_batch) {
  const std::size_t count = flights_.size();
  for (auto* list : {&free_, &ready_, &starved_, &delayed_, &landed_}) list->reserve(count);
  for (std::size_t i = count; i > 0; --i) free_.push_back(static_cast<std::uint32_t>(i - 1));
  requests_.reserve(batch_max);
  ended_.reserve(count);
}

std::size_t Mover::flights_left() const noexcept {
  const std::size_t active = flights_.size() - free_.size() - landed_.size() - unloading_;
  const std::size_t depth = options_.queue_depth;
  return active < depth ? std::min(depth - active, free_.size()) : 0;
}

std::size_t Mover::flights_left_for_background() const noexcept {
  const std::size_t left = flights_left();
  const std::size_t for_others = options_.queue_depth / 4;
  return left > for_others ? left - for_others : 0;
}

void Mover::revive() {
  regions_.drop_ended();
  if (!delayed_.empty()) revive_delayed();
  if (!copies_.empty()) collect_copies();
  if (!starved_.empty()) feed_starved();
}

bool Mover::work_at_hand() const noexcept {
  const auto can_be_fed = [this](std::uint32_t index) { return slot_is_free_for(flights_[index]); };
  return std::ranges::any_of(starved_, can_be_fed);
}

void Mover::take_up(Claim&& claim) {
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Flight& flight = flights_[index];
  flight = Flight{.claim = std::move(claim)};
  flight.started = Clock::now();
  flight.claim.transfer->mark_started(flight.started);
  if (classes_in_use()) [[unlikely]] {
    background_.governor().begins(flight.claim.transfer->priority(), flight.started);
  }
  if (const SyncStep* step = flight.claim.step) {
    flight.attempt.kind = step->kind;
    flight.fd = step->fd;
  } else {
    const Block& block = flight.claim.block;
    flight.attempt =
        first_attempt(flight.claim.transfer->direction(), block, flight.claim.run->alignment);
    flight.fd = flight.claim.run->fd_for(block);
    if (block.descriptor == Descriptor::direct) flight.file_index = files_.use(*flight.claim.run);
  }
  make_ready(index);
}

// Gives the flight its memory, or lets it wait for a slot.
void Mover::make_ready(std::uint32_t index) {
  Flight& flight = flights_[index];
  const Block& block = flight.claim.block;
  if (is_sync(flight.attempt.kind)) {
    flight.stage = Stage::ready;
    ready_.push_back(index);
    return;
  }
  if (block.memory != nullptr) {
    flight.memory = block.memory;
  } else if (!take_slot(flight)) {
    if (slot_region_ != nullptr) {
      flight.stage = Stage::starved;
      starved_.push_back(index);
      return;
    }
    flight.memory = memory_in_place(*flight.claim.run, block);
    if (flight.memory == nullptr) {
      fail(index, ENOMEM);
      return;
    }
  }
  if (flight.slot >= 0 && flight.attempt.kind == RequestKind::write) {
    load(index);
  } else {
    loaded(index);
  }
}

// Copies what the flight writes into its slot.
void Mover::load(std::uint32_t index) {
  Flight& flight = flights_[index];
  if (flight.claim.run->gpu < 0) {
    copy_in(flight);
    loaded(index);
  } else if (Status started = copy_by_gpu(index); started.ok()) {
    flight.stage = Stage::loading;
  } else {
    fail(index, started.error());
  }
}

// The memory of the flight's request is ready.
void Mover::loaded(std::uint32_t index) {
  Flight& flight = flights_[index];
  const Block& block = flight.claim.block;
  const auto& region = flight.slot >= 0 ? slot_region_ : flight.claim.run->region;
  if (region != nullptr) {
    flight.buffer_index = regions_.index_of(region, {flight.memory, block.bytes});
  }
  const bool copied = flight.slot >= 0 && flight.attempt.kind == RequestKind::write;
  const bool made = flight.slot < 0 && make_pages(*flight.claim.run, block);
  flight.stage = Stage::ready;
  ready_.push_back(index);
  // Both take as long as a request does. Submitting now keeps the drive from waiting for the batch.
  if (copied || made) submit_ready();
  // The bytes are in the cache now, and the drive has work. A refused request may have ended it.
  if (copied && flight.stage != Stage::unused) show(flight);
}

// The first touch of fresh memory costs more than the read itself: a page fault for every 4 KiB.
// Making huge pages just ahead of the read is several times cheaper, and uses no more memory: the
// read fills the whole range. MADV_COLLAPSE leaves no advice on memory that is the caller's, unlike
// MADV_HUGEPAGE; it wants one small page to be there, and not the zero page, which Linux 6.18
// refuses. Before Linux 6.1, or if no huge page is free, the kernel makes small ones as the
// request or the copy needs them.
bool Mover::make_pages(const Run& run, const Block& block) {
  if (!run.fresh) return false;
  const std::span<std::byte> all = run.plan.single_piece();
  const auto begin = reinterpret_cast<std::uintptr_t>(all.data());
  const std::uintptr_t block_end =
      begin + (block.wanted_offset - run.plan.offset()) + block.wanted_bytes;
  const std::uintptr_t first = align_up(begin, huge_page_bytes);
  const std::uintptr_t last = align_down(begin + all.size(), huge_page_bytes);
  const std::uintptr_t wanted = std::min(align_up(block_end, huge_page_bytes), last);
  const std::atomic_ref made(run.pages_made_to);  // blocks are claimed in order, by any worker
  std::uintptr_t before = made.load();
  do {
    if (wanted <= std::max(before, first)) return false;
  } while (!made.compare_exchange_weak(before, wanted));
  const std::uintptr_t from = std::max(before, first);
  for (std::uintptr_t page = from; page < wanted; page += huge_page_bytes) {
    system_.advise(reinterpret_cast<std::byte*>(page), page_bytes(), MADV_POPULATE_WRITE);
  }
  const int collapsed =
      system_.advise(reinterpret_cast<std::byte*>(from), wanted - from, advice_collapse);
  if (collapsed == -EINVAL) made.store(UINTPTR_MAX);  // not this memory, or not this kernel
  return collapsed >= 0;
}

bool Mover::take_slot(Flight& flight) {
  if (slot_region_ == nullptr) {
    auto region = memory::Region::create(options_.slot_block_bytes * options_.slots, system_,
                                         options_.numa_node);
    if (!region.ok()) return false;
    slot_region_ = std::move(region.value());
    for (const auto* reason : {&slot_region_->lock_reason(), &slot_region_->numa_reason()}) {
      if (!reason->empty()) ledger_.note_fallback(*reason);
    }
    for (unsigned i = options_.slots; i > 0; --i) {
      free_slots_.push_back(static_cast<int>(i - 1));
    }
  }
  if (!slot_is_free_for(flight)) return false;
  flight.slot = free_slots_.back();
  free_slots_.pop_back();
  flight.memory =
      slot_region_->data() + static_cast<std::size_t>(flight.slot) * options_.slot_block_bytes;
  if (counts_for_cache(flight)) slot_bytes_under_way_ += flight.claim.block.bytes;
  return true;
}

// The CPU copies through its cache, and the drive finds the bytes there if it comes soon. More
// slots than the cache holds would only take the way through memory. A GPU copies from memory to
// memory.
bool Mover::slot_is_free_for(const Flight& flight) const noexcept {
  if (free_slots_.empty()) return false;
  if (classes_in_use()) [[unlikely]] {
    if (flight.claim.transfer->priority() == Priority::urgent) return true;
    if (free_slots_.size() <= slots_for_urgent()) return false;
  }
  if (flight.claim.run->gpu >= 0 || slot_bytes_under_way_ == 0) return true;
  const std::size_t limit = options_.slot_bytes_in_flight;
  return slot_bytes_under_way_ < limit && flight.claim.block.bytes <= limit - slot_bytes_under_way_;
}

bool Mover::counts_for_cache(const Flight& flight) noexcept {
  return flight.slot >= 0 && flight.claim.run->gpu < 0 && flight.stage != Stage::landed;
}

// If flights starve although slots are free, their memory is the CPU's.
bool Mover::has_slots_for(const Run& run, Priority priority) const noexcept {
  if (priority == Priority::urgent) return !free_slots_.empty();
  return starved_.empty() || (run.gpu >= 0 && free_slots_.size() > slots_for_urgent());
}

void Mover::feed_starved() {
  std::erase_if(starved_, [this](std::uint32_t index) {
    if (!slot_is_free_for(flights_[index])) return false;
    make_ready(index);
    return true;
  });
}

void Mover::revive_delayed() {
  const Clock::time_point now = Clock::now();
  std::erase_if(delayed_, [&](std::uint32_t index) {
    if (flights_[index].due > now) return false;
    flights_[index].stage = Stage::ready;
    ready_.push_back(index);
    return true;
  });
}

void Mover::submit_ready() {
  if (ready_.empty()) {
    refusals_ = 0;
    return;
  }
  const std::size_t batch = options_.submit == Submit::single ? 1 : batch_max;
  std::size_t begin = 0;
  int refused = 0;
  while (begin < ready_.size()) {
    const std::size_t end = std::min(ready_.size(), begin + batch);
    const engines::Submitted submitted = offer(begin, end);
    begin += submitted.taken;
    if (begin < end) {
      refused = submitted.error;
      break;
    }
  }
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(begin));
  if (refused == 0 || begin > 0) refusals_ = 0;
  if (refused == 0) return;
  ledger_.add(&Stats::refused_submissions);
  // With requests in flight the next completion makes room: such a refusal does not count.
  if (in_flight_ == 0) ++refusals_;
  if (judge_refusal(refused, refusals_) == Verdict::retry) return;
  refusals_ = 0;
  const std::uint32_t hopeless = ready_.front();
  ready_.erase(ready_.begin());
  fail(hopeless, refused);
}

// Offers ready_[begin, end) to the engine in one call.
engines::Submitted Mover::offer(std::size_t begin, std::size_t end) {
  requests_.clear();
  for (std::size_t i = begin; i < end; ++i) {
    const Flight& flight = flights_[ready_[i]];
    const Attempt& attempt = flight.attempt;
    const Run* run = flight.claim.run;
    const bool in_place_on_gpu = run != nullptr && flight.slot < 0 && run->gpu_file != nullptr;
    requests_.push_back({.tag = ready_[i],
                         .kind = attempt.kind,
                         .fd = flight.fd,
                         .file_index = flight.file_index,
                         .buffer_index = flight.buffer_index,
                         .memory = flight.memory + attempt.done,
                         .bytes = attempt.bytes - attempt.done,
                         .offset = flight.claim.block.offset + attempt.done,
                         .gpu = in_place_on_gpu ? run->gpu : -1,
                         .gpu_file = in_place_on_gpu ? run->gpu_file.get() : nullptr});
  }
  if (attach_error_ != 0) return {0, attach_error_};
  const engines::Submitted submitted = engine_->submit(requests_);
  for (std::size_t i = begin; i < begin + submitted.taken; ++i) {
    Flight& flight = flights_[ready_[i]];
    flight.stage = Stage::in_flight;
    if (flight.buffer_index >= 0) ledger_.add(&Stats::fixed_requests);
  }
  in_flight_ += submitted.taken;
  return submitted;
}

Engine::Nanoseconds Mover::wait_limit() const {
  if (!landed_.empty()) return Engine::Nanoseconds::zero();
  Engine::Nanoseconds limit = Engine::forever;
  if (!ready_.empty())
    limit = in_flight_ > 0 ? std::chrono::milliseconds(1) : retry_delay(refusals_);
  if (!delayed_.empty()) {
    const Clock::time_point now = Clock::now();
    for (const std::uint32_t index : delayed_) {
      limit = std::clamp(flights_[index].due - now, Engine::Nanoseconds::zero(), limit);
    }
  }
  if (!copies_.empty())
    limit = std::min(limit, copy_poll_pause(polls_, in_flight_ > 0 && (starved_.empty() ||
                                                                       !free_slots_.empty())));
  return limit;
}

void Mover::wait(Nanoseconds limit) { waited_ = engine_->reap(completions_, limit); }

void Mover::judge_waited() {
  const int count = std::exchange(waited_, 0);
  polls_ = count > 0 ? 0 : polls_ + 1;
  if (count < 0 && count != -EINTR) std::this_thread::sleep_for(broken_reap_pause);
  for (int i = 0; i < count; ++i) {
    const Completion& completion = completions_[static_cast<std::size_t>(i)];
    --in_flight_;
    completed(static_cast<std::uint32_t>(completion.tag), completion.result);
  }
}

inline void Mover::unloaded(std::uint32_t index) {
  const Flight& flight = flights_[index];
  const Block& block = flight.claim.block;
  if (flight.slot >= 0) ledger_.add(&Stats::bounced_bytes, block.wanted_bytes);
  moved_bytes_ += block.wanted_bytes;
  flight.claim.transfer->add_bytes(flight.claim.run->plan.kept_bytes(block));
  finish(index);
}

void Mover::completed(std::uint32_t index, std::int32_t result) {
  Flight& flight = flights_[index];
  Transfer& transfer = *flight.claim.transfer;
  ledger_.request_ended({.verb = engines::verb(flight.attempt.kind),
                         .operation = transfer.id(),
                         .offset = flight.claim.block.offset,
                         .bytes = flight.attempt.bytes,
                         .result = result,
                         .begin = flight.started});
  // Nobody has cancelled it: the kernel could start no thread for it.
  if (result == -ECANCELED && !transfer.stopping()) result = -EAGAIN;
  if (classes_in_use()) [[unlikely]] {
    background_.governor().ended(transfer.priority(), transfer.direction(), flight.attempt.bytes,
                                 flight.started, Clock::now());
  }
  const Judgement judgement =
      flight.claim.run == nullptr
          ? judge(flight.attempt, result)
          : judge_block(flight.attempt, flight.claim.block, *flight.claim.run->file, result);
  switch (judgement.verdict) {
    case Verdict::done:
      if (is_sync(flight.attempt.kind)) {
        finish(index);
      } else if (flight.slot >= 0 ? flight.attempt.kind == RequestKind::read
                                  : transfer.witness != nullptr) {
        if (counts_for_cache(flight)) slot_bytes_under_way_ -= flight.claim.block.bytes;
        leave_background(flight);
        flight.stage = Stage::landed;
        landed_.push_back(index);
      } else {
        unloaded(index);
      }
      return;
    case Verdict::resume:
    case Verdict::retry:
      ledger_.request_repeats(result);
      break;
    case Verdict::ended:
    case Verdict::fail:
      fail(index, judgement.code);
      return;
  }
  if (transfer.stopping()) {
    finish(index);
    return;
  }
  const auto delay = retry_delay(flight.attempt.fruitless);
  flight.due = Clock::now() + delay;
  flight.stage = delay.count() > 0 ? Stage::delayed : Stage::ready;
  (delay.count() > 0 ? delayed_ : ready_).push_back(index);
}

// Ends the flight and frees everything it holds.
void Mover::finish(std::uint32_t index) {
  Flight& flight = flights_[index];
  if (counts_for_cache(flight)) slot_bytes_under_way_ -= flight.claim.block.bytes;
  leave_background(flight);
  if (flight.slot >= 0) free_slots_.push_back(flight.slot);
  if (flight.file_index >= 0) files_.give_back(*flight.claim.run);
  std::shared_ptr<Transfer> transfer = std::move(flight.claim.transfer);
  flight.stage = Stage::unused;
  free_.push_back(index);
  if (transfer->finish_blocks(1)) ended_.push_back(std::move(transfer));
}

void Mover::fail(std::uint32_t index, int code) {
  const Flight& flight = flights_[index];
  const Claim& claim = flight.claim;
  fail(index,
       claim.step != nullptr
           ? sync_error(claim.step->kind, *claim.step->file, claim.step->directory.get(), code)
           : transfer_error(flight.attempt, claim.block, *claim.run->file, code));
}

void Mover::fail(std::uint32_t index, const Error& error) {
  const Claim& claim = flights_[index].claim;
  claim.transfer->fail(error);
  failed_.push_back(claim.transfer);
  finish(index);
}

// The queue was refilled before, so the drive has work. Making pages takes longer than that work,
// so after a block that needs pages the queue comes first again.
void Mover::unload() {
  if (landed_.empty()) return;
  std::size_t count = 0;
  for (bool made = false; count < landed_.size() && !made; ++count) {
    const std::uint32_t index = landed_[count];
    Flight& flight = flights_[index];
    const bool from_slot = flight.slot >= 0 && flight.attempt.kind == RequestKind::read;
    if (from_slot && flight.claim.run->gpu >= 0) {
      if (Status started = copy_by_gpu(index); !started.ok()) {
        fail(index, started.error());
        continue;
      }
      flight.stage = Stage::unloading;
      ++unloading_;
      show(flight);  // while the GPU copies
      continue;
    }
    show(flight);
    if (from_slot) {
      made = make_pages(*flight.claim.run, flight.claim.block);
      copy_out(flight);
    }
    unloaded(index);
  }
  landed_.erase(landed_.begin(), landed_.begin() + static_cast<std::ptrdiff_t>(count));
}

void Mover::show(const Flight& flight) {
  if (flight.claim.transfer->witness == nullptr) return;
  const Block& block = flight.claim.block;
  const std::byte* wanted = flight.memory + (block.wanted_offset - block.offset);
  flight.claim.transfer->witness->see(*flight.claim.run->file, block.wanted_offset,
                                      {wanted, block.wanted_bytes});
}

// Starts a copy between the flight's slot and the memory of a GPU.
Status Mover::copy_by_gpu(std::uint32_t index) {
  const Flight& flight = flights_[index];
  if (!slots_known_to_cuda_) {
    slots_known_to_cuda_ = slot_region_->register_with_cuda();
    ledger_.note_unknown_to_cuda(slot_region_->cuda_reason());
  }
  polls_ = 0;
  return copies_.start(index, *flight.claim.run, flight.claim.block, flight.memory,
                       flight.claim.transfer->direction());
}

void Mover::collect_copies() {
  copies_.collect([this](std::uint32_t index, const Status& status) {
    Flight& flight = flights_[index];
    polls_ = 0;
    if (flight.stage == Stage::unloading) --unloading_;
    if (!status.ok()) {
      fail(index, status.error());
    } else if (flight.stage == Stage::unloading) {
      unloaded(index);
    } else if (flight.claim.transfer->stopping()) {
      finish(index);
    } else {
      loaded(index);
    }
  });
}

void Mover::copy_out(const Flight& flight) const {
  const Block& block = flight.claim.block;
  const std::byte* from = flight.memory + (block.wanted_offset - block.offset);
  flight.claim.run->plan.for_each_memory(
      block.wanted_offset, block.wanted_bytes, [&](std::byte* memory, std::size_t bytes) {
        const std::byte* here = std::exchange(from, from + bytes);
        if (memory == nullptr) return;
        copy({memory, bytes}, {here, bytes}, Destination::cold);
      });
}

void Mover::copy_in(const Flight& flight) {
  const Block& block = flight.claim.block;
  std::byte* to = flight.memory;
  flight.claim.run->plan.for_each_memory(block.wanted_offset, block.wanted_bytes,
                                         [&](const std::byte* memory, std::size_t bytes) {
                                           copy_to_slot_({to, bytes}, {memory, bytes});
                                           to += bytes;
                                         });
}

void Mover::end_stopping() {
  for (std::uint32_t index = 0; index < flights_.size(); ++index) {
    Flight& flight = flights_[index];
    if (flight.stage == Stage::unused) continue;
    if (!flight.claim.transfer->stopping()) continue;
    if (flight.stage == Stage::in_flight) {
      if (!std::exchange(flight.cancelled, true)) engine_->cancel(index);
      continue;
    }
    // A copy under way belongs to the GPU until it ends.
    if (flight.stage == Stage::loading || flight.stage == Stage::unloading) continue;
    for (auto* list : {&ready_, &starved_, &delayed_, &landed_}) std::erase(*list, index);
    finish(index);
  }
}

}  // namespace tensorferry::handle
