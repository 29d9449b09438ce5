// Builds transfers from what users ask for: checks the parts, plans their blocks, finds what they
// wait for and which files they make longer. Owns nothing and queues nothing.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/one_or_many.h"
#include "base/result.h"
#include "files/open_file.h"
#include "handle/crew.h"
#include "handle/part.h"
#include "handle/transfer.h"
#include "os/gpu_stream.h"
#include "tensorferry/file.h"
#include "tensorferry/options.h"

namespace tensorferry::handle {

using Fences = std::vector<std::shared_ptr<os::GpuFence>>;

// The part for a user's memory; finds the GPU that has it.
[[nodiscard]] Part part_of(std::span<const std::byte> memory, const File& file,
                           std::uint64_t offset, CudaStream stream = {});

// Refuses a part that can never be transferred: the wrong access, no memory, an offset out of
// range.
[[nodiscard]] Status check_part(Direction direction, const Part& part);

// Whether the drive would handle `bytes` of memory from the beginning of a part page by page: then
// they go through slots.
[[nodiscard]] bool is_better_in_slots(const Part& part, std::uint64_t bytes, os::System& system);

// Fences behind the work that users have queued on the streams of these parts.
[[nodiscard]] Result<Fences> fences_for(std::span<const Part> parts);

// How a transfer is going to be carried out. A transfer that was built for a lane may be queued
// all the same.
enum class Way : std::uint8_t { queue, lane };

// The caller keeps them.
using Crews = OneOrMany<Crew*>;

// Builds the transfer of all `parts`, each by the crew of its leg. Reorders the parts. Opens second
// descriptors and makes files longer if the transfer needs it; refuses writes that overlap each
// other.
[[nodiscard]] Result<std::shared_ptr<Transfer>> build_transfer(
    Direction direction, std::span<Part> parts, Fences&& fences, Durability durability,
    const HandleOptions& options, const Crews& crews, Way way, Caller caller,
    const std::shared_ptr<Witness>& witness);

// Builds a transfer that moves nothing and makes `file` durable.
[[nodiscard]] std::shared_ptr<Transfer> build_sync(const std::shared_ptr<files::OpenFile>& file,
                                                   Durability durability, Crew& crew);

// Builds a transfer that has nothing to do.
[[nodiscard]] std::shared_ptr<Transfer> build_empty(Direction direction,
                                                    const std::shared_ptr<Ledger>& ledger);

}  // namespace tensorferry::handle
