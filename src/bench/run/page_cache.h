// What the kernel keeps of a file in memory.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry::bench {

// Asks the kernel to forget what it has of a file, so that reads come from the drive also where
// they are not direct. What is not durable yet stays.
void drop_from_page_cache(const std::string& path) noexcept;

// How many pages of a file are in memory. Throws Error.
[[nodiscard]] std::uint64_t resident_pages(const std::string& path);

}  // namespace tensorferry::bench
