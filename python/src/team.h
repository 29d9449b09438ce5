// Threads that share the work on a tensor.
#pragma once

#include <cstddef>

namespace tensorferry::python {

// Calls work(data, share) once for each share below `shares`, in as many threads. They are those
// that torch computes with, if it has any: after each of its operations torch's threads keep the
// processors busy for milliseconds while they wait for the next one, and others get only what is
// left.
void share_out(std::size_t shares, void (*work)(const void* data, std::size_t share),
               const void* data);

}  // namespace tensorferry::python
