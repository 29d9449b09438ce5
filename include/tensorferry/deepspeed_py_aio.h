// DeepSpeed's one-off functions under their own names: a program written for DeepSpeed's
// "deepspeed_py_aio.h" changes only the include line. They return 0, or -1 with errno set, and
// print their timing as DeepSpeed's functions do. New code uses tensorferry/aio.h or
// tensorferry/torch.h, whose errors say what happened.
#pragma once

#include <torch/types.h>

#include <cerrno>
#include <cstddef>
#include <exception>
#include <iostream>

#include "tensorferry/torch.h"

namespace tensorferry::deepspeed {

template <typename Transfer>
int timed(int block_size, int queue_depth, const Transfer& transfer) {
  if (block_size <= 0 || queue_depth <= 0) {
    errno = EINVAL;
    return -1;
  }
  try {
    AioElapsed elapsed;
    transfer(static_cast<std::size_t>(block_size), static_cast<unsigned>(queue_depth), &elapsed);
    std::cout << "Elapsed time(usec): aio = " << elapsed.transfer_us
              << " call = " << elapsed.call_us << std::endl;
    return 0;
  } catch (const Error& error) {
    std::cerr << error.what() << std::endl;
    errno = error.code();
  } catch (const std::exception& problem) {
    std::cerr << problem.what() << std::endl;
    errno = EIO;
  }
  return -1;
}

}  // namespace tensorferry::deepspeed

inline int deepspeed_py_aio_write(const torch::Tensor& buffer, const char* filename,
                                  const int block_size, const int queue_depth,
                                  const bool single_submit, const bool overlap_events,
                                  const bool validate) {
  return tensorferry::deepspeed::timed(
      block_size, queue_depth,
      [&](std::size_t block, unsigned depth, tensorferry::AioElapsed* elapsed) {
        tensorferry::aio_write(buffer, filename, block, depth, single_submit, overlap_events,
                               validate, elapsed);
      });
}

inline int deepspeed_py_aio_read(torch::Tensor& buffer, const char* filename, const int block_size,
                                 const int queue_depth, const bool single_submit,
                                 const bool overlap_events, const bool validate) {
  return tensorferry::deepspeed::timed(
      block_size, queue_depth,
      [&](std::size_t block, unsigned depth, tensorferry::AioElapsed* elapsed) {
        tensorferry::aio_read(buffer, filename, block, depth, single_submit, overlap_events,
                              validate, elapsed);
      });
}
