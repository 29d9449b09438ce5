#include "engines/engine.h"

#include <cerrno>
#include <utility>

#include "engines/cufile.h"
#include "tensorferry/gds.h"

namespace tensorferry::engines {

const char* verb(RequestKind kind) noexcept {
  switch (kind) {
    case RequestKind::read:
      return "read";
    case RequestKind::write:
      return "write";
    case RequestKind::sync_data:
      return "fdatasync";
    case RequestKind::sync_full:
      break;
  }
  return "fsync";
}

int Engine::register_buffer(unsigned, std::span<std::byte>) { return -EOPNOTSUPP; }
int Engine::share_buffer(unsigned index, std::span<std::byte> memory, std::uint64_t) {
  return register_buffer(index, memory);
}
void Engine::unregister_buffer(unsigned) noexcept {}
int Engine::register_file(unsigned, int) { return -EOPNOTSUPP; }
void Engine::unregister_file(unsigned) noexcept {}

bool moves_gpu_memory(EngineKind kind) noexcept { return kind == EngineKind::gds; }

std::string gpu_path(EngineKind kind) {
  return moves_gpu_memory(kind) ? gds_support().reason : std::string();
}

Result<std::shared_ptr<const GpuFile>> open_gpu_file(EngineKind kind, int fd) {
  const auto refuse = [](int code, std::string why) {
    return Error({.operation = use_gds, .code = code, .hint = std::move(why)});
  };
  if (!moves_gpu_memory(kind)) return refuse(EINVAL, "the engine moves no memory of GPUs");
  if (fd < 0) return refuse(EOPNOTSUPP, "cuFile needs a file with O_DIRECT");
  auto opened = GpuFile::of(fd);
  if (opened.ok()) return std::shared_ptr<const GpuFile>(std::move(opened.value()));
  const Error& error = opened.error();
  const bool named = error.operation() == use_gds;
  return refuse(error.code(), named ? error.hint() : error.operation() + ": " + error.hint());
}

std::optional<OwnCode> own_code(int code) {
  if (code <= cufile_codes_begin) return std::nullopt;
  return OwnCode{cufile_errno(code), cufile_text(code)};
}

Result<std::unique_ptr<Engine>> open_engine(EngineKind kind, unsigned depth, os::System& system) {
  switch (kind) {
    case EngineKind::io_uring:
      return open_uring_engine(depth, Polling::off);
    case EngineKind::libaio:
      return open_libaio_engine(depth);
    case EngineKind::gds:
      return open_gds_engine(depth, system);
    case EngineKind::threads:
    case EngineKind::automatic:
      break;
  }
  return open_threads_engine(depth, system);
}

}  // namespace tensorferry::engines
