// The public door: Handle and Operation, where errors become exceptions.
#include "tensorferry/handle.h"

#include <utility>
#include <vector>

#include "handle/conductor.h"
#include "handle/transfer.h"
#include "os/system.h"

namespace tensorferry {

using handle::Conductor;
using handle::Direction;
using handle::Part;
using handle::part_of;

Handle::Handle(const HandleOptions& options) : Handle(Conductor::create(options, {}).or_throw()) {}
Handle::Handle(std::unique_ptr<Conductor> conductor)
    : conductor_(conductor.release(), os::DeleteOwn{}) {}
Handle::~Handle() = default;
Handle::Handle(Handle&&) noexcept = default;
Handle& Handle::operator=(Handle&&) noexcept = default;

Operation Handle::read(std::span<std::byte> memory, const File& file, std::uint64_t offset,
                       CudaStream stream, std::optional<Priority> priority) {
  Part part = part_of(memory, file, offset, stream);
  return conductor_
      ->transfer(Direction::read, {&part, 1}, Durability::none, handle::Caller::goes_on,
                 handle::no_witness, priority)
      .or_throw();
}

Operation Handle::read(std::span<std::byte> memory, const std::string& path, std::uint64_t offset,
                       CudaStream stream, std::optional<Priority> priority) {
  return read(memory, files::open(conductor_->system(), path, Access::read), offset, stream,
              priority);
}

Operation Handle::write(std::span<const std::byte> memory, const File& file, std::uint64_t offset,
                        Durability durability, CudaStream stream,
                        std::optional<Priority> priority) {
  Part part = part_of(memory, file, offset, stream);
  return conductor_
      ->transfer(Direction::write, {&part, 1}, durability, handle::Caller::goes_on,
                 handle::no_witness, priority)
      .or_throw();
}

Operation Handle::write(std::span<const std::byte> memory, const std::string& path,
                        std::uint64_t offset, Durability durability, CudaStream stream,
                        std::optional<Priority> priority) {
  return write(memory, files::open(conductor_->system(), path, Access::write), offset, durability,
               stream, priority);
}

Operation Handle::read_many(std::span<const ReadTransfer> transfers,
                            std::optional<Priority> priority) {
  std::vector<Part> parts;
  parts.reserve(transfers.size());
  for (const auto& one : transfers)
    parts.push_back(part_of(one.memory, one.file, one.offset, one.stream));
  return conductor_
      ->transfer(Direction::read, parts, Durability::none, handle::Caller::goes_on,
                 handle::no_witness, priority)
      .or_throw();
}

Operation Handle::write_many(std::span<const WriteTransfer> transfers, Durability durability,
                             std::optional<Priority> priority) {
  std::vector<Part> parts;
  parts.reserve(transfers.size());
  for (const auto& one : transfers)
    parts.push_back(part_of(one.memory, one.file, one.offset, one.stream));
  return conductor_
      ->transfer(Direction::write, parts, durability, handle::Caller::goes_on, handle::no_witness,
                 priority)
      .or_throw();
}

void Handle::read_now(std::span<std::byte> memory, const File& file, std::uint64_t offset,
                      CudaStream stream, std::optional<Priority> priority) {
  conductor_
      ->transfer_now(Direction::read, part_of(memory, file, offset, stream), Durability::none,
                     priority)
      .or_throw();
}

void Handle::read_now(std::span<std::byte> memory, const std::string& path, std::uint64_t offset,
                      CudaStream stream, std::optional<Priority> priority) {
  read_now(memory, files::open(conductor_->system(), path, Access::read), offset, stream, priority);
}

void Handle::write_now(std::span<const std::byte> memory, const File& file, std::uint64_t offset,
                       Durability durability, CudaStream stream, std::optional<Priority> priority) {
  conductor_
      ->transfer_now(Direction::write, part_of(memory, file, offset, stream), durability, priority)
      .or_throw();
}

void Handle::write_now(std::span<const std::byte> memory, const std::string& path,
                       std::uint64_t offset, Durability durability, CudaStream stream,
                       std::optional<Priority> priority) {
  write_now(memory, files::open(conductor_->system(), path, Access::write), offset, durability,
            stream, priority);
}

Operation Handle::sync(const File& file, Durability durability, std::optional<Priority> priority) {
  return conductor_->sync(file.opened(), durability, priority).or_throw();
}

void Handle::close(OpenReads reads) {
  (void)conductor_->close(std::nullopt, reads);
  if (const auto lost = conductor_->take_lost()) throw Error(*lost);
}

bool Handle::close_until(Clock::time_point deadline, OpenReads reads) {
  if (!conductor_->close(deadline, reads)) return false;
  if (const auto lost = conductor_->take_lost()) throw Error(*lost);
  return true;
}

void Handle::cancel_all() noexcept { conductor_->cancel_all(); }

const HandleOptions& Handle::options() const noexcept { return conductor_->options(); }
std::string_view Handle::engine() const { return to_string(conductor_->engine().or_throw().first); }

std::string Handle::engine_reason() const { return conductor_->engine().or_throw().second; }

Stats Handle::stats() const { return conductor_->stats(); }

void Operation::wait() const {
  (void)transfer_->wait_until(std::nullopt);
  if (auto failed = transfer_->error()) throw Error(*failed);
}

bool Operation::wait_until(Clock::time_point deadline) const {
  if (!transfer_->wait_until(deadline)) return false;
  if (auto failed = transfer_->error()) throw Error(*failed);
  return true;
}

void Operation::when_done(std::function<void()> then) const {
  transfer_->when_done(std::move(then));
}

bool Operation::done() const noexcept { return transfer_->done(); }
void Operation::cancel() const noexcept { transfer_->cancel("cancelled by the caller"); }
std::optional<Error> Operation::error() const { return transfer_->error(); }
std::uint64_t Operation::bytes() const noexcept { return transfer_->bytes(); }
Operation::Timing Operation::timing() const { return transfer_->timing(); }
std::string_view Operation::engine() const noexcept { return transfer_->engine_name; }

const std::string& Operation::engine_reason() const noexcept { return *transfer_->engine_reason; }

namespace handle {

Handle make_handle(const HandleOptions& options, Seams seams) {
  return Handle(Conductor::create(options, std::move(seams)).or_throw());
}

}  // namespace handle

}  // namespace tensorferry
