#include "bench/verify/verify.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <random>
#include <span>
#include <system_error>
#include <utility>

#include "bench/run/interrupt.h"
#include "bench/run/owned_descriptor.h"
#include "bench/run/page_cache.h"
#include "bench/run/scratch.h"
#include "bench/run/workload.h"
#include "tensorferry/handle.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::bench {

namespace {

constexpr std::size_t window_bytes = 8 * MiB;  // in memory at a time
constexpr std::byte never_read{0xDB};          // a read must replace it

enum class Calls : std::uint8_t { one_each, many };

// How to cut a file into transfers, and where in memory they lie.
struct Cut {
  std::span<const std::size_t> lengths;  // in turns
  std::size_t memory_shift = 0;          // from the beginning of a page
  MemoryKind memory = MemoryKind::pinned;
  Calls calls = Calls::one_each;
};

constexpr std::array<std::size_t, 1> pages{4 * KiB};
constexpr std::array<std::size_t, 1> medium{64 * KiB};
constexpr std::array<std::size_t, 1> large{1 * MiB};
constexpr std::array<std::size_t, 1> three_pages{12 * KiB};
// Offsets and lengths that are not aligned to anything.
constexpr std::array<std::size_t, 7> odd{12 * KiB + 1, 4095, 511, 64 * KiB + 7, 1, 100'003, 513};

constexpr std::array cuts{
    Cut{.lengths = large, .memory = MemoryKind::pinned, .calls = Calls::one_each},
    Cut{.lengths = odd,
        .memory_shift = 1,
        .memory = MemoryKind::pageable,
        .calls = Calls::one_each},
    Cut{.lengths = medium, .memory = MemoryKind::pageable, .calls = Calls::many},
    Cut{.lengths = pages, .memory = MemoryKind::pinned, .calls = Calls::many},
    Cut{.lengths = odd, .memory_shift = 513, .memory = MemoryKind::pinned, .calls = Calls::many},
    Cut{.lengths = three_pages, .memory = MemoryKind::pageable, .calls = Calls::one_each},
};

struct Chunk {
  std::size_t begin = 0;  // in the window
  std::size_t bytes = 0;
};

std::vector<Chunk> chunks_of(std::size_t bytes, const Cut& cut, std::mt19937_64& random) {
  std::vector<Chunk> chunks;
  std::size_t turn = random() % cut.lengths.size();
  for (std::size_t begin = 0; begin < bytes; begin += chunks.back().bytes) {
    const std::size_t wanted = cut.lengths[turn++ % cut.lengths.size()];
    chunks.push_back({.begin = begin, .bytes = std::min(wanted, bytes - begin)});
  }
  return chunks;
}

// Moves all chunks of a window. A read_many joins neighbours into one request, so `many` takes
// every second chunk at a time.
template <class Transfer, class Move, class MoveMany>
void move_chunks(std::vector<Chunk> chunks, Calls calls, std::mt19937_64& random,
                 const std::function<Transfer(const Chunk&)>& transfer_of, const Move& move,
                 const MoveMany& move_many) {
  if (calls == Calls::many) {
    for (const std::size_t parity : {0U, 1U}) {
      std::vector<Transfer> transfers;
      for (std::size_t i = parity; i < chunks.size(); i += 2) {
        transfers.push_back(transfer_of(chunks[i]));
      }
      if (!transfers.empty()) finish(move_many(transfers));
    }
    return;
  }
  std::ranges::shuffle(chunks, random);
  std::vector<Operation> operations;
  operations.reserve(chunks.size());
  for (const Chunk& chunk : chunks) operations.push_back(move(transfer_of(chunk)));
  for (const Operation& operation : operations) finish(operation);
}

// Page-locked and ordinary memory for a window at any shift.
class Window {
 public:
  [[nodiscard]] std::span<std::byte> bytes(const Cut& cut, std::size_t count) {
    const std::span<std::byte> all =
        cut.memory == MemoryKind::pinned ? pinned_.bytes() : pageable();
    return all.subspan(cut.memory_shift, count);
  }

 private:
  // Begins on a page, so that only the shift decides about alignment.
  [[nodiscard]] std::span<std::byte> pageable() {
    void* begin = pageable_.data();
    std::size_t room = pageable_.size();
    std::align(page_bytes, window_bytes + page_bytes, begin, room);
    return {static_cast<std::byte*>(begin), room};
  }

  PinnedBuffer pinned_{window_bytes + page_bytes};
  std::vector<std::byte> pageable_{window_bytes + 2 * page_bytes};
};

struct EngineHandle {
  EngineKind kind;
  Handle handle;
};

VerifyFailure failure_of(const Error& error, const char* kind, const std::string& path,
                         std::uint64_t generation) {
  return {.kind = kind,
          .path = error.path().empty() ? path : error.path(),
          .offset = error.offset().value_or(0),
          .length = error.length().value_or(0),
          .explanation = fmt::format("{}{}{}", std::generic_category().message(error.code()),
                                     error.hint().empty() ? "" : "; ", error.hint()),
          .generation = generation};
}

VerifyFailure failure_of(const BadBlock& bad, const std::string& path, std::uint64_t generation) {
  return {.kind = to_string(bad.fault),
          .path = path,
          .offset = bad.offset,
          .length = bad.length,
          .explanation = bad.explanation,
          .generation = generation};
}

// One file, generation after generation.
class Verification {
 public:
  Verification(const VerifyOptions& options, ShowVerifyProgress show)
      : options_(options),
        show_(std::move(show)),
        random_(options.seed),
        scratch_(options.directory, options.bytes),
        file_(File::open(scratch_.file("stamped"), Access::read_write)) {
    open_engines();
  }

  VerifyResult run() {
    result_.pairs = all_pairs();
    result_.file_bytes = options_.bytes;
    const std::uint64_t pass_bytes = 2 * options_.bytes * cuts.size() * result_.pairs.size();
    total_ = options_.duration.count() > 0
                 ? static_cast<std::uint64_t>(options_.duration.count() * 1000)
                 : pass_bytes;
    for (std::size_t pass = 0; !over(pass); ++pass) run_pass(pass);
    if (options_.leave == Leave::file) keep();
    return std::move(result_);
  }

 private:
  void open_engines() {
    for (const EngineKind kind : all_engines) {
      if (options_.engine != EngineKind::automatic && options_.engine != kind) continue;
      try {
        engines_.push_back({kind, Handle({.engine = kind})});
      } catch (const Error& error) {
        if (options_.engine == kind) throw;
        result_.skipped.push_back({.engine = kind, .reason = error.what()});
      }
    }
  }

  [[nodiscard]] std::vector<EnginePair> all_pairs() const {
    std::vector<EnginePair> pairs;
    for (const EngineHandle& writer : engines_) {
      for (const EngineHandle& reader : engines_) {
        pairs.push_back({.writer = writer.kind, .reader = reader.kind});
      }
    }
    return pairs;
  }

  // Whether to stop before another generation or pass.
  [[nodiscard]] bool over(std::size_t passes) const {
    const bool failed = std::ranges::any_of(
        result_.pairs, [](const EnginePair& pair) { return pair.failure.has_value(); });
    if (failed) return true;
    if (options_.duration.count() > 0) {
      return result_.generations > 0 && Clock::now() - begin_ >= options_.duration;
    }
    return passes > 0;
  }

  // Every pair has its turn before the next cut. Reads use other cuts than writes, and others in
  // each pass.
  void run_pass(std::size_t pass) {
    for (std::size_t cut = 0; cut < cuts.size(); ++cut) {
      for (std::size_t i = 0; i < result_.pairs.size(); ++i) {
        EnginePair& pair = result_.pairs[i];
        run_generation(pair, cuts[cut], cuts[(cut + i + pass) % cuts.size()]);
        if (over(0)) return;
      }
    }
  }

  void run_generation(EnginePair& pair, const Cut& write_cut, const Cut& read_cut) {
    const std::uint64_t generation = ++result_.generations;
    const char* doing = "write error";
    try {
      write_all(handle_of(pair.writer), write_cut, generation);
      drop_from_page_cache(file_.path());
      doing = "read error";
      if (const auto bad = read_all(handle_of(pair.reader), read_cut, generation)) {
        pair.failure = failure_of(*bad, file_.path(), generation);
        return;
      }
      ++pair.generations;
    } catch (const Error& error) {
      pair.failure = failure_of(error, doing, file_.path(), generation);
    }
  }

  Handle& handle_of(EngineKind kind) {
    return std::ranges::find(engines_, kind, &EngineHandle::kind)->handle;
  }

  [[nodiscard]] Stamp stamp_at(std::uint64_t offset, std::uint64_t generation) const {
    return {.offset = offset,
            .generation = generation,
            .seed = options_.seed,
            .file_bytes = options_.bytes};
  }

  void write_all(Handle& handle, const Cut& cut, std::uint64_t generation) {
    for (std::uint64_t offset = 0; offset < options_.bytes; offset += window_bytes) {
      const auto count =
          static_cast<std::size_t>(std::min<std::uint64_t>(window_bytes, options_.bytes - offset));
      const auto memory = to_write_.bytes(cut, count);
      for (std::size_t at = 0; at < count; at += stamped_block_bytes) {
        write_stamp(memory.subspan(at, stamped_block_bytes), stamp_at(offset + at, generation));
      }
      move_chunks<WriteTransfer>(
          chunks_of(count, cut, random_), cut.calls, random_,
          [&](const Chunk& chunk) {
            return WriteTransfer{memory.subspan(chunk.begin, chunk.bytes), file_,
                                 offset + chunk.begin};
          },
          [&](const WriteTransfer& one) { return handle.write(one.memory, one.file, one.offset); },
          [&](const std::vector<WriteTransfer>& many) { return handle.write_many(many); });
      moved(count);
    }
    finish(handle.sync(file_, Durability::data));
  }

  std::optional<BadBlock> read_all(Handle& handle, const Cut& cut, std::uint64_t generation) {
    for (std::uint64_t offset = 0; offset < options_.bytes; offset += window_bytes) {
      const auto count =
          static_cast<std::size_t>(std::min<std::uint64_t>(window_bytes, options_.bytes - offset));
      const auto memory = to_read_.bytes(cut, count);
      std::ranges::fill(memory, never_read);
      move_chunks<ReadTransfer>(
          chunks_of(count, cut, random_), cut.calls, random_,
          [&](const Chunk& chunk) {
            return ReadTransfer{memory.subspan(chunk.begin, chunk.bytes), file_,
                                offset + chunk.begin};
          },
          [&](const ReadTransfer& one) { return handle.read(one.memory, one.file, one.offset); },
          [&](const std::vector<ReadTransfer>& many) { return handle.read_many(many); });
      for (std::size_t at = 0; at < count; at += stamped_block_bytes) {
        const Stamp expected = stamp_at(offset + at, generation);
        auto bad = check_block(memory.subspan(at, stamped_block_bytes), expected);
        if (bad) return bad;
      }
      moved(count);
    }
    return {};
  }

  void moved(std::uint64_t bytes) {
    using std::chrono::milliseconds;
    result_.bytes_moved += bytes;
    const auto elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - begin_).count();
    show_({.done = options_.duration.count() > 0 ? static_cast<std::uint64_t>(elapsed)
                                                 : result_.bytes_moved,
           .total = total_,
           .bytes_moved = result_.bytes_moved});
  }

  // Moves the file out of the scratch directory; its new name has the generation. Makes that
  // durable, because a power cut comes next.
  void keep() {
    const std::string kept =
        fmt::format("{}-generation-{}.stamped", scratch_.path(), result_.generations);
    const OwnedDescriptor folder(options_.directory, O_RDONLY | O_DIRECTORY);
    if (!folder.opened() || rename(file_.path().c_str(), kept.c_str()) != 0 ||
        fsync(folder.get()) != 0) {
      throw Error({.operation = "keep", .path = kept, .code = errno});
    }
    result_.kept = kept;
  }

  const VerifyOptions options_;
  const ShowVerifyProgress show_;
  const Clock::time_point begin_ = Clock::now();
  std::uint64_t total_ = 0;
  std::mt19937_64 random_;
  VerifyResult result_;
  Scratch scratch_;
  File file_;
  Window to_write_;
  Window to_read_;
  std::vector<EngineHandle> engines_;  // last, so that they close before the memory goes
};

}  // namespace

VerifyResult verify(const VerifyOptions& options, const ShowVerifyProgress& show) {
  VerifyOptions whole = options;
  whole.bytes =
      (options.bytes + stamped_block_bytes - 1) / stamped_block_bytes * stamped_block_bytes;
  return Verification(whole, show).run();
}

}  // namespace tensorferry::bench
