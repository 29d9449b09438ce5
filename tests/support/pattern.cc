#include "support/pattern.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace tensorferry::support {

namespace {

// It is odd, so it has an inverse modulo 2^64: a word can be decoded.
constexpr std::uint64_t spread = 0x9e3779b97f4a7c15U;

constexpr std::uint64_t inverse_of(std::uint64_t odd) {
  std::uint64_t inverse = odd;
  for (int i = 0; i < 6; ++i) inverse *= 2 - odd * inverse;
  return inverse;
}

constexpr unsigned seed_shift = 48;
constexpr std::uint64_t index_mask = (std::uint64_t{1} << seed_shift) - 1;

std::uint64_t word_at(std::uint64_t index, std::uint32_t seed) {
  return ((std::uint64_t{seed} << seed_shift) | (index & index_mask)) * spread;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string describe_origin(std::uint64_t word) {
  const std::uint64_t origin = word * inverse_of(spread);
  const std::uint64_t offset = (origin & index_mask) * 8;
  if (word == 0) return "; the 8 bytes there are zero";
  if (offset >= (std::uint64_t{1} << 44)) return "; the 8 bytes there are no pattern";
  return "; the 8 bytes there belong to offset " + std::to_string(offset) + " of seed " +
         std::to_string(origin >> seed_shift);
}

}  // namespace

void fill_pattern(std::span<std::byte> memory, std::uint64_t offset, std::uint32_t seed) {
  std::size_t at = 0;
  while (at < memory.size()) {
    const std::uint64_t here = offset + at;
    const std::size_t skip = here % 8;
    const std::uint64_t word = word_at(here / 8, seed);
    std::array<std::byte, 8> bytes{};
    std::memcpy(bytes.data(), &word, 8);
    const std::size_t count = std::min(std::size_t{8} - skip, memory.size() - at);
    std::memcpy(memory.data() + at, bytes.data() + skip, count);
    at += count;
  }
}

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t offset, std::uint32_t seed) {
  std::vector<std::byte> memory(bytes);
  fill_pattern(memory, offset, seed);
  return memory;
}

std::string pattern_fault(std::span<const std::byte> memory, std::uint64_t offset,
                          std::uint32_t seed) {
  constexpr std::size_t stride = std::size_t{64} << 10;
  std::vector<std::byte> right(std::min(stride, memory.size()));
  std::string fault;
  std::size_t wrong = 0;
  for (std::size_t begin = 0; begin < memory.size(); begin += stride) {
    const std::size_t count = std::min(stride, memory.size() - begin);
    fill_pattern(std::span(right).first(count), offset + begin, seed);
    if (std::memcmp(right.data(), memory.data() + begin, count) == 0) continue;
    for (std::size_t i = 0; i < count; ++i) {
      if (right[i] == memory[begin + i]) continue;
      if (wrong++ > 0) continue;
      const std::size_t at = begin + i;
      fault = "the byte at offset " + std::to_string(offset + at) + " (" + std::to_string(at) +
              " into the buffer) is " + std::to_string(std::to_integer<int>(memory[at])) +
              ", not " + std::to_string(std::to_integer<int>(right[i]));
      const std::size_t back = (offset + at) % 8;
      if (at >= back && at - back + 8 <= memory.size()) {
        std::uint64_t word = 0;
        std::memcpy(&word, memory.data() + at - back, 8);
        fault += describe_origin(word);
      }
    }
  }
  if (wrong > 0) fault += "; " + std::to_string(wrong) + " bytes are wrong";
  return fault;
}

std::string constant_fault(std::span<const std::byte> memory, std::uint64_t offset,
                           std::byte value) {
  const auto other =
      std::find_if(memory.begin(), memory.end(), [value](std::byte b) { return b != value; });
  if (other == memory.end()) return {};
  return "the byte at offset " +
         std::to_string(offset + static_cast<std::uint64_t>(other - memory.begin())) + " is " +
         std::to_string(std::to_integer<int>(*other)) + ", not " +
         std::to_string(std::to_integer<int>(value));
}

std::vector<std::byte> read_whole_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("open " + path);
  struct stat facts{};
  ::fstat(fd, &facts);
  std::vector<std::byte> bytes(static_cast<std::size_t>(facts.st_size));
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t got = ::pread(fd, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
    if (got < 0) {
      ::close(fd);
      fail("pread " + path);
    }
    if (got == 0) bytes.resize(at);
    at += static_cast<std::size_t>(got);
  }
  ::close(fd);
  return bytes;
}

void write_whole_file(const std::string& path, std::span<const std::byte> bytes) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) fail("open " + path);
  for (std::size_t at = 0; at < bytes.size();) {
    const ssize_t put = ::pwrite(fd, bytes.data() + at, bytes.size() - at, static_cast<off_t>(at));
    if (put <= 0) {
      ::close(fd);
      fail("pwrite " + path);
    }
    at += static_cast<std::size_t>(put);
  }
  if (::fsync(fd) != 0) fail("fsync " + path);
  ::close(fd);
}

}  // namespace tensorferry::support
