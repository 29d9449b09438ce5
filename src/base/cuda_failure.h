// What CUDA says about a call that failed, and what it means. The room `os` reports a CudaFailure;
// explain(), and nothing else, turns it into an Error.
#pragma once

#include <string>

#include "base/result.h"

namespace tensorferry {

// CUDA's own codes, as in its cuda.h, as far as they have a meaning here; any other value may
// occur. The negative ones are ours, for what CUDA has no code for.
enum class CudaCode : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_initialized = 3,
  deinitialized = 4,
  no_device = 100,
  invalid_device = 101,
  invalid_context = 201,
  invalid_handle = 400,
  not_ready = 600,
  operation_not_supported = 801,
  capture_unsupported = 900,  // the first of the errors of stream capture
  capture_last = 908,

  not_loaded = -1,      // the driver's library cannot be loaded; the text says why
  too_old = -2,         // the driver's library lacks the function that the text names
  not_used = -3,        // nothing in this process has loaded CUDA
  parents = -4,         // the parent used CUDA before the fork, so this process cannot
  no_such_gpu = -5,     // the text names it
  no_context = -6,      // nothing in this process uses the GPU that the text names
  foreign_stream = -7,  // the stream is not on the GPU that the text names
};

// Whether CUDA refused a call because a stream is being captured into a graph.
[[nodiscard]] constexpr bool is_of_capture(CudaCode code) noexcept {
  return code >= CudaCode::capture_unsupported && code <= CudaCode::capture_last;
}

struct CudaFailure {
  std::string call;  // "cuMemcpyAsync"
  CudaCode code = CudaCode::success;
  std::string name = {};  // "CUDA_ERROR_OUT_OF_MEMORY"; empty if CUDA does not name the code
  std::string text = {};  // CUDA's words, or what belongs to a code of ours; may be empty
};

template <class T>
using CudaResult = Result<T, CudaFailure>;
using CudaStatus = CudaResult<Nothing>;

// The failure as an errno value, with what to do about it.
[[nodiscard]] Error explain(const CudaFailure& failure);

template <class T>
[[nodiscard]] Result<T> explain(CudaResult<T> result) {
  if (!result.ok()) return explain(result.error());
  return std::move(result.value());
}

}  // namespace tensorferry
