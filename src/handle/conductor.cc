#include "handle/conductor.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "base/alignment.h"
#include "engines/cufile.h"
#include "handle/trace.h"
#include "tensorferry/gds.h"

namespace tensorferry::handle {

namespace {

using engines::RequestKind;

constexpr unsigned queue_depth_max = 4096;
constexpr unsigned workers_max = 256;
constexpr unsigned auto_queue_depth_min = 8;
constexpr unsigned auto_workers_max = 4;
constexpr std::size_t slot_block_bytes_min = 64 * KiB;

constexpr std::size_t auto_slot_bytes = 64 * MiB;

// How the memory for slots is shared out: to the workers, to those of files without O_DIRECT, to
// those of cuFile (for ragged ends alone) and to inline callers.
constexpr std::size_t slot_shares = 16;
constexpr std::size_t main_shares = 9;
constexpr std::size_t buffered_shares = 5;
constexpr std::size_t gds_shares = 1;
constexpr std::size_t inline_shares = 1;

// Neighbours up to this size share a request; the copy costs less than requests of their own.
constexpr std::uint64_t merge_bytes_max = 128 * KiB;

Error invalid(const char* operation, std::string hint) {
  return Error({.operation = operation,
                .path = {},
                .offset = {},
                .length = {},
                .code = EINVAL,
                .hint = std::move(hint)});
}

std::string gds_reason() {
  return "chosen by the caller, for memory of GPUs; " + gds_support().reason;
}

// The file as cuFile knows it. An explicit engine that cannot serve a file is an error.
Result<std::shared_ptr<engines::CufileFile>> cufile_of(const files::OpenFile& file) {
  const auto refuse = [&](int code, const std::string& why) {
    return Error({.operation = "use GPUDirect Storage",
                  .path = file.path(),
                  .offset = {},
                  .length = {},
                  .code = code,
                  .hint = why + "; the engine auto reaches this file"});
  };
  if (!file.direct()) return refuse(EOPNOTSUPP, file.direct_reason());
  auto registered = engines::CufileFile::of(file.direct_fd());
  if (!registered.ok()) {
    const Error& error = registered.error();
    return refuse(error.code(), error.operation() + ": " + error.hint());
  }
  return registered;
}

constexpr std::size_t slot_bytes_min(unsigned workers) noexcept {
  return slot_shares * slot_block_bytes_min * workers;
}

Status check_options(const HandleOptions& options) {
  const auto out_of_range = [](const std::string& what, std::size_t value, std::size_t max) {
    return invalid("open handle", what + " is " + std::to_string(value) + " and must be at most " +
                                      std::to_string(max));
  };
  if (options.queue_depth > queue_depth_max) {
    return out_of_range("queue_depth", options.queue_depth, queue_depth_max);
  }
  if (options.workers > workers_max) {
    return out_of_range("workers", options.workers, workers_max);
  }
  if (options.block_bytes > GiB) return out_of_range("block_bytes", options.block_bytes, GiB);
  const unsigned workers = std::max(options.workers, auto_workers_max);
  const std::size_t needed = slot_bytes_min(workers);
  if (options.slot_bytes > 0 && options.slot_bytes < needed) {
    return invalid("open handle", "slot_bytes is " + std::to_string(options.slot_bytes) +
                                      " and must be at least " + std::to_string(needed) + " for " +
                                      std::to_string(workers) + " workers");
  }
  return Nothing{};
}

// Whether a small transfer through slots, and nothing else, may be cut into quarters: the copy of
// one goes on while the others are on their way. What the user chose is not cut.
bool cuts_small_transfers(const HandleOptions& options) noexcept {
  return options.block_bytes == 0 && options.overlap == Overlap::on &&
         (options.queue_depth == 0 || options.queue_depth >= 4);
}

// So many shares of the memory for slots.
std::size_t slot_bytes_of(const HandleOptions& options, std::size_t shares) noexcept {
  const std::size_t automatic = std::max(auto_slot_bytes, slot_bytes_min(options.workers));
  return (options.slot_bytes > 0 ? options.slot_bytes : automatic) / slot_shares * shares;
}

// How many bytes may be under way in slots, of all workers together: they stay in the cache, of
// which other work, and what has landed and is being copied out, needs its share. Each disk has
// enough to do all the same.
std::size_t slot_bytes_in_flight(const Device& device, std::size_t slot_bytes) {
  return std::max(os::last_level_cache_bytes() / 4,
                  std::size_t{device.disks} * auto_queue_depth_min * slot_bytes);
}

// How much of a transfer the calling thread takes through a slot, where the copy comes last.
std::uint64_t inline_slot_bytes_max(const HandleOptions& options) noexcept {
  return cuts_small_transfers(options) ? 256 * KiB : MiB;
}

// The region that holds all of a run, if it is one piece; it was found last.
std::shared_ptr<memory::Region> region_of(const Transfer& transfer, std::span<const Piece> pieces) {
  if (pieces.size() != 1 || transfer.regions.empty()) return nullptr;
  const auto& region = transfer.regions.back();
  const Piece& piece = pieces.front();
  return region->holds({piece.memory, piece.bytes}) ? region : nullptr;
}

// What the requests of a run are made of. Through the page cache it is single pages all the same.
files::Pages pages_of(const files::OpenFile& file, const memory::Region* region) noexcept {
  const bool huge = file.direct() && region != nullptr && region->huge_page_reason().empty();
  return huge ? files::Pages::huge : files::Pages::usual;
}

std::size_t quarter_of(const Limits& limits, const Part& part) noexcept {
  const std::uint64_t quarter =
      align_up(std::max<std::uint64_t>(part.bytes / 4, 256 * KiB), unit_of(*part.file));
  return static_cast<std::size_t>(std::min<std::uint64_t>(limits.slot_block_bytes, quarter));
}

}  // namespace

Conductor::Conductor(const HandleOptions& options, os::System& system, OpenEngine open_engine)
    : options_(options),
      system_(system),
      open_engine_(std::move(open_engine)),
      generation_(os::fork_generation()),
      inline_mover_(system, ledger_, options.block_bytes, inline_slot_bytes_max(options),
                    slot_bytes_of(options_, inline_shares)) {}

Result<std::unique_ptr<Conductor>> Conductor::create(const HandleOptions& options, Parts parts) {
  if (Status checked = check_options(options); !checked.ok()) return checked.error();
  if (!parts.open_engine) parts.open_engine = engines::open_engine;
  os::System& system = parts.system != nullptr ? *parts.system : os::System::real();
  std::unique_ptr<Conductor> conductor(
      new Conductor(options, system, std::move(parts.open_engine)));
  // An explicit engine that cannot be had is refused here. Threads and rings come with the first
  // operation that is queued: a handle for small transfers stays small.
  if (options.engine != EngineKind::automatic) {
    if (auto engine = conductor->engine(); !engine.ok()) return engine.error();
  }
  return conductor;
}

Conductor::~Conductor() {
  if (generation_ != os::fork_generation()) {
    // In a forked child the workers do not exist and the rings are the parent's: touch nothing.
    for (const Team* team : {&main_, &buffered_, &gds_}) {
      if (team->crew != nullptr) team->crew->abandon(team->crew);
    }
    return;
  }
  for (const Team* team : {&main_, &buffered_, &gds_}) {
    if (team->crew != nullptr) team->crew->close();
  }
  if (Trace* trace = Trace::active()) trace->flush();
}

Status Conductor::check_generation() const {
  if (generation_ == os::fork_generation()) return Nothing{};
  return Error({.operation = "use handle",
                .path = {},
                .offset = {},
                .length = {},
                .code = ECHILD,
                .hint = "it was opened before fork() and belongs to the parent; open a new one"});
}

Status Conductor::check(Direction direction, const Part& part) const {
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
  constexpr auto end_max = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (part.offset > end_max || part.bytes > end_max - part.offset) {
    return refuse(EINVAL, "offset plus length is beyond what a file can hold");
  }
  return Nothing{};
}

// What of the users' streams the parts have to wait for.
Result<std::vector<std::shared_ptr<os::GpuFence>>> Conductor::fences_for(
    std::span<const Part> parts) const {
  std::vector<std::shared_ptr<os::GpuFence>> fences;
  const Part* last = nullptr;  // that was on a GPU
  for (const Part& part : parts) {
    if (part.gpu < 0) continue;
    if (last != nullptr && last->gpu == part.gpu && last->stream.handle == part.stream.handle) {
      continue;
    }
    last = &part;
    auto fence = os::GpuFence::after(part.gpu, part.stream.handle);
    if (!fence.ok()) return fence.error();
    if (fence.value() != nullptr) fences.push_back(std::move(fence.value()));
  }
  if (last != nullptr) memory::register_listed_with_cuda();
  return fences;
}

Limits Conductor::limits_for(const files::OpenFile& file, files::Pages pages,
                             const Crew& crew) const noexcept {
  const std::size_t unit = unit_of(file);
  const auto block_bytes = [&](files::Pages of) {
    return align_up(options_.block_bytes > 0 ? options_.block_bytes
                                             : files::preferred_block_bytes(file.device(), of),
                    unit);
  };
  const std::size_t slot_bytes = crew.options().slot_block_bytes;
  return {
      .block_bytes = block_bytes(pages),
      .slot_block_bytes = align_down(std::min(block_bytes(files::Pages::usual), slot_bytes), unit)};
}

// --- Crews -----------------------------------------------------------------------------------

Result<std::shared_ptr<Crew>> Conductor::start_crew(EngineKind kind, const Device& device,
                                                    std::size_t slot_bytes) {
  const unsigned processors = std::max(std::thread::hardware_concurrency() / 2, 1U);
  const unsigned workers = options_.workers > 0 ? options_.workers
                           : device.profile
                               ? device.profile->workers
                               : std::min({device.disks, processors, auto_workers_max});
  // What sysfs suggests is for all workers together.
  const unsigned depth = options_.queue_depth > 0 ? options_.queue_depth
                         : device.profile
                             ? device.profile->queue_depth
                             : std::max(device.queue_depth / workers, auto_queue_depth_min);
  // A profile is about memory in place.
  const std::size_t wanted =
      options_.block_bytes > 0 ? align_up(options_.block_bytes, page_bytes())
                               : std::min(files::preferred_block_bytes(device), device.block_bytes);
  const bool in_cache = options_.slot_bytes == 0 && options_.overlap == Overlap::on;
  const std::size_t budget = slot_bytes / workers;
  const std::size_t slot =
      std::max(slot_block_bytes_min, align_down(std::min(wanted, budget / 2), page_bytes()));
  return Crew::start({.engine = kind,
                      .queue_depth = depth,
                      .workers = workers,
                      .submit = options_.submit,
                      .overlap = options_.overlap,
                      .slot_block_bytes = slot,
                      .slots_per_worker = static_cast<unsigned>(
                          std::clamp<std::size_t>(budget / slot, 1, depth + reap_batch)),
                      .slot_bytes_in_flight =
                          in_cache ? slot_bytes_in_flight(device, slot) / workers : slot_bytes},
                     open_engine_, system_, ledger_);
}

// `gds` is a choice for memory of GPUs alone.
bool Conductor::automatic() const noexcept {
  return options_.engine == EngineKind::automatic || options_.engine == EngineKind::gds;
}

template <class Open>
auto Conductor::choose_engine(const Device& device, Open open)
    -> Result<std::pair<EngineKind, std::string>> {
  if (!automatic()) {
    if (Status opened = open(options_.engine); !opened.ok()) return opened.error();
    return std::pair(options_.engine, std::string("chosen by the caller"));
  }
  std::string refusals;
  if (!device.profile_problem.empty()) refusals = device.profile_problem + "; ";
  if (device.profile && device.profile->engine != EngineKind::automatic) {
    const Status opened = open(device.profile->engine);
    if (opened.ok()) {
      return std::pair(device.profile->engine,
                       "auto: chosen by the profile of " + device.name + ", which tune made");
    }
    refusals += std::string(opened.error().what()) + "; ";
  }
  for (const EngineKind kind : {EngineKind::io_uring, EngineKind::libaio}) {
    const Status opened = open(kind);
    if (opened.ok()) {
      return std::pair(kind, refusals.empty()
                                 ? "auto: io_uring is the first choice and works here"
                                 : "auto: " + refusals + "using " + std::string(to_string(kind)));
    }
    refusals += std::string(opened.error().what()) + "; ";
  }
  if (Status opened = open(EngineKind::threads); !opened.ok()) return opened.error();
  return std::pair(EngineKind::threads, "auto: " + refusals + "using threads");
}

Result<Conductor::Team*> Conductor::main_team(const Device& device) {
  const std::lock_guard lock(mutex_);
  if (main_.crew != nullptr) return &main_;
  auto chosen = choose_engine(device, [&](EngineKind kind) -> Status {
    auto crew = start_crew(kind, device, slot_bytes_of(options_, main_shares));
    if (!crew.ok()) return crew.error();
    main_.crew = std::move(crew.value());
    return Nothing{};
  });
  if (!chosen.ok()) return chosen.error();
  const auto& [kind, reason] = chosen.value();
  main_.reason = std::make_shared<const std::string>(reason);
  const EngineKind first_choice = device.profile && device.profile->engine != EngineKind::automatic
                                      ? device.profile->engine
                                      : EngineKind::io_uring;
  if (automatic() && kind != first_choice) {
    ledger_->note_fallback(reason);
  }
  return &main_;
}

Result<Conductor::Team*> Conductor::gds_team(const files::OpenFile& file) {
  const std::lock_guard lock(mutex_);
  if (gds_.crew == nullptr) {
    auto crew = start_crew(EngineKind::gds, file.device(), slot_bytes_of(options_, gds_shares));
    if (!crew.ok()) return crew.error();
    gds_ = {std::move(crew.value()), std::make_shared<const std::string>(gds_reason())};
  }
  return &gds_;
}

Result<Conductor::Team*> Conductor::team_for(const files::OpenFile& file) {
  Result<Team*> main = main_team(file.device());
  if (!main.ok() || file.direct() || !automatic() ||
      main.value()->crew->options().engine == EngineKind::threads) {
    return main;
  }
  const std::lock_guard lock(mutex_);
  if (buffered_.crew == nullptr) {
    auto crew =
        start_crew(EngineKind::threads, file.device(), slot_bytes_of(options_, buffered_shares));
    if (!crew.ok()) return crew.error();
    buffered_ = {std::move(crew.value()),
                 std::make_shared<const std::string>(
                     "auto: without O_DIRECT threads move bytes best; " + file.direct_reason())};
    ledger_->note_fallback(*buffered_.reason);
  }
  return &buffered_;
}

Result<std::pair<EngineKind, std::string>> Conductor::engine() {
  if (Status checked = check_generation(); !checked.ok()) return checked.error();
  if (options_.engine == EngineKind::gds) {
    auto engine = open_engine_(EngineKind::gds, 1, system_);
    if (!engine.ok()) return engine.error();
    return std::pair(EngineKind::gds, gds_reason());
  }
  {
    const std::lock_guard lock(mutex_);
    if (main_.crew != nullptr) return std::pair(main_.crew->options().engine, *main_.reason);
  }
  return choose_engine(Device{}, [this](EngineKind kind) -> Status {
    auto engine = open_engine_(kind, std::max(options_.queue_depth, 1U), system_);
    if (!engine.ok()) return engine.error();
    return Nothing{};
  });
}

// --- Queued operations -----------------------------------------------------------------------

Result<Operation> Conductor::transfer(Direction direction, std::span<Part> parts,
                                      Durability durability) {
  if (Status checked = check_generation(); !checked.ok()) return checked.error();
  for (const Part& part : parts) {
    if (Status checked = check(direction, part); !checked.ok()) return checked.error();
  }
  Result<std::vector<std::shared_ptr<os::GpuFence>>> fences = fences_for(parts);
  if (!fences.ok()) return fences.error();
  const bool by_gds =
      options_.engine == EngineKind::gds &&
      std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.gpu >= 0; });
  Result<Team*> team = parts.empty() ? main_team(Device{})
                       : by_gds      ? gds_team(*parts.front().file)
                                     : team_for(*parts.front().file);
  if (!team.ok()) return team.error();
  auto transfer = std::make_shared<Transfer>(direction, verb_of(direction), ledger_);
  transfer->fences = std::move(fences.value());
  if (Status added = add_runs(*transfer, parts, *team.value()->crew); !added.ok())
    return added.error();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0 && parts[i].file == parts[i - 1].file) continue;
    if (Status added = add_steps(*transfer, parts[i].file, durability); !added.ok()) {
      return added.error();
    }
  }
  // Only now that nothing can be refused any more.
  if (direction == Direction::write) {
    for (const Run& run : transfer->runs) run.file->reserve(run.plan.offset(), run.plan.bytes());
  }
  return launch(std::move(transfer), *team.value());
}

Result<Operation> Conductor::sync(const std::shared_ptr<files::OpenFile>& file,
                                  Durability durability) {
  if (Status checked = check_generation(); !checked.ok()) return checked.error();
  Result<Team*> team = team_for(*file);
  if (!team.ok()) return team.error();
  auto transfer = std::make_shared<Transfer>(Direction::write, "sync", ledger_);
  if (Status added = add_steps(*transfer, file, durability); !added.ok()) return added.error();
  return launch(std::move(transfer), *team.value());
}

Result<Operation> Conductor::launch(std::shared_ptr<Transfer> transfer, Team& team) {
  transfer->crew = team.crew;
  transfer->engine_name = to_string(team.crew->options().engine);
  transfer->engine_reason = team.reason;
  transfer->count_blocks();
  team.crew->enqueue(transfer);
  return Operation(std::move(transfer));
}

Status Conductor::add_runs(Transfer& transfer, std::span<Part> parts, const Crew& crew) const {
  const auto before = [](const Part& a, const Part& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  };
  if (!std::is_sorted(parts.begin(), parts.end(), before)) {
    std::sort(parts.begin(), parts.end(), before);
  }
  transfer.pieces.reserve(parts.size());  // plans point into it
  const Part* first = nullptr;
  std::size_t first_piece = 0;
  const auto close_run = [&]() -> Status {
    if (first == nullptr) return Nothing{};
    const std::span<const Piece> pieces = std::span(transfer.pieces).subspan(first_piece);
    std::shared_ptr<memory::Region> region = region_of(transfer, pieces);
    Limits limits = limits_for(*first->file, pages_of(*first->file, region.get()), crew);
    if (parts.size() == 1 && first->gpu < 0 && cuts_small_transfers(options_)) {
      limits.slot_block_bytes = quarter_of(limits, *first);
    }
    return add_run(transfer, pieces, *first, std::move(region), crew, limits);
  };
  std::uint64_t end = 0;  // of the run so far
  for (const Part& part : parts) {
    if (part.bytes == 0) continue;
    const bool same_file = first != nullptr && first->file == part.file;
    if (same_file && part.offset < end && transfer.direction() == Direction::write) {
      return Error({.operation = "write_many",
                    .path = part.file->path(),
                    .offset = part.offset,
                    .length = part.bytes,
                    .code = EINVAL,
                    .hint = "it overlaps another transfer of the same call"});
    }
    const bool joins = same_file && part.offset == end && part.gpu == first->gpu &&
                       part.bytes <= merge_bytes_max &&
                       transfer.pieces.back().bytes <= merge_bytes_max;
    if (!joins) {
      if (Status closed = close_run(); !closed.ok()) return closed;
      first = &part;
      first_piece = transfer.pieces.size();
    }
    transfer.pieces.push_back({part.memory, part.bytes, part.offset - first->offset});
    end = part.offset + part.bytes;
    auto region = memory::find_region({part.memory, part.bytes});
    if (region != nullptr && (transfer.regions.empty() || transfer.regions.back() != region)) {
      transfer.regions.push_back(std::move(region));
    }
  }
  return close_run();
}

Status Conductor::add_run(Transfer& transfer, std::span<const Piece> pieces, const Part& first,
                          std::shared_ptr<memory::Region> region, const Crew& crew,
                          const Limits& limits) const {
  files::OpenFile& file = *first.file;
  Rules rules = rules_of(first);
  std::shared_ptr<engines::CufileFile> cufile;
  if (first.gpu >= 0 && crew.options().engine == EngineKind::gds) {
    auto registered = cufile_of(file);
    if (!registered.ok()) return registered.error();
    cufile = std::move(registered.value());
    rules.in_place = true;
    rules.buffered_in_place = false;  // pages that are partly written are the page cache's
    rules.memory_alignment = 1;
  }
  Run run{.plan = Plan(transfer.direction(), first.offset, pieces, rules, limits),
          .file = first.file,
          .direct_fd = file.direct_fd(),
          .alignment = static_cast<std::uint32_t>(file.offset_alignment()),
          .region = std::move(region),
          .gpu = first.gpu,
          .cufile = std::move(cufile)};
  if (run.plan.needs_buffered_descriptor()) {
    Result<int> fd = file.buffered_fd();
    if (!fd.ok()) return fd.error();
    run.buffered_fd = fd.value();
  }
  transfer.runs.push_back(std::move(run));
  return Nothing{};
}

Status Conductor::add_steps(Transfer& transfer, const std::shared_ptr<files::OpenFile>& file,
                            Durability durability) {
  if (durability == Durability::none) return Nothing{};
  const RequestKind kind =
      durability == Durability::data ? RequestKind::sync_data : RequestKind::sync_full;
  transfer.steps.push_back({kind, file->main_fd(), file});
  if (durability == Durability::full) {
    Result<int> directory = file->directory_fd();
    if (!directory.ok()) return directory.error();
    if (directory.value() >= 0) transfer.steps.push_back({kind, directory.value(), file});
  }
  return Nothing{};
}

Status Conductor::transfer_now(Direction direction, Part part, Durability durability) {
  if (inline_mover_.fits(part) && (part.gpu < 0 || options_.engine != EngineKind::gds)) {
    if (Status checked = check_generation(); !checked.ok()) return checked;
    if (Status checked = check(direction, part); !checked.ok()) return checked;
    Result<std::vector<std::shared_ptr<os::GpuFence>>> fences = fences_for({&part, 1});
    if (!fences.ok()) return fences.error();
    const os::GpuFence* fence = fences.value().empty() ? nullptr : fences.value().front().get();
    if (auto done = inline_mover_.try_transfer(direction, part, fence, durability)) return *done;
  }
  Result<Operation> operation = transfer(direction, {&part, 1}, durability);
  if (!operation.ok()) return operation.error();
  try {
    operation.value().wait();
  } catch (const Error& error) {
    return error;
  }
  return Nothing{};
}

// --- Statistics ------------------------------------------------------------------------------

Stats Conductor::stats() {
  const auto value = [](const Ledger::Counter& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  Stats stats;
  stats.operations = value(ledger_->operations);
  stats.failed_operations = value(ledger_->failed_operations);
  stats.cancelled_operations = value(ledger_->cancelled_operations);
  stats.inline_operations = value(ledger_->inline_operations);
  stats.requests = value(ledger_->requests);
  stats.read_bytes = value(ledger_->read_bytes);
  stats.written_bytes = value(ledger_->written_bytes);
  stats.bounced_bytes = value(ledger_->bounced_bytes);
  stats.fixed_requests = value(ledger_->fixed_requests);
  stats.retries = value(ledger_->retries);
  stats.short_transfers = value(ledger_->short_transfers);
  stats.refused_submissions = value(ledger_->refused_submissions);
  stats.fallbacks = value(ledger_->fallbacks);
  stats.fallback_reasons = ledger_->fallback_reasons();
  stats.latency_ns_p50 = ledger_->latency_ns.percentile(0.50);
  stats.latency_ns_p90 = ledger_->latency_ns.percentile(0.90);
  stats.latency_ns_p99 = ledger_->latency_ns.percentile(0.99);
  stats.latency_ns_max = ledger_->latency_ns.max();
  if (generation_ == os::fork_generation()) {
    if (std::string problem = Trace::problem(); !problem.empty()) {
      ++stats.fallbacks;
      stats.fallback_reasons.push_back(std::move(problem));
    }
    const std::lock_guard lock(mutex_);
    for (const Team* team : {&main_, &buffered_, &gds_}) {
      if (team->crew != nullptr) stats.cpu_seconds += team->crew->cpu_seconds();
    }
  }
  return stats;
}

}  // namespace tensorferry::handle
