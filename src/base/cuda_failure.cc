#include "base/cuda_failure.h"

#include <cerrno>

namespace tensorferry {

namespace {

int errno_of(CudaCode code) noexcept {
  if (is_of_capture(code)) return EBUSY;
  switch (code) {
    case CudaCode::out_of_memory:
      return ENOMEM;
    case CudaCode::invalid_value:
      return EFAULT;
    case CudaCode::invalid_handle:
    case CudaCode::invalid_context:
    case CudaCode::foreign_stream:
      return EINVAL;
    case CudaCode::not_initialized:
    case CudaCode::deinitialized:
    case CudaCode::no_device:
    case CudaCode::invalid_device:
    case CudaCode::not_loaded:
    case CudaCode::too_old:
    case CudaCode::not_used:
    case CudaCode::parents:
    case CudaCode::no_such_gpu:
    case CudaCode::no_context:
      return ENODEV;
    case CudaCode::operation_not_supported:
      return EOPNOTSUPP;
    default:
      return EIO;
  }
}

const char* advice(int error) noexcept {
  switch (error) {
    case EBUSY:
      return "; a CUDA graph cannot contain transfers: start them outside of the capture";
    case EFAULT:
      return "; has the memory been freed?";
    case EIO:
      return "; an earlier kernel or copy of this process may have failed, and CUDA does not "
             "recover from that: restart the process";
    default:
      return "";
  }
}

std::string hint_of(const CudaFailure& failure) {
  switch (failure.code) {
    case CudaCode::not_loaded:
      return failure.text + "; install the NVIDIA driver, or start the container with --gpus all";
    case CudaCode::too_old:
      return "the driver is too old: " + failure.text + "; install a newer NVIDIA driver";
    case CudaCode::not_used:
      return "this process does not use CUDA";
    case CudaCode::parents:
      return "the parent of this process used CUDA before fork(); start processes with spawn";
    case CudaCode::no_such_gpu:
      return "there is no " + failure.text;
    case CudaCode::no_context:
      return "this process does not use " + failure.text + " yet; make a tensor there first";
    case CudaCode::foreign_stream:
      return "the stream is not on " + failure.text + ", which has the memory";
    default:
      break;
  }
  std::string hint = failure.name.empty()
                         ? "CUDA error " + std::to_string(static_cast<int>(failure.code))
                         : failure.name;
  if (!failure.text.empty()) hint += " (" + failure.text + ")";
  return hint + advice(errno_of(failure.code));
}

}  // namespace

Error explain(const CudaFailure& failure) {
  return Error(
      {.operation = failure.call, .code = errno_of(failure.code), .hint = hint_of(failure)});
}

}  // namespace tensorferry
