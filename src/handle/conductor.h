// Turns what users ask into transfers: checks it, plans it, chooses the crew, or does it inline.
// Behind every Handle stands one Conductor.
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
#include "handle/plan.h"
#include "handle/settings.h"
#include "tensorferry/handle.h"

namespace tensorferry::handle {

// What tests replace. Empty members mean the real thing.
struct Parts {
  os::System* system = nullptr;
  OpenEngine open_engine;
};

// A Handle over injected parts. Throws like Handle's constructor.
[[nodiscard]] Handle make_handle(const HandleOptions& options, Parts parts);

// Thread-safe. Destroyed only by the process that made it (os::DeleteOwn): a forked child has
// neither its workers nor its rings.
class Conductor {
 public:
  [[nodiscard]] static Result<std::unique_ptr<Conductor>> create(const HandleOptions& options,
                                                                 Parts parts);
  ~Conductor();
  Conductor(const Conductor&) = delete;
  Conductor& operator=(const Conductor&) = delete;

  // Queues one operation of all `parts`, which it may reorder.
  [[nodiscard]] Result<Operation> transfer(Direction direction, std::span<Part> parts,
                                           Durability durability);
  // Returns when done: inline where it is small, else queued and waited for.
  [[nodiscard]] Status transfer_now(Direction direction, Part part, Durability durability);
  [[nodiscard]] Result<Operation> sync(const std::shared_ptr<files::OpenFile>& file,
                                       Durability durability);

  // Takes nothing new and ends all crews (see Crew::finish). False when the deadline passes first.
  [[nodiscard]] bool close(std::optional<Operation::Clock::time_point> deadline,
                           OpenReads reads) noexcept;
  void cancel_all() noexcept;
  // What was lost and nobody has been told, if anything.
  [[nodiscard]] std::optional<Error> take_lost() {
    return generation_ == os::fork_generation() ? ledger_->take_lost() : std::nullopt;
  }

  [[nodiscard]] const HandleOptions& options() const noexcept { return options_; }
  [[nodiscard]] os::System& system() noexcept { return system_; }
  // The engine in use, or that would be, and why.
  [[nodiscard]] Result<std::pair<EngineKind, std::string>> engine();
  [[nodiscard]] Stats stats();

 private:
  // A crew, made when the first operation is queued for it.
  struct Team {
    std::shared_ptr<Crew> crew;
    std::shared_ptr<const std::string> reason;
  };

  Conductor(const HandleOptions& options, os::System& system, OpenEngine open_engine);
  [[nodiscard]] Status check(Direction direction, const Part& part) const;
  // That it is open, in this process.
  [[nodiscard]] Status check_open() const;
  [[nodiscard]] std::vector<std::shared_ptr<Crew>> crews() noexcept;
  void begin_growth(Transfer& transfer) const;
  [[nodiscard]] Result<std::vector<std::shared_ptr<os::GpuFence>>> fences_for(
      std::span<const Part> parts) const;
  [[nodiscard]] Limits limits_for(const files::OpenFile& file, files::Pages pages,
                                  const Crew& crew) const noexcept;
  [[nodiscard]] Result<Team*> main_team(const Device& device);
  [[nodiscard]] Result<Team*> team_for(const files::OpenFile& file);
  [[nodiscard]] Result<Team*> gds_team(const files::OpenFile& file);
  [[nodiscard]] bool automatic() const noexcept;
  // Tries to open the engine of the user's choice, or the one of the device's profile, or those of
  // `auto` in their order, with `open`.
  template <class Open>
  [[nodiscard]] auto choose_engine(const Device& device, Open open)
      -> Result<std::pair<EngineKind, std::string>>;
  [[nodiscard]] Result<std::shared_ptr<Crew>> start_crew(EngineKind kind, const Device& device,
                                                         SlotShares shares);
  [[nodiscard]] Status add_runs(Transfer& transfer, std::span<Part> parts, const Crew& crew) const;
  [[nodiscard]] Status add_run(Transfer& transfer, std::span<const Piece> pieces, const Part& first,
                               std::shared_ptr<memory::Region> region, const Crew& crew,
                               const Limits& limits) const;
  [[nodiscard]] Result<Operation> launch(std::shared_ptr<Transfer> transfer, Team& team);

  const HandleOptions options_;
  os::System& system_;
  const OpenEngine open_engine_;
  const std::uint64_t generation_;
  const std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();

  InlineMover inline_mover_;

  std::atomic<bool> closed_{false};

  std::mutex mutex_;  // guards the teams
  Team main_;
  Team buffered_;  // for files without O_DIRECT, where `auto` chooses
  Team gds_;       // for memory of GPUs, with the engine `gds`
};

}  // namespace tensorferry::handle
