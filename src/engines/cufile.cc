#include "engines/cufile.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "os/cuda.h"
#include "os/environment.h"
#include "os/fork_mutex.h"
#include "os/library.h"
#include "os/system.h"
#include "tensorferry/gds.h"

namespace tensorferry::engines {

namespace {

// The parts of NVIDIA's cufile.h that are used here.
struct CufileError {
  int code = 0;
  int cuda_code = 0;
};

struct CufileDescription {
  int type = 1;  // a descriptor
  union {
    int fd;
    void* other;
  } handle{};
  const void* operations = nullptr;
};

struct Library {
  CufileError (*driver_open)();
  CufileError (*handle_register)(void** handle, CufileDescription* description);
  void (*handle_deregister)(void* handle);
  CufileError (*buffer_register)(const void* memory, std::size_t bytes, int flags);
  CufileError (*buffer_deregister)(const void* memory);
  ssize_t (*read)(void* handle, void* base, std::size_t bytes, off_t file_offset, off_t offset);
  ssize_t (*write)(void* handle, const void* base, std::size_t bytes, off_t file_offset,
                   off_t offset);
};

constexpr const char* library_name = "libcufile.so.0";

struct Name {
  int code;
  const char* text;
  int error;
  const char* advice;
};

constexpr std::array names{
    Name{5001, "CU_FILE_DRIVER_NOT_INITIALIZED", ENODEV, ""},
    Name{5002, "CU_FILE_DRIVER_INVALID_PROPS", EINVAL, "check cufile.json"},
    Name{5003, "CU_FILE_DRIVER_UNSUPPORTED_LIMIT", EINVAL, "check cufile.json"},
    Name{5004, "CU_FILE_DRIVER_VERSION_MISMATCH", ENOTSUP,
         "install matching versions of nvidia-fs and libcufile"},
    Name{5005, "CU_FILE_DRIVER_VERSION_READ_ERROR", EIO, ""},
    Name{5006, "CU_FILE_DRIVER_CLOSING", ESHUTDOWN, ""},
    Name{5007, "CU_FILE_PLATFORM_NOT_SUPPORTED", ENOTSUP, ""},
    Name{5008, "CU_FILE_IO_NOT_SUPPORTED", ENOTSUP, "cuFile does not support this file system"},
    Name{5009, "CU_FILE_DEVICE_NOT_SUPPORTED", ENOTSUP, "cuFile does not support this GPU"},
    Name{5010, "CU_FILE_NVFS_DRIVER_ERROR", EIO, "see dmesg"},
    Name{5011, "CU_FILE_CUDA_DRIVER_ERROR", EIO, ""},
    Name{5012, "CU_FILE_CUDA_POINTER_INVALID", EFAULT, ""},
    Name{5013, "CU_FILE_CUDA_MEMORY_TYPE_INVALID", EFAULT, ""},
    Name{5014, "CU_FILE_CUDA_POINTER_RANGE_ERROR", EFAULT, "the range is beyond the allocation"},
    Name{5015, "CU_FILE_CUDA_CONTEXT_MISMATCH", EINVAL, ""},
    Name{5016, "CU_FILE_INVALID_MAPPING_SIZE", EINVAL, ""},
    Name{5017, "CU_FILE_INVALID_MAPPING_RANGE", EINVAL, ""},
    Name{5018, "CU_FILE_INVALID_FILE_TYPE", ENOTSUP, "use a regular file or a block device"},
    Name{5019, "CU_FILE_INVALID_FILE_OPEN_FLAG", EINVAL, ""},
    Name{5020, "CU_FILE_DIO_NOT_SET", EINVAL, "the file must be opened with O_DIRECT"},
    Name{5022, "CU_FILE_INVALID_VALUE", EINVAL, ""},
    Name{5023, "CU_FILE_MEMORY_ALREADY_REGISTERED", EEXIST, ""},
    Name{5024, "CU_FILE_MEMORY_NOT_REGISTERED", EINVAL, ""},
    Name{5025, "CU_FILE_PERMISSION_DENIED", EACCES, ""},
    Name{5026, "CU_FILE_DRIVER_ALREADY_OPEN", EALREADY, ""},
    Name{5027, "CU_FILE_HANDLE_NOT_REGISTERED", EBADF, ""},
    Name{5028, "CU_FILE_HANDLE_ALREADY_REGISTERED", EEXIST, ""},
    Name{5029, "CU_FILE_DEVICE_NOT_FOUND", ENODEV, ""},
    Name{5030, "CU_FILE_INTERNAL_ERROR", EIO, "cuFile asks udev for the drive: mount /run/udev"},
    Name{5031, "CU_FILE_GETNEWFD_FAILED", EMFILE, ""},
    Name{5033, "CU_FILE_NVFS_SETUP_ERROR", EIO, ""},
    Name{5034, "CU_FILE_IO_DISABLED", ENOTSUP, "cufile.json forbids it"},
    Name{5035, "CU_FILE_BATCH_SUBMIT_FAILED", EIO, ""},
    Name{5036, "CU_FILE_GPU_MEMORY_PINNING_FAILED", ENOMEM, ""},
    Name{5037, "CU_FILE_BATCH_FULL", EAGAIN, ""},
    Name{5038, "CU_FILE_ASYNC_NOT_SUPPORTED", ENOTSUP, ""},
};

const Name* name_of(int code) noexcept {
  const auto* found =
      std::find_if(names.begin(), names.end(), [&](const Name& name) { return name.code == code; });
  return found != names.end() ? found : nullptr;
}

Error cufile_error(const char* call, CufileError error) {
  return Error(
      {.operation = call, .code = cufile_errno(error.code), .hint = cufile_text(error.code)});
}

// The folders where pip puts libcufile, beside the libraries of CUDA or torch that this process has
// loaded. None for a privileged program: it takes the library from the system's folders alone.
std::vector<std::string> places_of_pip() {
  std::vector<std::string> places;
  if (os::privileged()) return places;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        const std::string name = info->dlpi_name != nullptr ? info->dlpi_name : "";
        const std::size_t slash = name.rfind('/');
        if (!name.starts_with('/')) return 0;  // relative, or the program itself
        const std::string folder = name.substr(0, slash);
        auto& found = *static_cast<std::vector<std::string>*>(data);
        if (name.find("/libcudart.so", slash) != std::string::npos) {
          found.push_back(folder);
          found.push_back(folder + "/../../cufile/lib");
        } else if (name.find("/libc10_cuda.so", slash) != std::string::npos ||
                   name.find("/libtorch_cuda.so", slash) != std::string::npos) {
          found.push_back(folder);
          found.push_back(folder + "/../../nvidia/cufile/lib");
          found.push_back(folder + "/../../nvidia/cu13/lib");
        }
        return 0;
      },
      &places);
  return places;
}

struct Registered {
  void* handle = nullptr;
  unsigned users = 0;
};

struct State {
  std::mutex mutex;  // guards what follows
  std::unique_ptr<const Library> library;
  std::string problem;  // why there is none
  bool opened = false;
  std::uint64_t generation = 0;     // of forks, when it was opened
  std::map<int, Registered> files;  // by descriptor

  std::shared_mutex buffers_mutex;
  std::map<std::byte*, std::size_t> buffers;  // registered, by their first byte

  std::atomic<std::uint64_t> requests{0};
  std::atomic<std::uint64_t> registered_requests{0};
  std::atomic<unsigned> in_flight{0};
  std::atomic<unsigned> in_flight_max{0};
};

// Never destroyed: threads may use it after main() has returned.
State& state() {
  static State& instance = *new State();
  return instance;
}

std::mutex& state_mutex() { return state().mutex; }

[[maybe_unused]] const int cufile_fork_watch = os::hold_during_forks<state_mutex>();

// With the lock held.
const Library* load() {
  State& all = state();
  if (all.library != nullptr) return all.library.get();
  std::vector<std::string> candidates{library_name};
  for (const std::string& place : places_of_pip()) candidates.push_back(place + "/" + library_name);
  for (const char* place : {"/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib",
                            "/usr/local/cuda/targets/sbsa-linux/lib"}) {
    candidates.push_back(std::string(place) + "/" + library_name);
  }
  void* opened = nullptr;
  for (const std::string& candidate : candidates) {
    opened = dlopen(candidate.c_str(), RTLD_NOW);
    if (opened != nullptr) break;
    const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe): safe in glibc
    if (all.problem.empty()) all.problem = why != nullptr ? why : "dlopen failed";
  }
  if (opened == nullptr) return nullptr;
  Library library{};
  const bool whole =
      os::find_function(opened, "cuFileDriverOpen", library.driver_open) &&
      os::find_function(opened, "cuFileHandleRegister", library.handle_register) &&
      os::find_function(opened, "cuFileHandleDeregister", library.handle_deregister) &&
      os::find_function(opened, "cuFileBufRegister", library.buffer_register) &&
      os::find_function(opened, "cuFileBufDeregister", library.buffer_deregister) &&
      os::find_function(opened, "cuFileRead", library.read) &&
      os::find_function(opened, "cuFileWrite", library.write);
  if (!whole) {
    all.problem = std::string(library_name) + " is too old";
    return nullptr;
  }
  all.library = std::make_unique<const Library>(library);
  return all.library.get();
}

// With the lock held: the library, with its driver open.
Result<const Library*> start() {
  const auto none = [](std::string why) {
    return Error({.operation = use_gds, .code = EOPNOTSUPP, .hint = std::move(why)});
  };
  const Library* library = load();
  if (library == nullptr) return none(state().problem);
  if (!state().opened) {
    if (os::cuda() == nullptr) {
      return none("this process does not use CUDA yet; create a tensor on the GPU first");
    }
    const CufileError error = library->driver_open();
    if (error.code != 0) return cufile_error("cuFileDriverOpen", error);
    state().opened = true;
    state().generation = os::fork_generation();
  }
  if (state().generation != os::fork_generation()) {
    return none(
        "cuFile was opened before fork() and belongs to the parent; start workers with "
        "spawn");
  }
  return library;
}

// The start of the registered memory that holds [memory, memory + bytes), or nullptr.
std::byte* base_of(const std::byte* memory, std::size_t bytes) {
  State& all = state();
  const std::shared_lock lock(all.buffers_mutex);
  const auto after = all.buffers.upper_bound(const_cast<std::byte*>(memory));
  if (after == all.buffers.begin()) return nullptr;
  const auto& [base, size] = *std::prev(after);
  const auto skipped = static_cast<std::size_t>(memory - base);
  return skipped <= size && bytes <= size - skipped ? base : nullptr;
}

// Counts a request while it lives.
class InFlight {
 public:
  InFlight() noexcept {
    const unsigned now = state().in_flight.fetch_add(1) + 1;
    unsigned most = state().in_flight_max.load();
    while (now > most && !state().in_flight_max.compare_exchange_weak(most, now)) {
    }
    state().requests.fetch_add(1, std::memory_order_relaxed);
  }
  ~InFlight() { state().in_flight.fetch_sub(1); }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;
};

// Calls move(base, offset in it) on the GPU and turns its result into ours.
template <class Move>
std::int64_t moved(int gpu, std::byte* memory, std::size_t bytes, Move move) noexcept {
  const os::GpuVisit visit(gpu);
  if (!visit.status().ok()) return -explain(visit.status().error()).code();
  std::byte* const registered = base_of(memory, bytes);
  std::byte* const base = registered != nullptr ? registered : memory;
  const InFlight counted;
  if (registered != nullptr) state().registered_requests.fetch_add(1, std::memory_order_relaxed);
  errno = 0;
  const ssize_t result = move(base, static_cast<off_t>(memory - base));
  if (result == -1) return errno != 0 ? -errno : -EIO;
  return result;
}

}  // namespace

int cufile_errno(int code) noexcept {
  const Name* name = name_of(code);
  return name != nullptr ? name->error : EIO;
}

std::string cufile_text(int code) {
  const Name* name = name_of(code);
  if (name == nullptr) return "error " + std::to_string(code) + " of cuFile";
  return std::string(name->text) + (*name->advice != '\0' ? ": " : "") + name->advice;
}

Result<std::shared_ptr<GpuFile>> GpuFile::of(int fd) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  Result<const Library*> library = start();
  if (!library.ok()) return library.error();
  Registered& registered = all.files[fd];
  if (registered.users == 0) {
    CufileDescription description;
    description.handle.fd = fd;
    const CufileError error = library.value()->handle_register(&registered.handle, &description);
    if (error.code != 0) {
      all.files.erase(fd);
      return cufile_error("cuFileHandleRegister", error);
    }
  }
  ++registered.users;
  return std::shared_ptr<GpuFile>(new GpuFile(fd, registered.handle));
}

GpuFile::~GpuFile() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  const auto found = all.files.find(fd_);
  if (--found->second.users > 0) return;
  all.library->handle_deregister(handle_);
  all.files.erase(found);
}

std::int64_t GpuFile::read(int gpu, std::byte* memory, std::size_t bytes,
                           std::uint64_t offset) const noexcept {
  return moved(gpu, memory, bytes, [&](std::byte* base, off_t in_base) {
    return state().library->read(handle_, base, bytes, static_cast<off_t>(offset), in_base);
  });
}

std::int64_t GpuFile::write(int gpu, std::byte* memory, std::size_t bytes,
                            std::uint64_t offset) const noexcept {
  return moved(gpu, memory, bytes, [&](std::byte* base, off_t in_base) {
    return state().library->write(handle_, base, bytes, static_cast<off_t>(offset), in_base);
  });
}

}  // namespace tensorferry::engines

namespace tensorferry {

using engines::state;

GdsSupport gds_support() {
  const std::string driver = os::read_text("/proc/driver/nvidia/version");
  if (driver.empty()) {
    return {GdsMode::none,
            "no NVIDIA driver was found; install it, or give the container the GPU (--gpus all)"};
  }
  {
    const std::lock_guard lock(state().mutex);
    if (engines::load() == nullptr) return {GdsMode::none, state().problem};
  }
  if (os::read_text("/proc/driver/nvidia-fs/version").empty()) {
    return {GdsMode::compat,
            "the module nvidia-fs is not loaded: cuFile moves the bytes through memory of the CPU "
            "(compat mode)"};
  }
  return {GdsMode::direct, "nvidia-fs is loaded"};
}

void register_gpu_memory(std::span<std::byte> memory) {
  engines::State& all = state();
  const std::lock_guard lock(all.mutex);
  const engines::Library* library = engines::start().or_throw();
  const std::optional<int> gpu = os::gpu_of(memory.data());
  if (!gpu) {
    throw Error({.operation = "register GPU memory",
                 .length = memory.size(),
                 .code = EFAULT,
                 .hint = "the memory is not on a GPU; pass a tensor that is"});
  }
  const os::GpuVisit visit(*gpu);
  explain(visit.status()).or_throw();
  const engines::CufileError error = library->buffer_register(memory.data(), memory.size(), 0);
  if (error.code != 0) throw engines::cufile_error("cuFileBufRegister", error);
  const std::unique_lock buffers(all.buffers_mutex);
  all.buffers[memory.data()] = memory.size();
}

bool unregister_gpu_memory(std::byte* memory) {
  engines::State& all = state();
  const std::lock_guard lock(all.mutex);
  {
    const std::unique_lock buffers(all.buffers_mutex);
    if (all.buffers.erase(memory) == 0) return false;
  }
  const engines::CufileError error = all.library->buffer_deregister(memory);
  if (error.code != 0) throw engines::cufile_error("cuFileBufDeregister", error);
  return true;
}

GdsCounts gds_counts() noexcept {
  return {.requests = state().requests.load(),
          .registered_requests = state().registered_requests.load(),
          .in_flight_max = state().in_flight_max.load()};
}

}  // namespace tensorferry
