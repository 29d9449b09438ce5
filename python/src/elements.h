// The elements of a tensor: buffers that hold them, and threads that share them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "buffer.h"
#include "team.h"

namespace tensorferry::python {

// The elements of a buffer. Throws ValueError unless it has `count` of them, as `whole` has,
// aligned.
template <class Element>
std::span<Element> elements(const Buffer& buffer, const char* name, std::size_t count,
                            const char* whole) {
  const std::span<std::byte> bytes = buffer.bytes();
  if (bytes.size() != count * sizeof(Element) ||
      reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Element) != 0) {
    const std::string words =
        std::string(name) + " must have as many elements as " + whole + ", aligned";
    throw nb::value_error(words.c_str());
  }
  return {reinterpret_cast<Element*>(bytes.data()), count};
}

// Calls work(thread, begin, end) for stretches of blocks, in up to `threads` threads: fewer than
// `least` blocks are not worth one.
template <class Work>
void in_threads(std::size_t blocks, std::size_t least, std::size_t threads, const Work& work) {
  threads = std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(blocks / least, 1));
  const auto share = [&](std::size_t i) {
    work(i, blocks * i / threads, blocks * (i + 1) / threads);
  };
  share_out(
      threads,
      [](const void* data, std::size_t i) { (*static_cast<const decltype(share)*>(data))(i); },
      &share);
}

}  // namespace tensorferry::python
