#include "bench/run/page_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "bench/run/owned_descriptor.h"
#include "tensorferry/error.h"

namespace tensorferry::bench {

namespace {

Error unknown(const std::string& path) {
  return Error({.operation = "count cached pages of", .path = path, .code = errno});
}

}  // namespace

void drop_from_page_cache(const std::string& path) noexcept {
  const OwnedDescriptor file(path, O_RDONLY);
  posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
}

std::uint64_t resident_pages(const std::string& path) {
  const OwnedDescriptor file(path, O_RDONLY);
  struct stat facts{};
  if (!file.opened() || fstat(file.get(), &facts) != 0) throw unknown(path);
  const auto bytes = static_cast<std::size_t>(facts.st_size);
  if (bytes == 0) return 0;
  const auto bytes_of_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + bytes_of_page - 1) / bytes_of_page);
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) throw unknown(path);
  const bool known = mincore(mapped, bytes, pages.data()) == 0;
  munmap(mapped, bytes);
  if (!known) throw unknown(path);
  return static_cast<std::uint64_t>(
      std::ranges::count_if(pages, [](unsigned char page) { return (page & 1U) != 0; }));
}

}  // namespace tensorferry::bench
