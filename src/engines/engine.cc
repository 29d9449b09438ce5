#include "engines/engine.h"

#include <cerrno>

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
void Engine::unregister_buffer(unsigned) noexcept {}
int Engine::register_file(unsigned, int) { return -EOPNOTSUPP; }
void Engine::unregister_file(unsigned) noexcept {}

Result<std::unique_ptr<Engine>> open_engine(EngineKind kind, unsigned depth, os::System& system) {
  switch (kind) {
    case EngineKind::io_uring:
      return open_uring_engine(depth);
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
