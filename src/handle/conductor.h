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
#include "handle/inline_mover.h"
#include "handle/ledger.h"
#include "handle/part.h"
#include "handle/settings.h"
#include "tensorferry/handle.h"

namespace tensorferry::handle {

// What tests replace. An empty member means the real thing.
struct Seams {
  os::System* system = nullptr;
  OpenEngine open_engine;
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

  // Queues one operation of all `parts`. Reorders them.
  [[nodiscard]] Result<Operation> transfer(Direction direction, std::span<Part> parts,
                                           Durability durability);
  // Returns when done. Moves a small part inline, queues any other and waits for it.
  [[nodiscard]] Status transfer_now(Direction direction, Part part, Durability durability);
  [[nodiscard]] Result<Operation> sync(const std::shared_ptr<files::OpenFile>& file,
                                       Durability durability);

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

 private:
  Conductor(const HandleOptions& options, os::System& system, OpenEngine open_engine);
  // Refuses a closed handle, and one of the parent in a forked child.
  [[nodiscard]] Status check_open() const;
  [[nodiscard]] std::vector<std::shared_ptr<Crew>> crews();
  // Each starts its crew at the first call.
  [[nodiscard]] Result<std::shared_ptr<Crew>> main_crew(const Device& device);
  [[nodiscard]] Result<std::shared_ptr<Crew>> gpu_crew(const files::OpenFile& file);
  [[nodiscard]] Result<std::shared_ptr<Crew>> crew_for(const files::OpenFile& file);
  // Whether `auto` chooses the engine for memory of the CPU.
  [[nodiscard]] bool automatic() const noexcept;
  // Calls open(kind, reason) for the user's choice; or for the profile's and then for those of
  // `auto`, in their order, until one succeeds. Returns the kind that did.
  template <class Open>
  [[nodiscard]] Result<EngineKind> choose_engine(const Device& device, Open open);
  [[nodiscard]] Result<std::shared_ptr<Crew>> start_crew(EngineKind kind, std::string reason,
                                                         const Device& device, SlotShares shares);
  [[nodiscard]] std::string gpu_reason() const;

  const HandleOptions options_;
  os::System& system_;
  const OpenEngine open_engine_;
  const std::uint64_t generation_;
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();

  InlineMover inline_mover_;

  std::atomic<bool> closed_{false};

  std::mutex mutex_;  // guards the crews
  std::shared_ptr<Crew> main_;
  std::shared_ptr<Crew> buffered_;  // for files without O_DIRECT, if `auto` chooses
  std::shared_ptr<Crew> gpu_;       // for memory of GPUs, if the user chose an engine that moves it
};

}  // namespace tensorferry::handle
