// The elements of a tensor: buffers that hold them, and threads that share them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "buffer.h"

namespace tensorferry::python {

// The elements of a buffer. Throws ValueError if it has not `count` of them, those of `whole`.
template <class Element>
std::span<Element> elements(const Buffer& buffer, const char* name, std::size_t count,
                            const char* whole) {
  const std::span<std::byte> bytes = buffer.bytes();
  if (bytes.size() != count * sizeof(Element) ||
      reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Element) != 0) {
    const std::string words = std::string(name) + " has not the elements that " + whole + " has";
    throw nb::value_error(words.c_str());
  }
  return {reinterpret_cast<Element*>(bytes.data()), count};
}

// Calls work(thread, begin, end) for stretches of blocks, in up to `threads` threads: fewer than
// `least` blocks are not worth one.
template <class Work>
void in_threads(std::size_t blocks, std::size_t least, std::size_t threads, const Work& work) {
  threads = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(blocks / least, 1));
  std::vector<std::jthread> others;
  for (std::size_t i = 1; i < threads; ++i) {
    others.emplace_back(
        [&work, i, blocks, threads] { work(i, blocks * i / threads, blocks * (i + 1) / threads); });
  }
  work(0, 0, blocks / threads);
}

}  // namespace tensorferry::python
