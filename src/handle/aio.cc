#include "tensorferry/aio.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "base/alignment.h"
#include "files/open_file.h"
#include "memory/any_copy.h"
#include "os/system.h"
#include "tensorferry/gpu.h"
#include "tensorferry/handle.h"

namespace tensorferry {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t validate_chunk_bytes = MiB;
// For the user alone, as DeepSpeed does it.
constexpr unsigned permissions = 0600;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

HandleOptions one_off(std::size_t block_size, unsigned queue_depth, bool single_submit,
                      bool overlap_events) {
  // Zero means "choose" in HandleOptions and makes no sense here.
  if (block_size == 0 || queue_depth == 0) {
    throw Error({.operation = "set up",
                 .code = EINVAL,
                 .hint = block_size == 0 ? "block_size is 0; 1048576 suits most drives"
                                         : "queue_depth is 0; 128 suits most drives"});
  }
  return {.block_bytes = block_size,
          .queue_depth = queue_depth,
          .workers = 1,
          .submit = single_submit ? Submit::single : Submit::batch,
          .overlap = overlap_events ? Overlap::on : Overlap::off};
}

Error differs(const std::string& path, std::uint64_t offset, std::size_t bytes, std::string hint) {
  return Error({.operation = "validate",
                .path = path,
                .offset = offset,
                .length = bytes,
                .code = EBADMSG,
                .hint = std::move(hint)});
}

}  // namespace

int aio_read(std::span<std::byte> buffer, const std::string& filename, std::size_t block_size,
             unsigned queue_depth, bool single_submit, bool overlap_events, bool validate,
             AioElapsed* elapsed) {
  const Clock::time_point start = Clock::now();
  Handle handle(one_off(block_size, queue_depth, single_submit, overlap_events));
  const File file = File::open(filename, Access::read);
  if (const std::uint64_t size = file.size(); size != buffer.size()) {
    throw Error({.operation = "read",
                 .path = filename,
                 .offset = 0,
                 .length = buffer.size(),
                 .code = EINVAL,
                 .hint = "the file holds " + std::to_string(size) + " bytes and the buffer " +
                         std::to_string(buffer.size()) +
                         "; they must be equal; use Handle.read() for a part of a file"});
  }
  handle.read_now(buffer, file);
  if (elapsed != nullptr) elapsed->transfer_us = us_since(start);
  if (validate) tensorferry::validate(buffer, filename);
  if (elapsed != nullptr) elapsed->call_us = us_since(start);
  return 0;
}

int aio_write(std::span<const std::byte> buffer, const std::string& filename,
              std::size_t block_size, unsigned queue_depth, bool single_submit, bool overlap_events,
              bool validate, AioElapsed* elapsed) {
  const Clock::time_point start = Clock::now();
  Handle handle(one_off(block_size, queue_depth, single_submit, overlap_events));
  File file = File::open(filename, Access::write, permissions);
  handle.write_now(buffer, file);
  if (file.size() > buffer.size()) file.resize(buffer.size());
  if (elapsed != nullptr) elapsed->transfer_us = us_since(start);
  if (validate) tensorferry::validate(buffer, filename);
  if (elapsed != nullptr) elapsed->call_us = us_since(start);
  return 0;
}

void validate(std::span<const std::byte> memory, const std::string& path, std::uint64_t offset,
              CudaStream stream) {
  os::System& system = os::System::real();
  const File file = files::open(system, path, Access::read);
  const int fd = file.opened()->buffered_fd().or_throw();
  std::vector<std::byte> chunk(std::min(memory.size(), validate_chunk_bytes));
  std::vector<std::byte> from_gpu(is_on_gpu(memory) ? chunk.size() : 0);
  memory::wait_for(memory::work_before(memory, stream).or_throw()).or_throw();
  for (std::size_t at = 0; at < memory.size();) {
    const std::size_t wanted = std::min(chunk.size(), memory.size() - at);
    const ssize_t got = system.pread(fd, chunk.data(), wanted, offset + at);
    if (got == -EINTR) continue;
    if (got < 0) {
      throw Error({.operation = "validate",
                   .path = path,
                   .offset = offset + at,
                   .length = wanted,
                   .code = static_cast<int>(-got),
                   .hint = "the ordinary read failed"});
    }
    const auto bytes = static_cast<std::size_t>(got);
    const std::byte* expected = memory.data() + at;
    if (!from_gpu.empty()) {
      memory::copy_any({from_gpu.data(), bytes}, {expected, bytes}).or_throw();
      expected = from_gpu.data();
    }
    if (std::memcmp(expected, chunk.data(), bytes) != 0) {
      const auto first = std::mismatch(expected, expected + bytes, chunk.data()).first;
      throw differs(path, offset + at + static_cast<std::uint64_t>(first - expected), memory.size(),
                    "memory and file differ from this offset on");
    }
    if (bytes == 0) throw differs(path, offset + at, memory.size(), "the file ends here");
    at += bytes;
  }
}

}  // namespace tensorferry
