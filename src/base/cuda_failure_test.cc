#include "base/cuda_failure.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <utility>

namespace tensorferry {
namespace {

// A code of CUDA's that has no name in CudaCode.
CudaCode unnamed(int code) {
  return static_cast<CudaCode>(code);  // NOLINT(clang-analyzer-optin.core.EnumCastOutOfRange)
}

TEST(CudaFailure, is_explained_with_its_call_name_and_text) {
  const Error error = explain({.call = "cuMemAlloc",
                               .code = CudaCode::out_of_memory,
                               .name = "CUDA_ERROR_OUT_OF_MEMORY",
                               .text = "out of memory"});
  EXPECT_STREQ(
      error.what(),
      "cuMemAlloc: Cannot allocate memory (ENOMEM): CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
}

TEST(CudaFailure, that_nobody_names_shows_its_number) {
  const Error error = explain({.call = "cuInit", .code = unnamed(12345)});
  EXPECT_EQ(error.code(), EIO);
  EXPECT_EQ(error.hint().find("CUDA error 12345; "), 0U) << error.hint();
}

TEST(CudaFailure, has_advice_for_each_meaning) {
  const std::pair<CudaFailure, const char*> cases[] = {
      {{.call = "cuMemcpyAsync", .code = CudaCode::invalid_value}, "has the memory been freed?"},
      {{.call = "cuMemcpyAsync", .code = CudaCode::capture_last}, "outside of the capture"},
      {{.call = "cuMemcpyAsync", .code = unnamed(700)}, "restart the process"},
      {{.call = "load CUDA", .code = CudaCode::not_loaded, .text = "no such file"},
       "no such file; install the NVIDIA driver"},
      {{.call = "load CUDA", .code = CudaCode::too_old, .text = "libcuda.so.1 has no cuInit"},
       "too old: libcuda.so.1 has no cuInit; install a newer"},
      {{.call = "start CUDA", .code = CudaCode::parents}, "spawn"},
      {{.call = "use GPU", .code = CudaCode::not_used}, "does not use CUDA"},
      {{.call = "use GPU", .code = CudaCode::no_such_gpu, .text = "cuda:9"}, "no cuda:9"},
      {{.call = "use GPU", .code = CudaCode::no_context, .text = "cuda:9"}, "does not use cuda:9"},
      {{.call = "cuStreamQuery", .code = CudaCode::foreign_stream, .text = "cuda:9"},
       "the stream is not on cuda:9"},
  };
  for (const auto& [failure, words] : cases) {
    const Error error = explain(failure);
    EXPECT_NE(error.hint().find(words), std::string::npos) << error.hint();
    EXPECT_EQ(error.operation(), failure.call);
  }
}

TEST(CudaFailure, of_a_gpu_that_does_not_exist_is_enodev) {
  for (const CudaCode code : {CudaCode::invalid_device, CudaCode::no_such_gpu}) {
    EXPECT_EQ(explain({.call = "use GPU", .code = code, .text = "cuda:9"}).code(), ENODEV);
  }
}

TEST(CudaFailure, of_a_result_becomes_its_error) {
  EXPECT_EQ(explain(CudaResult<int>(7)).value(), 7);
  const CudaResult<int> failed = CudaFailure{.call = "cuInit", .code = CudaCode::no_device};
  EXPECT_EQ(explain(failed).error().code(), ENODEV);
}

}  // namespace
}  // namespace tensorferry
