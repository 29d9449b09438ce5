// Checks a file that verify() left: perhaps after a power cut, perhaps on another machine.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <map>
#include <span>
#include <utility>

#include "bench/run/interrupt.h"
#include "bench/run/page_cache.h"
#include "bench/verify/verify.h"
#include "tensorferry/handle.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::bench {

namespace {

constexpr std::size_t piece_bytes = 8 * MiB;
constexpr std::size_t failures_max = 10;  // a person reads no more

// ".../tensorferry-Ab12Cd-generation-54.stamped" -> 54
std::optional<std::uint64_t> generation_in(const std::string& path) {
  static constexpr std::string_view mark = "-generation-";
  const std::string name = std::filesystem::path(path).filename();
  const std::size_t found = name.rfind(mark);
  if (found == std::string::npos) return {};
  const char* begin = name.data() + found + mark.size();
  const char* end = name.data() + name.size();
  std::uint64_t generation = 0;
  const auto [rest, error] = std::from_chars(begin, end, generation);
  if (error != std::errc() || std::string_view(rest, end) != ".stamped") return {};
  return generation;
}

class StampedFile {
 public:
  StampedFile(const std::string& path, ShowVerifyProgress show)
      : show_(std::move(show)), file_(File::open(path, Access::read)), bytes_(file_.size()) {
    drop_from_page_cache(path);
  }

  FileCheck check() {
    learn();
    result_.generation = expected_.generation;
    for_each_block([this](std::span<const std::byte> block, std::uint64_t offset) {
      expected_.offset = offset;
      ++result_.blocks;
      if (block.size() < stamped_block_bytes) {
        if (offset < expected_.file_bytes) return;  // the file is too short: reported below
        add({.fault = Fault::foreign_data,
             .offset = offset,
             .length = block.size(),
             .explanation = known_ ? "more bytes than were written" : "not a stamped block"});
        return;
      }
      if (const auto bad = check_block(block, expected_)) add(*bad);
    });
    if (bytes_ < expected_.file_bytes || bytes_ == 0) {
      add({.fault = Fault::lost_write,
           .offset = bytes_,
           .length = expected_.file_bytes - bytes_,
           .explanation = "the file ends early"});
    }
    return std::move(result_);
  }

 private:
  // Expects the run to which most blocks belong.
  void learn() {
    struct SeedCount {
      std::uint64_t blocks = 0;
      Stamp newest;
    };
    std::map<std::uint64_t, SeedCount> runs;
    for_each_block([&](std::span<const std::byte> block, std::uint64_t) {
      if (block.size() < stamped_block_bytes) return;
      const auto stamp = read_stamp(block);
      if (!stamp) return;
      SeedCount& run = runs[stamp->seed];
      ++run.blocks;
      if (stamp->generation >= run.newest.generation) run.newest = *stamp;
    });
    const auto most =
        std::ranges::max_element(runs, {}, [](const auto& entry) { return entry.second.blocks; });
    known_ = most != runs.end();
    if (known_) expected_ = most->second.newest;
    if (const auto named = generation_in(file_.path())) expected_.generation = *named;
  }

  template <class Visit>
  void for_each_block(const Visit& visit) {
    for (std::uint64_t offset = 0; offset < bytes_; offset += piece_bytes) {
      const auto count =
          static_cast<std::size_t>(std::min<std::uint64_t>(piece_bytes, bytes_ - offset));
      const auto memory = buffer_.bytes().first(count);
      finish(handle_.read(memory, file_, offset));
      for (std::size_t at = 0; at < count; at += stamped_block_bytes) {
        visit(memory.subspan(at, std::min(stamped_block_bytes, count - at)), offset + at);
      }
      read_ += count;
      show_({.done = read_, .total = 2 * bytes_, .bytes_moved = read_});
    }
  }

  void add(const BadBlock& bad) {
    ++result_.bad_blocks;
    if (joins_last(bad)) {
      result_.failures.back().length += bad.length;
      return;
    }
    if (result_.failures.size() == failures_max) return;
    result_.failures.push_back({.kind = to_string(bad.fault),
                                .path = file_.path(),
                                .offset = bad.offset,
                                .length = bad.length,
                                .explanation = bad.explanation,
                                .generation = expected_.generation});
  }

  // Neighbouring whole blocks with the same fault are one failure; each swapped block is its own.
  [[nodiscard]] bool joins_last(const BadBlock& bad) const {
    if (result_.failures.empty() || bad.fault == Fault::swapped_block) return false;
    const VerifyFailure& last = result_.failures.back();
    return bad.length == stamped_block_bytes && last.length % stamped_block_bytes == 0 &&
           last.kind == to_string(bad.fault) && last.offset + last.length == bad.offset;
  }

  const ShowVerifyProgress show_;
  const File file_;
  const std::uint64_t bytes_;
  std::uint64_t read_ = 0;
  Stamp expected_;
  bool known_ = false;  // whether any block has a stamp
  FileCheck result_;
  PinnedBuffer buffer_{piece_bytes};
  Handle handle_;
};

}  // namespace

FileCheck check_file(const std::string& path, const ShowVerifyProgress& show) {
  return StampedFile(path, show).check();
}

}  // namespace tensorferry::bench
