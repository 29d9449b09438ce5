#include "handle/conductor.h"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "handle/trace.h"
#include "handle/transfer_builder.h"

namespace tensorferry::handle {

Conductor::Conductor(const HandleOptions& options, os::System& system, OpenEngine open_engine)
    : options_(options),
      system_(system),
      open_engine_(std::move(open_engine)),
      generation_(os::fork_generation()),
      inline_mover_(system, ledger_, options.block_bytes, inline_slot_bytes_max(options),
                    slot_bytes_of(options_, SlotShares::inline_callers)) {
  ledger_->on_lost = options.on_lost;
}

Result<std::unique_ptr<Conductor>> Conductor::create(const HandleOptions& options, Seams seams) {
  if (Status checked = check_options(options); !checked.ok()) return checked.error();
  if (!seams.open_engine) seams.open_engine = engines::open_engine;
  os::System& system = seams.system != nullptr ? *seams.system : os::System::real();
  std::unique_ptr<Conductor> conductor(
      new Conductor(options, system, std::move(seams.open_engine)));
  // An explicit engine that does not work here is refused now. Threads and rings start with the
  // first operation that is queued: a handle for small transfers stays small.
  if (options.engine != EngineKind::automatic) {
    if (auto engine = conductor->engine(); !engine.ok()) return engine.error();
  }
  return conductor;
}

Conductor::~Conductor() {
  (void)close(std::nullopt, OpenReads::cancel);
  ledger_->report_lost();
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

Stats Conductor::stats() {
  Stats stats = ledger_->stats();
  if (generation_ != os::fork_generation()) return stats;
  if (std::string problem = Trace::problem(); !problem.empty()) {
    ++stats.fallbacks;
    stats.fallback_reasons.push_back(std::move(problem));
  }
  for (const auto& crew : crews()) stats.cpu_seconds += crew->cpu_seconds();
  return stats;
}

// --- Crews -----------------------------------------------------------------------------------

std::vector<std::shared_ptr<Crew>> Conductor::crews() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Crew>> all;
  for (const auto* crew : {&main_, &buffered_, &gpu_}) {
    if (*crew != nullptr) all.push_back(*crew);
  }
  return all;
}

Result<std::shared_ptr<Crew>> Conductor::start_crew(EngineKind kind, std::string reason,
                                                    const Device& device, SlotShares shares) {
  return Crew::start(crew_options(options_, kind, device, shares), std::move(reason), open_engine_,
                     system_, ledger_);
}

bool Conductor::automatic() const noexcept {
  return options_.engine == EngineKind::automatic || engines::moves_gpu_memory(options_.engine);
}

std::string Conductor::gpu_reason() const {
  return "chosen by the caller, for memory of GPUs; " + engines::gpu_path(options_.engine);
}

template <class Open>
Result<EngineKind> Conductor::choose_engine(const Device& device, Open open) {
  if (!automatic()) {
    if (Status opened = open(options_.engine, "chosen by the caller"); !opened.ok()) {
      return opened.error();
    }
    return options_.engine;
  }
  std::string refusals;
  if (!device.profile_problem.empty()) refusals = device.profile_problem + "; ";
  if (device.profile && device.profile->engine != EngineKind::automatic) {
    const Status opened = open(device.profile->engine, "auto: chosen by the profile of " +
                                                           device.name + ", which tune made");
    if (opened.ok()) return device.profile->engine;
    refusals += std::string(opened.error().what()) + "; ";
  }
  for (const EngineKind kind : {EngineKind::io_uring, EngineKind::libaio}) {
    const Status opened = open(
        kind, refusals.empty() ? "auto: io_uring is the first choice and works here"
                               : "auto: " + refusals + "using " + std::string(to_string(kind)));
    if (opened.ok()) return kind;
    refusals += std::string(opened.error().what()) + "; ";
  }
  if (Status opened = open(EngineKind::threads, "auto: " + refusals + "using threads");
      !opened.ok()) {
    return opened.error();
  }
  return EngineKind::threads;
}

Result<std::shared_ptr<Crew>> Conductor::main_crew(const Device& device) {
  const std::lock_guard lock(mutex_);
  if (main_ != nullptr) return main_;
  auto chosen = choose_engine(device, [&](EngineKind kind, std::string reason) -> Status {
    auto crew = start_crew(kind, std::move(reason), device, SlotShares::workers);
    if (!crew.ok()) return crew.error();
    main_ = std::move(crew.value());
    return Nothing{};
  });
  if (!chosen.ok()) return chosen.error();
  const EngineKind first_choice = device.profile && device.profile->engine != EngineKind::automatic
                                      ? device.profile->engine
                                      : EngineKind::io_uring;
  if (automatic() && chosen.value() != first_choice) {
    ledger_->note_fallback(*main_->engine_reason());
  }
  return main_;
}

Result<std::shared_ptr<Crew>> Conductor::gpu_crew(const files::OpenFile& file) {
  const std::lock_guard lock(mutex_);
  if (gpu_ == nullptr) {
    auto crew = start_crew(options_.engine, gpu_reason(), file.device(), SlotShares::gpu);
    if (!crew.ok()) return crew.error();
    gpu_ = std::move(crew.value());
  }
  return gpu_;
}

Result<std::shared_ptr<Crew>> Conductor::crew_for(const files::OpenFile& file) {
  auto main = main_crew(file.device());
  if (!main.ok() || file.direct() || !automatic() ||
      main.value()->options().engine == EngineKind::threads) {
    return main;
  }
  const std::lock_guard lock(mutex_);
  if (buffered_ == nullptr) {
    auto crew =
        start_crew(EngineKind::threads,
                   "auto: without O_DIRECT threads move bytes best; " + file.direct_reason(),
                   file.device(), SlotShares::buffered);
    if (!crew.ok()) return crew.error();
    buffered_ = std::move(crew.value());
    ledger_->note_fallback(*buffered_->engine_reason());
  }
  return buffered_;
}

Result<std::pair<EngineKind, std::string>> Conductor::engine() {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  if (engines::moves_gpu_memory(options_.engine)) {
    auto engine = open_engine_(options_.engine, 1, system_);
    if (!engine.ok()) return engine.error();
    return std::pair(options_.engine, gpu_reason());
  }
  {
    const std::lock_guard lock(mutex_);
    if (main_ != nullptr) return std::pair(main_->options().engine, *main_->engine_reason());
  }
  std::string why;
  auto chosen = choose_engine(Device{}, [&](EngineKind kind, std::string reason) -> Status {
    auto engine = open_engine_(kind, std::max(options_.queue_depth, 1U), system_);
    if (!engine.ok()) return engine.error();
    why = std::move(reason);
    return Nothing{};
  });
  if (!chosen.ok()) return chosen.error();
  return std::pair(chosen.value(), why);
}

// --- Operations ------------------------------------------------------------------------------

Result<Operation> Conductor::transfer(Direction direction, std::span<Part> parts,
                                      Durability durability) {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  for (const Part& part : parts) {
    if (Status checked = check_part(direction, part); !checked.ok()) return checked.error();
  }
  Result<Fences> fences = fences_for(parts);
  if (!fences.ok()) return fences.error();
  const bool by_gpu_crew =
      engines::moves_gpu_memory(options_.engine) &&
      std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.gpu >= 0; });
  auto crew = parts.empty() ? main_crew(Device{})
              : by_gpu_crew ? gpu_crew(*parts.front().file)
                            : crew_for(*parts.front().file);
  if (!crew.ok()) return crew.error();
  auto transfer = build_transfer(direction, parts, std::move(fences.value()), durability, options_,
                                 crew.value());
  if (!transfer.ok()) return transfer.error();
  crew.value()->enqueue(transfer.value());
  return Operation(std::move(transfer.value()));
}

Result<Operation> Conductor::sync(const std::shared_ptr<files::OpenFile>& file,
                                  Durability durability) {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  auto crew = crew_for(*file);
  if (!crew.ok()) return crew.error();
  auto transfer = build_sync(file, durability, crew.value());
  crew.value()->enqueue(transfer);
  return Operation(std::move(transfer));
}

Status Conductor::transfer_now(Direction direction, Part part, Durability durability) {
  const bool by_gpu_crew = part.gpu >= 0 && engines::moves_gpu_memory(options_.engine);
  if (inline_mover_.fits(part) && !by_gpu_crew) {
    if (Status checked = check_open(); !checked.ok()) return checked;
    if (Status checked = check_part(direction, part); !checked.ok()) return checked;
    Result<Fences> fences = fences_for({&part, 1});
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

}  // namespace tensorferry::handle
