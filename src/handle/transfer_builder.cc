#include "handle/transfer_builder.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "base/alignment.h"
#include "handle/settings.h"
#include "memory/region.h"
#include "os/cuda.h"
#include "os/kept_memory.h"

namespace tensorferry::handle {

namespace {

// Neighbours up to this size share a request: the copy costs less than requests of their own.
constexpr std::uint64_t merge_bytes_max = 128 * KiB;
// From this size up a copy to a slot costs less than small pages do on a drive that prefers huge
// ones.
constexpr std::uint64_t small_pages_bytes_min = 512 * KiB;
// Reading over a gap up to this size costs less than a request of its own.
constexpr std::uint64_t read_over_bytes_max = 8 * KiB;

// Opens the file for an engine that moves the memory of GPUs. If the engine cannot reach the file,
// that is an error: the user chose this engine.
Result<std::shared_ptr<const engines::GpuFile>> gpu_file_of(EngineKind engine,
                                                            const files::OpenFile& file) {
  auto opened = engines::open_gpu_file(engine, file.direct() ? file.direct_fd() : -1);
  if (opened.ok()) return opened;
  const Error& error = opened.error();
  return Error({.operation = error.operation(),
                .path = file.path(),
                .code = error.code(),
                .hint = (file.direct() ? error.hint() : file.direct_reason()) +
                        "; use the engine auto for this file"});
}

// The region that holds all memory of a run of one piece. It was found last.
std::shared_ptr<memory::Region> region_of(const Transfer& transfer, std::span<const Piece> pieces) {
  if (pieces.size() != 1 || transfer.regions.empty()) return nullptr;
  const auto& region = transfer.regions.back();
  const Piece& piece = pieces.front();
  return region->holds({piece.memory, piece.bytes}) ? region : nullptr;
}

// The pages that requests of a run consist of. The page cache has small pages only.
files::Pages pages_of(const files::OpenFile& file, const memory::Region* region) noexcept {
  const bool huge = file.direct() && region != nullptr && region->huge_page_reason().empty();
  return huge ? files::Pages::huge : files::Pages::usual;
}

// What a transfer that somebody waits for is cut into, so that the drive works on all of it at once
// and one piece is copied while others are under way.
std::size_t share_of(const Part& part, unsigned count) noexcept {
  return align_up(std::max<std::uint64_t>(part.bytes / count, cut_bytes_min),
                  granularity_of(*part.file));
}

// Where the blocks of a run go and how large they may be.
struct Cut {
  const HandleOptions& options;
  Way way;
  Caller caller;
  std::size_t part_count;
};

Limits limits_for(const Part& first, files::Pages pages, const Cut& cut,
                  const Crew& crew) noexcept {
  const files::OpenFile& file = *first.file;
  const std::size_t granularity = granularity_of(file);
  const auto block_bytes = [&](files::Pages of) {
    return align_up(cut.options.block_bytes > 0 ? cut.options.block_bytes
                                                : files::preferred_block_bytes(file.device(), of),
                    granularity);
  };
  const MoverOptions& mover =
      cut.way == Way::lane ? crew.options().lane_mover : crew.options().mover;
  const std::size_t usual = block_bytes(files::Pages::usual);
  Limits limits{
      .block_bytes = pages == files::Pages::usual ? usual : block_bytes(pages),
      .slot_block_bytes = align_down(
          std::min(block_bytes(files::Pages::huge), mover.slot_block_bytes), granularity)};
  if (cut.part_count == 1 && first.gpu < 0 && cuts_small_transfers(cut.options)) {
    limits.slot_block_bytes = std::min(limits.slot_block_bytes, share_of(first, 4));
    if (cut.caller == Caller::waits && first.bytes <= cut_bytes_max) {
      // A request of huge pages has one segment: two are as quick as four, and cost less.
      const unsigned count = pages == files::Pages::huge ? 2 : 4;
      limits.block_bytes = std::min(limits.block_bytes, share_of(first, count));
    }
  }
  return limits;
}

std::byte* middle_page(std::byte* memory, std::uint64_t bytes) noexcept {
  std::byte* const middle = memory + bytes / 2;
  return middle - reinterpret_cast<std::uintptr_t>(middle) % page_bytes();
}

// Whether large memory is fresh, judged by one page in its middle. A guess does: all it decides is
// when pages are made.
bool is_fresh(const Piece& piece, os::System& system) {
  constexpr std::uint64_t large_bytes = 4 * MiB;
  if (piece.bytes < large_bytes) return false;
  return system.resident(middle_page(piece.memory, piece.bytes)) == 0;
}

void add_step(Transfer& transfer, const std::shared_ptr<files::OpenFile>& file, std::size_t leg,
              Durability durability) {
  using engines::RequestKind;
  transfer.steps.push_back(
      {.kind = durability == Durability::data ? RequestKind::sync_data : RequestKind::sync_full,
       .fd = file->main_fd(),
       .file = file,
       .leg = leg});
}

// Plans the pieces, which begin with the part `first`, and adds them to the transfer as one run.
Status add_run(Transfer& transfer, std::span<const Piece> pieces, const Part& first,
               std::shared_ptr<memory::Region> region, const Limits& limits, const Crew& crew) {
  files::OpenFile& file = *first.file;
  Rules rules = rules_of(first);
  const EngineKind engine = crew.options().engine;
  std::shared_ptr<const engines::GpuFile> gpu_file;
  if (first.gpu >= 0 && engines::moves_gpu_memory(engine) && transfer.witness == nullptr) {
    auto opened = gpu_file_of(engine, file);
    if (!opened.ok()) return opened.error();
    gpu_file = std::move(opened.value());
    rules.in_place = true;
    rules.buffered_in_place = false;  // the page cache writes the ragged ends
    rules.memory_alignment = 1;
  }
  const bool fresh = transfer.direction() == Direction::read && region == nullptr &&
                     pieces.size() == 1 && first.gpu < 0 && is_fresh(pieces.front(), crew.system());
  if (!fresh && pieces.size() == 1 &&
      is_better_in_slots(first, pieces.front().bytes, crew.system())) {
    rules.in_place = false;
  }
  Run& run =
      transfer.runs.emplace_back(Plan(transfer.direction(), first.offset, pieces, rules, limits),
                                 first.file, first.leg, file.direct_fd());
  run.alignment = static_cast<std::uint32_t>(file.offset_alignment());
  run.region = std::move(region);
  run.fresh = fresh;
  run.gpu = first.gpu;
  run.gpu_file = std::move(gpu_file);
  if (run.plan.needs_buffered_descriptor()) {
    Result<int> fd = file.buffered_fd();
    if (!fd.ok()) return fd.error();
    run.buffered_fd = fd.value();
    if (rules.direct && !file.direct()) {
      if (run.gpu_file != nullptr) return gpu_file_of(engine, file).error();
      crew.ledger()->note_fallback(file.direct_reason());
    }
  }
  return Nothing{};
}

// Whether the bytes of a part should go straight between the drive and its memory.
bool fits_in_place(const Part& part, os::System& system) {
  if (part.gpu >= 0) return false;
  const files::OpenFile& file = *part.file;
  if (!file.direct()) return true;
  const std::uint64_t first = align_up(part.offset, granularity_of(file));
  return is_aligned(part.memory + (first - part.offset), file.memory_alignment()) &&
         !is_better_in_slots(part, part.bytes, system);
}

// Collects parts, which come in the order of their files, into runs.
class RunBuilder {
 public:
  RunBuilder(Transfer& transfer, const Cut& cut, const Crews& crews)
      : transfer_(transfer), cut_(cut), crews_(crews) {}

  Status add(const Part& part) {
    const bool same_file = first_ != nullptr && first_->file == part.file;
    if (same_file && part.offset < end_ && transfer_.direction() == Direction::write) {
      return Error({.operation = "write_many",
                    .path = part.file->path(),
                    .offset = part.offset,
                    .length = part.bytes,
                    .code = EINVAL,
                    .hint = "it overlaps another transfer of the same call"});
    }
    const bool near = same_file && part.offset >= end_ && part.gpu == first_->gpu;
    // Neighbours in memory are one piece, as if the user had joined them. Not on a GPU: they may be
    // two allocations, which no copy may span.
    if (near && part.gpu < 0 && part.offset == end_ && part.memory == memory_end()) {
      transfer_.pieces.back().bytes += part.bytes;
    } else {
      const std::uint64_t gap = near ? part.offset - end_ : 0;
      if (!near || gap > gap_bytes_max() || !shares_requests(part)) {
        if (Status closed = close(); !closed.ok()) return closed;
        first_ = &part;
        first_piece_ = transfer_.pieces.size();
        end_ = part.offset;
      }
      if (end_ < part.offset) add_piece(nullptr, part.offset - end_);
      add_piece(part.memory, part.bytes);
    }
    last_ = &part;
    end_ = part.offset + part.bytes;
    auto region = memory::find_region({part.memory, part.bytes});
    if (region != nullptr && (transfer_.regions.empty() || transfer_.regions.back() != region)) {
      transfer_.regions.push_back(std::move(region));
    }
    return Nothing{};
  }

  Status close() {
    if (first_ == nullptr) return Nothing{};
    const std::span<const Piece> pieces = std::span(transfer_.pieces).subspan(first_piece_);
    const Crew& crew = *crews_[first_->leg];
    std::shared_ptr<memory::Region> region = region_of(transfer_, pieces);
    const Limits limits = limits_for(*first_, pages_of(*first_->file, region.get()), cut_, crew);
    return add_run(transfer_, pieces, *first_, std::move(region), limits, crew);
  }

 private:
  // Requests of neighbours that are small, or that need slots anyway, are worth sharing. A page of
  // the file that belongs to two of them is then written once.
  [[nodiscard]] bool shares_requests(const Part& part) const {
    const std::uint64_t before = transfer_.pieces.back().bytes;
    if (part.bytes <= merge_bytes_max && before <= merge_bytes_max) return true;
    os::System& system = crews_[part.leg]->system();
    return !fits_in_place(part, system) && !fits_in_place(*last_, system);
  }
  [[nodiscard]] std::uint64_t gap_bytes_max() const noexcept {
    return transfer_.direction() == Direction::read ? read_over_bytes_max : 0;
  }
  [[nodiscard]] const std::byte* memory_end() const noexcept {
    const Piece& last = transfer_.pieces.back();
    return last.memory + last.bytes;
  }
  void add_piece(std::byte* memory, std::uint64_t bytes) {
    transfer_.pieces.push_back({memory, bytes, end_ - first_->offset});
    end_ += bytes;
  }

  Transfer& transfer_;
  const Cut& cut_;
  const Crews& crews_;
  const Part* first_ = nullptr;  // of the run
  const Part* last_ = nullptr;
  std::size_t first_piece_ = 0;
  std::uint64_t end_ = 0;  // of the run so far
};

Status add_runs(Transfer& transfer, std::span<Part> parts, const Cut& cut, const Crews& crews) {
  const auto before = [](const Part& a, const Part& b) {
    if (a.leg != b.leg) return a.leg < b.leg;
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  };
  if (!std::is_sorted(parts.begin(), parts.end(), before)) {
    std::sort(parts.begin(), parts.end(), before);
  }
  const std::size_t gaps = transfer.direction() == Direction::read ? parts.size() - 1 : 0;
  transfer.pieces.reserve(parts.size() + gaps);  // plans point into it
  RunBuilder runs(transfer, cut, crews);
  for (const Part& part : parts) {
    if (part.bytes == 0) continue;
    if (Status added = runs.add(part); !added.ok()) return added;
  }
  return runs.close();
}

// Prepares the files that the transfer makes longer. A single block needs nothing: it arrives whole
// or not at all.
void begin_growth(Transfer& transfer) {
  for (auto first = transfer.runs.begin(); first != transfer.runs.end();) {
    const auto last = std::find_if(first, transfer.runs.end(),
                                   [&](const Run& run) { return run.file != first->file; });
    const std::span<Run> runs(first, last);
    first = last;
    if (runs.size() == 1 && runs.front().plan.block_count() == 1) continue;
    std::vector<files::Growth::Range> ranges;
    for (const Run& run : runs) {
      ranges.push_back({run.plan.offset(), run.plan.offset() + run.plan.bytes()});
    }
    auto growth = files::Growth::begin(runs.front().file, ranges);
    if (!growth) continue;
    for (const Run& run : runs) {
      run.file->reserve(run.plan.offset(), run.plan.bytes(), growth->old_end());
    }
    transfer.growths.push_back(std::move(*growth));
  }
}

std::shared_ptr<Transfer> new_transfer(Direction direction, const char* verb, const Crews& crews) {
  auto transfer = std::make_shared<Transfer>(direction, verb, crews.front()->ledger());
  transfer->legs.reserve(crews.size());
  for (Crew* crew : crews) {
    Leg& leg = transfer->legs.emplace_back();
    leg.owner = crew->weak_from_this();
    leg.crew = crew;
    leg.transfer = transfer.get();
  }
  return transfer;
}

}  // namespace

// Judged by one page in the middle. A slot lies in huge pages, and the copy costs less. Page-locked
// memory has huge pages where there are any. Memory that has no pages yet gets them from the read,
// huge ones if it can.
bool is_better_in_slots(const Part& part, std::uint64_t bytes, os::System& system) {
  if (!part.file->device().prefers_huge_pages || bytes < small_pages_bytes_min) return false;
  if (!part.file->direct() || part.gpu >= 0) return false;
  if (memory::find_region({part.memory, bytes}) != nullptr) return false;
  std::byte* const page = middle_page(part.memory, bytes);
  return system.huge_bytes(page, page_bytes()) <= 0 && system.resident(page) != 0;
}

// Memory to be written is only read; the engines' requests do not tell the two apart.
Part part_of(std::span<const std::byte> memory, const File& file, std::uint64_t offset,
             CudaStream stream) {
  return {.memory = const_cast<std::byte*>(memory.data()),
          .bytes = memory.size(),
          .file = file.opened(),
          .offset = offset,
          .gpu = memory.empty() ? -1 : os::gpu_of(memory.data()).value_or(-1),
          .stream = stream};
}

Status check_part(Direction direction, const Part& part) {
  const auto refuse = [&](int code, const char* hint) {
    return Error({.operation = verb_of(direction),
                  .path = part.file->path(),
                  .offset = part.offset,
                  .length = part.bytes,
                  .code = code,
                  .hint = hint});
  };
  if (direction == Direction::read && !part.file->readable()) {
    return refuse(EBADF, "the file was opened for writing only; open it for both");
  }
  if (direction == Direction::write && !part.file->writable()) {
    return refuse(EBADF, "the file was opened for reading only; open it for both");
  }
  if (part.memory == nullptr && part.bytes > 0) return refuse(EFAULT, "the memory is null");
  if (os::kept_by_parent({part.memory, part.bytes})) {
    return refuse(EFAULT,
                  "the memory belongs to the parent: a child of fork() inherits no page-locked "
                  "memory and no swap buffers; allocate them in the child");
  }
  constexpr auto end_max = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (part.offset > end_max || part.bytes > end_max - part.offset) {
    return refuse(EINVAL, "offset plus length is beyond what a file can hold");
  }
  return Nothing{};
}

Result<Fences> fences_for(std::span<const Part> parts) {
  Fences fences;
  const Part* last = nullptr;  // the last part on a GPU
  for (const Part& part : parts) {
    if (part.gpu < 0) continue;
    if (last != nullptr && last->gpu == part.gpu && last->stream.handle == part.stream.handle) {
      continue;
    }
    last = &part;
    auto fence = os::GpuFence::after(part.gpu, part.stream.handle);
    if (!fence.ok()) return explain(fence.error());
    if (fence.value() != nullptr) fences.push_back(std::move(fence.value()));
  }
  if (last != nullptr) memory::register_listed_with_cuda();
  return fences;
}

Result<std::shared_ptr<Transfer>> build_transfer(Direction direction, std::span<Part> parts,
                                                 Fences&& fences, Durability durability,
                                                 const HandleOptions& options, const Crews& crews,
                                                 Way way, Caller caller,
                                                 const std::shared_ptr<Witness>& witness) {
  auto transfer = new_transfer(direction, verb_of(direction), crews);
  if (witness != nullptr) transfer->witness = witness;
  if (!fences.empty()) transfer->fences = std::move(fences);
  const Cut cut{options, way, caller, parts.size()};
  if (Status added = add_runs(*transfer, parts, cut, crews); !added.ok()) return added.error();
  for (std::size_t i = 0; i < parts.size() && durability != Durability::none; ++i) {
    if (i > 0 && parts[i].file == parts[i - 1].file) continue;
    add_step(*transfer, parts[i].file, parts[i].leg, durability);
  }
  // Last: a transfer that is refused must not have changed a file.
  if (direction == Direction::write) begin_growth(*transfer);
  transfer->count_blocks();
  return transfer;
}

std::shared_ptr<Transfer> build_sync(const std::shared_ptr<files::OpenFile>& file,
                                     Durability durability, Crew& crew) {
  Crews crews;
  crews.push_back(&crew);
  auto transfer = new_transfer(Direction::write, "sync", crews);
  if (durability != Durability::none) add_step(*transfer, file, 0, durability);
  transfer->count_blocks();
  return transfer;
}

std::shared_ptr<Transfer> build_empty(Direction direction, const std::shared_ptr<Ledger>& ledger) {
  static const auto reason = std::make_shared<const std::string>("the operation moves nothing");
  auto transfer = std::make_shared<Transfer>(direction, verb_of(direction), ledger);
  transfer->engine_name = to_string(EngineKind::automatic);
  transfer->engine_reason = reason;
  return transfer;
}

}  // namespace tensorferry::handle
