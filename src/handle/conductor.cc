#include "handle/conductor.h"

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "handle/trace.h"

namespace tensorferry::handle {

namespace {

// What goes on a lane: little enough that submitting it takes a caller no time to speak of, or more
// if the caller waits anyway; through slots only what the slots of a lane are made for.
constexpr std::uint64_t lane_bytes_max = 256 * KiB;
constexpr std::uint64_t lane_slot_transfer_bytes_max = 64 * KiB;
constexpr std::size_t lane_parts_max = 8;

bool fits_lane(std::span<const Part> parts, Caller caller, os::System& system) {
  if (parts.size() > lane_parts_max) return false;
  std::uint64_t bytes = 0;
  for (const Part& part : parts) {
    if (part.gpu >= 0 || !part.file->direct()) return false;
    if (part.bytes > cut_bytes_max) return false;
    bytes += part.bytes;
    const auto address = reinterpret_cast<std::uintptr_t>(part.memory);
    const bool in_place = address % part.file->memory_alignment() == 0 &&
                          (part.offset | part.bytes) % part.file->offset_alignment() == 0 &&
                          !is_better_in_slots(part, part.bytes, system);
    if (!in_place && part.bytes > lane_slot_transfer_bytes_max) return false;
  }
  return bytes <= (caller == Caller::waits ? cut_bytes_max : lane_bytes_max);
}

}  // namespace

Conductor::Conductor(const HandleOptions& options, os::System& system, OpenEngine open_engine,
                     ProcessLimits& limits)
    : options_(options),
      system_(system),
      open_engine_(std::move(open_engine)),
      limits_(limits),
      generation_(os::fork_generation()),
      rate_(options.rate > 0 ? std::make_shared<Rate>(options.rate) : nullptr),
      inline_mover_(system, ledger_, options.block_bytes, inline_uncut_bytes_max(options),
                    slot_bytes_of(options_, SlotShares::inline_callers), limits) {
  ledger_->on_lost = options.on_lost;
  if (options.priority != Priority::normal || rate_ != nullptr) use_classes();
}

Result<std::unique_ptr<Conductor>> Conductor::create(const HandleOptions& options, Seams seams) {
  if (Status checked = check_options(options); !checked.ok()) return checked.error();
  HandleOptions settled = options;
  if (options.polling != Polling::off) settled.engine = EngineKind::io_uring;
  if (!seams.open_engine && options.polling != Polling::off) {
    seams.open_engine = [polling = options.polling](EngineKind, unsigned depth, os::System&) {
      return engines::open_uring_engine(depth, polling);
    };
  }
  if (!seams.open_engine) seams.open_engine = engines::open_engine;
  os::System& system = seams.system != nullptr ? *seams.system : os::System::real();
  ProcessLimits& limits = seams.limits != nullptr ? *seams.limits : ProcessLimits::of_process();
  std::unique_ptr<Conductor> conductor(
      new Conductor(settled, system, std::move(seams.open_engine), limits));
  // An explicit engine that does not work here is refused now. Threads and rings start with the
  // first operation that is queued: a handle for small transfers stays small.
  if (settled.engine != EngineKind::automatic) {
    if (auto engine = conductor->engine(); !engine.ok()) return engine.error();
  }
  return conductor;
}

Conductor::~Conductor() {
  (void)close(std::nullopt, OpenReads::cancel);
  ledger_->report_lost();
  for (const DeviceCrew* one = crews_; one != nullptr;) delete std::exchange(one, one->older);
}

bool Conductor::close(std::optional<Operation::Clock::time_point> deadline,
                      OpenReads reads) noexcept {
  if (generation_ != os::fork_generation()) return true;
  closed_ = true;
  const std::vector<std::shared_ptr<Crew>> all = crews();
  for (const auto& crew : all) crew->finish(reads);
  // In a callback. Other crews may need this thread too, for operations over several devices.
  if (std::ranges::any_of(all, [](const auto& crew) { return crew->is_this_thread(); })) {
    for (const auto& crew : all) crew->end_alone();
    return true;
  }
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

std::vector<DeviceUse> Conductor::device_use() {
  std::vector<DeviceUse> all;
  if (generation_ != os::fork_generation()) return all;
  for (const DeviceCrew* one = crews_; one != nullptr; one = one->older) {
    const auto is_it = [&](const DeviceUse& use) { return use.number == one->device->number; };
    const bool listed = std::ranges::any_of(all, is_it);
    if (one->role != Role::main || listed) continue;
    const Crew::Use use = one->crew->use();
    all.push_back({one->device->number, use.bytes, use.busy_seconds});
  }
  return all;
}

// --- Crews -----------------------------------------------------------------------------------

std::vector<std::shared_ptr<Crew>> Conductor::crews() {
  const std::lock_guard lock(mutex_);  // one that is being started counts
  std::vector<std::shared_ptr<Crew>> all;
  for (const DeviceCrew* one = crews_; one != nullptr; one = one->older) {
    if (std::ranges::find(all, one->crew) == all.end()) all.push_back(one->crew);
  }
  return all;
}

Crew* Conductor::find_crew(const Device& device, Role role) const noexcept {
  for (const DeviceCrew* one = crews_.load(std::memory_order_acquire); one != nullptr;
       one = one->older) {
    if (one->device == &device && one->role == role) return one->crew.get();
  }
  return nullptr;
}

Crew* Conductor::add_crew(const Device& device, Role role, std::shared_ptr<Crew> crew) {
  const auto* const added = new DeviceCrew{&device, role, std::move(crew), crews_};
  crews_.store(added, std::memory_order_release);
  return added->crew.get();
}

Result<std::shared_ptr<Crew>> Conductor::start_crew(EngineKind kind, std::string reason,
                                                    const Device& device, SlotShares shares) {
  CrewOptions crew = crew_options(options_, kind, device, shares);
  crew.rate = rate_;
  const unsigned workers = crew.workers;
  const unsigned slots = crew.mover.slots;
  ProcessShare share = take_share(crew, options_, limits_);
  const auto note_less = [&](const char* what, unsigned granted, unsigned wanted) {
    if (granted == wanted) return;
    ledger_->note_fallback("the process has all the " + std::string(what) +
                           " it may have: " + device.name + " gets " + std::to_string(granted) +
                           " of " + std::to_string(wanted));
  };
  note_less("workers", crew.workers, workers);
  note_less("memory for slots", crew.mover.slots, slots);
  return Crew::start(crew, std::move(reason), open_engine_, system_, ledger_, std::move(share));
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
    std::string why = "chosen by the caller";
    if (options_.polling != Polling::off) {
      why += ", with polling for " + std::string(to_string(options_.polling));
    }
    if (Status opened = open(options_.engine, std::move(why)); !opened.ok()) return opened.error();
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

Result<std::shared_ptr<Crew>> Conductor::start_main(const Device& device) {
  if (Status checked = check_polling(options_, device); !checked.ok()) return checked.error();
  std::shared_ptr<Crew> main;
  auto chosen = choose_engine(device, [&](EngineKind kind, std::string reason) -> Status {
    auto crew = start_crew(kind, std::move(reason), device, SlotShares::workers);
    if (!crew.ok()) return crew.error();
    main = std::move(crew.value());
    return Nothing{};
  });
  if (!chosen.ok()) return chosen.error();
  const EngineKind first_choice = device.profile && device.profile->engine != EngineKind::automatic
                                      ? device.profile->engine
                                      : EngineKind::io_uring;
  if (automatic() && chosen.value() != first_choice) {
    ledger_->note_fallback(*main->engine_reason());
  }
  return main;
}

Result<Crew*> Conductor::crew_for(const files::OpenFile& file, int gpu) {
  const Role role = gpu >= 0 && engines::moves_gpu_memory(options_.engine) ? Role::gpu
                    : !file.direct() && automatic()                        ? Role::buffered
                                                                           : Role::main;
  const Device& device = file.device();
  if (Crew* const known = find_crew(device, role)) return known;
  const std::lock_guard lock(mutex_);
  if (closed_) return check_open().error();
  for (const DeviceCrew* one = crews_; one != nullptr; one = one->older) {
    if (one->role != role || one->device->number != device.number) continue;
    return one->device == &device ? one->crew.get() : add_crew(device, role, one->crew);
  }
  auto crew =
      role == Role::gpu ? start_crew(options_.engine, gpu_reason(), device, SlotShares::gpu)
      : role == Role::buffered
          ? start_crew(EngineKind::threads,
                       "auto: without O_DIRECT threads move bytes best; " + file.direct_reason(),
                       device, SlotShares::buffered)
          : start_main(device);
  if (!crew.ok()) return crew.error();
  if (role == Role::buffered) ledger_->note_fallback(*crew.value()->engine_reason());
  return add_crew(device, role, std::move(crew.value()));
}

Status Conductor::choose_crews(std::span<Part> parts, Crews& crews) {
  const Part* last = nullptr;
  for (Part& part : parts) {
    if (last != nullptr && last->file == part.file && last->gpu == part.gpu) {
      part.leg = last->leg;
    } else {
      auto crew = crew_for(*part.file, part.gpu);
      if (!crew.ok()) return crew.error();
      const auto known = std::ranges::find(crews, crew.value());
      part.leg = static_cast<std::size_t>(known - crews.begin());
      if (known == crews.end()) crews.push_back(crew.value());
    }
    last = &part;
  }
  return Nothing{};
}

Result<std::pair<EngineKind, std::string>> Conductor::engine() {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  if (engines::moves_gpu_memory(options_.engine)) {
    auto engine = open_engine_(options_.engine, 1, system_);
    if (!engine.ok()) return engine.error();
    return std::pair(options_.engine, gpu_reason());
  }
  // The first that was started.
  const Crew* first = nullptr;
  for (const DeviceCrew* one = crews_; one != nullptr; one = one->older) {
    if (one->role == Role::main) first = one->crew.get();
  }
  if (first != nullptr) return std::pair(first->options().engine, *first->engine_reason());
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
                                      Durability durability, Caller caller,
                                      const std::shared_ptr<Witness>& witness,
                                      std::optional<Priority> priority) {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  for (const Part& part : parts) {
    if (Status checked = check_part(direction, part); !checked.ok()) return checked.error();
  }
  const bool empty = std::ranges::all_of(parts, [](const Part& part) { return part.bytes == 0; });
  if (parts.empty() || (empty && durability == Durability::none && witness == nullptr)) {
    auto nothing = build_empty(direction, ledger_);
    Crew::enqueue(nothing);
    return Operation(std::move(nothing));
  }
  Fences fences;
  if (std::ranges::any_of(parts, [](const Part& part) { return part.gpu >= 0; })) {
    Result<Fences> found = fences_for(parts);
    if (!found.ok()) return found.error();
    fences = std::move(found.value());
  }
  Crews crews;
  if (Status chosen = choose_crews(parts, crews); !chosen.ok()) return chosen.error();
  const Priority chosen = choose_priority(priority, options_.priority);
  const bool on_lane = crews.size() == 1 && crews.front()->options().lanes > 0 &&
                       fits_lane(parts, caller, system_) && !held_back(chosen);
  auto transfer = build_transfer(direction, parts, std::move(fences), durability, options_, crews,
                                 on_lane ? Way::lane : Way::queue, caller, witness);
  if (!transfer.ok()) return transfer.error();
  transfer.value()->set_priority(chosen, options_.priority);
  if (on_lane && crews.front()->take_on_lane(transfer.value())) {
    return Operation(std::move(transfer.value()));
  }
  for (Crew* crew : crews) {
    if (Status started = crew->start_workers(); !started.ok()) return started.error();
  }
  Crew::enqueue(transfer.value());
  return Operation(std::move(transfer.value()));
}

Result<Operation> Conductor::sync(const std::shared_ptr<files::OpenFile>& file,
                                  Durability durability, std::optional<Priority> priority) {
  if (Status checked = check_open(); !checked.ok()) return checked.error();
  auto found = crew_for(*file, -1);
  if (!found.ok()) return found.error();
  Crew& crew = *found.value();
  if (Status started = crew.start_workers(); !started.ok()) return started.error();
  auto transfer = build_sync(file, durability, crew);
  transfer->set_priority(choose_priority(priority, options_.priority), options_.priority);
  Crew::enqueue(transfer);
  return Operation(std::move(transfer));
}

Status Conductor::transfer_now(Direction direction, Part&& part, Durability durability,
                               std::optional<Priority> priority) {
  Priority chosen = Priority::normal;
  const bool by_class = priority.has_value() || classes_in_use();
  if (by_class) [[unlikely]]
    chosen = choose_priority(priority, options_.priority);
  const bool by_gpu_crew = part.gpu >= 0 && engines::moves_gpu_memory(options_.engine);
  const bool by_polling = options_.polling == Polling::completion;
  if (inline_mover_.fits(direction, part) && !by_gpu_crew && !by_polling &&
      !(by_class && held_back(chosen))) {
    if (Status checked = check_open(); !checked.ok()) return checked;
    if (Status checked = check_part(direction, part); !checked.ok()) return checked;
    Fences fences;
    if (part.gpu >= 0) {
      Result<Fences> found = fences_for({&part, 1});
      if (!found.ok()) return found.error();
      fences = std::move(found.value());
    }
    const os::GpuFence* fence = fences.empty() ? nullptr : fences.front().get();
    Operation::Clock::time_point begin;
    if (by_class) [[unlikely]] {
      begin = Operation::Clock::now();
      Governor::of(part.file->device().number).begins(chosen, begin);
    }
    if (auto done = inline_mover_.try_transfer(direction, part, fence, durability)) {
      if (by_class) [[unlikely]] {
        // What a sync takes is no sign that the background is in the way.
        const std::uint64_t judged = durability == Durability::none ? part.bytes : 0;
        Governor::of(part.file->device().number)
            .ended(chosen, direction, judged, begin, Operation::Clock::now());
      }
      return *done;
    }
  }
  Result<Operation> operation =
      transfer(direction, {&part, 1}, durability, Caller::waits, no_witness, chosen);
  if (!operation.ok()) return operation.error();
  std::optional<PriorityScope> scope;  // waiting does not raise what the caller chose
  if (by_class) [[unlikely]]
    scope.emplace(chosen);
  try {
    operation.value().wait();
  } catch (const Error& error) {
    return error;
  }
  return Nothing{};
}

}  // namespace tensorferry::handle
