// NVIDIA's cuFile, libcufile.so.0, loaded at run time. It starts when a process that uses CUDA
// registers its first file. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"

namespace tensorferry::engines {

// cuFile's own codes are greater than this. cufile_errno() and cufile_text() translate them.
inline constexpr int cufile_codes_begin = 5000;
[[nodiscard]] int cufile_errno(int code) noexcept;
[[nodiscard]] std::string cufile_text(int code);  // "CU_FILE_...: what to do"

// The operation that errors name when cuFile cannot be used at all.
inline constexpr const char* use_gds = "use GPUDirect Storage";

// A descriptor that is registered with cuFile. See open_gpu_file().
class GpuFile {
 public:
  // Starts cuFile if necessary. The Error is cuFile's, with the reason in words.
  [[nodiscard]] static Result<std::shared_ptr<GpuFile>> of(int fd);
  ~GpuFile();
  GpuFile(const GpuFile&) = delete;
  GpuFile& operator=(const GpuFile&) = delete;

  // Move bytes between the file and memory of the GPU. Return the bytes moved, -errno, or -code of
  // cuFile.
  [[nodiscard]] std::int64_t read(int gpu, std::byte* memory, std::size_t bytes,
                                  std::uint64_t offset) const noexcept;
  [[nodiscard]] std::int64_t write(int gpu, std::byte* memory, std::size_t bytes,
                                   std::uint64_t offset) const noexcept;

 private:
  GpuFile(int fd, void* handle) : fd_(fd), handle_(handle) {}
  int fd_;
  void* handle_;
};

}  // namespace tensorferry::engines
