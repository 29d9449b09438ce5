// The pages of a file that the kernel keeps in memory.
#pragma once

#include <cstdint>
#include <string>

namespace tensorferry::bench {

// Asks the kernel to drop the pages of a file, so that reads without O_DIRECT come from the drive
// too. Pages that are not durable yet stay.
void drop_from_page_cache(const std::string& path) noexcept;

// Counts the pages of a file in memory. Throws Error.
[[nodiscard]] std::uint64_t resident_pages(const std::string& path);

}  // namespace tensorferry::bench
