#include "handle/conductor.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "base/alignment.h"
#include "engines/cufile.h"
#include "handle/trace.h"
#include "os/kept_memory.h"
#include "tensorferry/gds.h"

namespace tensorferry::handle {

namespace {

// Neighbours up to this size share a request; the copy costs less than requests of their own.
constexpr std::uint64_t merge_bytes_max = 128 * KiB;

std::string gds_reason() {
  return "chosen by the caller, for memory of GPUs; " + gds_support().reason;
}

// The file as cuFile knows it. An explicit engine that cannot serve a file is an error.
Result<std::shared_ptr<engines::CufileFile>> cufile_of(const files::OpenFile& file) {
  const auto refuse = [&](int code, const std::string& why) {
    return Error({.operation = "use GPUDirect Storage",
                  .path = file.path(),
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

void add_step(Transfer& transfer, const std::shared_ptr<files::OpenFile>& file,
              Durability durability) {
  using engines::RequestKind;
  if (durability == Durability::none) return;
  transfer.steps.push_back(
      {.kind = durability == Durability::data ? RequestKind::sync_data : RequestKind::sync_full,
       .fd = file->main_fd(),
       .file = file});
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
                    slot_bytes_of(options_, SlotShares::inline_callers)) {
  ledger_->on_lost = options.on_lost;
}

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
  (void)close(std::nullopt, OpenReads::cancel);
  ledger_->report_lost();
}

std::vector<std::shared_ptr<Crew>> Conductor::crews() noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Crew>> all;
  for (const Team* team : {&main_, &buffered_, &gds_}) {
    if (team->crew != nullptr) all.push_back(team->crew);
  }
  return all;
}

bool Conductor::close(std::optional<Operation::Clock::time_point> deadline,
                      OpenReads reads) noexcept {
  if (generation_ != os::fork_generation()) return true;
  closed_ = true;
  const std::vector<std::shared_ptr<Crew>> all = crews();
  for (const auto& crew : all) crew->finish(reads);
  for (const auto& crew : all) {
    if (!crew->wait_for_end(deadline)) return false;
  }
  if (Trace* trace = Trace::active()) trace->flush();
  return true;
}

void Conductor::cancel_all() noexcept {
  if (generation_ != os::fork_generation()) return;
  for (const auto& crew : crews()) crew->cancel_all();
}

Status Conductor::check_open() const {
  const auto refuse = [](int code, const char* hint) {
    return Error({.operation = "use handle", .code = code, .hint = hint});
  };
  if (generation_ != os::fork_generation()) {
    return refuse(ECHILD, "it was opened before fork() and belongs to the parent; open a new one");
  }
  if (closed_) return refuse(EINVAL, "it is closed; open a new one");
  return Nothing{};
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
  if (os::kept_by_parent({part.memory, part.bytes})) {
    return refuse(EFAULT,
                  "the memory is the parent's: children of fork() get no page-locked memory and no "
                  "swap buffers; make them in the child");
  }
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
    if (!fence.ok()) return explain(fence.error());
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
                                                    SlotShares shares) {
  return Crew::start(crew_options(options_, kind, device, shares), open_engine_, system_, ledger_);
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
    auto crew = start_crew(kind, device, SlotShares::workers);
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
    auto crew = start_crew(EngineKind::gds, file.device(), SlotShares::gds);
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
    auto crew = start_crew(EngineKind::threads, file.device(), SlotShares::buffered);
    if (!crew.ok()) return crew.error();
    buffered_ = {std::move(crew.value()),
                 std::make_shared<const std::string>(
                     "auto: without O_DIRECT threads move bytes best; " + file.direct_reason())};
    ledger_->note_fallback(*buffered_.reason);
  }
  return &buffered_;
}

Result<std::pair<EngineKind, std::string>> Conductor::engine() {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
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
  if (Status checked = check_open(); !checked.ok()) return checked.error();
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
    add_step(*transfer, parts[i].file, durability);
  }
  // Only now that nothing can be refused any more.
  if (direction == Direction::write) begin_growth(*transfer);
  return launch(std::move(transfer), *team.value());
}

Result<Operation> Conductor::sync(const std::shared_ptr<files::OpenFile>& file,
                                  Durability durability) {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  Result<Team*> team = team_for(*file);
  if (!team.ok()) return team.error();
  auto transfer = std::make_shared<Transfer>(Direction::write, "sync", ledger_);
  add_step(*transfer, file, durability);
  return launch(std::move(transfer), *team.value());
}

// Readies the files that the transfer makes longer. What is one block comes whole or not at all.
void Conductor::begin_growth(Transfer& transfer) const {
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
    if (rules.direct && !file.direct()) {
      if (run.cufile != nullptr) return cufile_of(file).error();
      ledger_->note_fallback(file.direct_reason());
    }
  }
  transfer.runs.push_back(std::move(run));
  return Nothing{};
}

Status Conductor::transfer_now(Direction direction, Part part, Durability durability) {
  if (inline_mover_.fits(part) && (part.gpu < 0 || options_.engine != EngineKind::gds)) {
    if (Status checked = check_open(); !checked.ok()) return checked;
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
