// Carries out what users ask of a handle: chooses the crew that does it and queues it there, or
// does it inline. Behind every Handle stands one Conductor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "files/open_file.h"
#include "handle/crew.h"
#include "handle/device_use.h"
#include "handle/inline_mover.h"
#include "handle/ledger.h"
#include "handle/part.h"
#include "handle/settings.h"
#include "handle/transfer_builder.h"
#include "tensorferry/handle.h"

namespace tensorferry::handle {

// What tests replace. An empty member means the real thing.
struct Seams {
  os::System* system = nullptr;
  OpenEngine open_engine;
  ProcessLimits* limits = nullptr;
};

// A Handle whose seams a test has replaced. Throws like Handle's constructor.
[[nodiscard]] Handle make_handle(const HandleOptions& options, Seams seams);

// Thread-safe. Only the process that made it destroys it (os::DeleteOwn): a forked child has
// neither its workers nor its rings.
class Conductor {
 public:
  [[nodiscard]] static Result<std::unique_ptr<Conductor>> create(const HandleOptions& options,
                                                                 Seams seams);
  ~Conductor();
  Conductor(const Conductor&) = delete;
  Conductor& operator=(const Conductor&) = delete;

  // Queues one operation of all `parts`. Reorders them. The witness, if any, sees their bytes.
  [[nodiscard]] Result<Operation> transfer(Direction direction, std::span<Part> parts,
                                           Durability durability, Caller caller = Caller::goes_on,
                                           const std::shared_ptr<Witness>& witness = no_witness,
                                           std::optional<Priority> priority = {});
  // Returns when done. Moves a small part inline, queues any other and waits for it.
  [[nodiscard]] Status transfer_now(Direction direction, Part&& part, Durability durability,
                                    std::optional<Priority> priority = {});
  [[nodiscard]] Result<Operation> sync(const std::shared_ptr<files::OpenFile>& file,
                                       Durability durability,
                                       std::optional<Priority> priority = {});

  // Refuses new operations and ends all crews (see Crew::finish). Returns false if the deadline
  // passes first.
  [[nodiscard]] bool close(std::optional<Operation::Clock::time_point> deadline,
                           OpenReads reads) noexcept;
  void cancel_all() noexcept;
  // The first loss that nobody has been told of.
  [[nodiscard]] std::optional<Error> take_lost() {
    return generation_ == os::fork_generation() ? ledger_->take_lost() : std::nullopt;
  }

  [[nodiscard]] const HandleOptions& options() const noexcept { return options_; }
  [[nodiscard]] os::System& system() noexcept { return system_; }
  // The engine in use, or the one that would be used, and why.
  [[nodiscard]] Result<std::pair<EngineKind, std::string>> engine();
  [[nodiscard]] Stats stats();
  // What has been done on each device. Small operations count after the first call.
  [[nodiscard]] std::vector<DeviceUse> device_use();

 private:
  Conductor(const HandleOptions& options, os::System& system, OpenEngine open_engine,
            ProcessLimits& limits);
  // Refuses a closed handle, and one of the parent in a forked child.
  [[nodiscard]] Status check_open() const;
  [[nodiscard]] std::vector<std::shared_ptr<Crew>> crews();
  // The crew that moves the part; starts it at the first call. It lives as long as the conductor.
  [[nodiscard]] Result<Crew*> crew_for(const files::OpenFile& file, int gpu);
  [[nodiscard]] Result<std::shared_ptr<Crew>> start_main(const Device& device);
  // Chooses the crew of each part and numbers their legs. Starts crews.
  [[nodiscard]] Status choose_crews(std::span<Part> parts, Crews& crews);
  // Whether `auto` chooses the engine for memory of the CPU.
  [[nodiscard]] bool automatic() const noexcept;
  // Calls open(kind, reason) for the user's choice; or for the profile's and then for those of
  // `auto`, in their order, until one succeeds. Returns the kind that did.
  template <class Open>
  [[nodiscard]] Result<EngineKind> choose_engine(const Device& device, Open open);
  [[nodiscard]] Result<std::shared_ptr<Crew>> start_crew(EngineKind kind, std::string reason,
                                                         const Device& device, SlotShares shares);
  [[nodiscard]] std::string gpu_reason() const;
  // Whether operations of this class may have to wait although the drive is free: they are queued,
  // however small.
  [[nodiscard]] bool held_back(Priority priority) const noexcept {
    return classes_in_use() &&
           (priority == Priority::background || rate_ != nullptr || Rate::of(priority).limits());
  }

  const HandleOptions options_;
  os::System& system_;
  const OpenEngine open_engine_;
  ProcessLimits& limits_;
  const std::uint64_t generation_;
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  const std::shared_ptr<Rate> rate_;  // nullptr: no limit

  InlineMover inline_mover_;

  std::atomic<bool> closed_{false};

  // `buffered`: for files without O_DIRECT, if `auto` chooses the engine. `gpu`: for memory of
  // GPUs, if the user chose an engine that moves it.
  enum class Role : std::uint8_t { main, buffered, gpu };
  // The crew of a device. Devices with one number share it: they are parts of one disk.
  struct DeviceCrew {
    const Device* device;
    Role role;
    std::shared_ptr<Crew> crew;
    const DeviceCrew* older;
  };
  // nullptr if there is none.
  [[nodiscard]] Crew* find_crew(const Device& device, Role role) const noexcept;
  Crew* add_crew(const Device& device, Role role, std::shared_ptr<Crew> crew);

  std::mutex mutex_;  // held to start crews
  // Newest first. Entries never change and live as long as the conductor: reading takes no lock.
  std::atomic<const DeviceCrew*> crews_{nullptr};
};

}  // namespace tensorferry::handle
