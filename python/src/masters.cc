// The lower halves of fp32 masters whose weights in bf16 are in memory. The weight is the master
// rounded to nearest, so with 16 bits more the master is whole again, but for the few that lie
// exactly between two weights or are NaN: those are listed.
#define XXH_INLINE_ALL  // so that programs that link the library need no other one
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "bindings.h"
#include "buffer.h"
#include "elements.h"
#include "gil_release.h"

namespace tensorferry::python {

namespace {

// A digest of each block of weights tells which have changed since their masters were cut.
constexpr std::size_t block_elements = 16384;
// Fewer blocks are not worth a thread.
constexpr std::size_t thread_blocks = 16;

struct Listed {
  std::uint32_t position;
  std::uint32_t bits;
};

// A lower half from 8000 on, which is negative, takes one from the upper half: rounding has added
// it.
std::uint32_t joined(std::uint16_t weight, std::uint16_t low) noexcept {
  return (static_cast<std::uint32_t>(weight) << 16U) +
         static_cast<std::uint32_t>(static_cast<std::int32_t>(static_cast<std::int16_t>(low)));
}

// Masters and what belongs to them, of `count` elements.
class Masters {
 public:
  Masters(const Buffer& master, const Buffer& weights, const Buffer& low, const Buffer& digests)
      : master_(elements<std::uint32_t>(master, "master", master.bytes().size() / 4, "master")),
        weights_(elements<const std::uint16_t>(weights, "weights", master_.size(), "master")),
        low_(elements<std::uint16_t>(low, "low", master_.size(), "master")),
        digests_(elements<std::uint64_t>(digests, "digests", blocks(), "master")) {
    if (master_.size() > UINT32_MAX) throw nb::value_error("master is too long: cut it");
  }

  [[nodiscard]] std::size_t blocks() const noexcept {
    return (master_.size() + block_elements - 1) / block_elements;
  }

  // Joins a block. Returns false if its weights have changed: then its masters are its weights.
  bool join(std::size_t block, std::span<const Listed> listed) const noexcept {
    const auto [begin, end] = range(block);
    if (digest(block) != digests_[block]) {
      for (std::size_t i = begin; i < end; ++i) {
        master_[i] = static_cast<std::uint32_t>(weights_[i]) << 16U;
      }
      return false;
    }
    for (std::size_t i = begin; i < end; ++i) master_[i] = joined(weights_[i], low_[i]);
    const auto by_position = [](const Listed& one, std::size_t at) { return one.position < at; };
    auto found = std::lower_bound(listed.begin(), listed.end(), begin, by_position);
    for (; found != listed.end() && found->position < end; ++found) {
      master_[found->position] = found->bits;
    }
    return true;
  }

  // Cuts a block, and lists the masters that cannot be joined again.
  void cut(std::size_t block, std::vector<Listed>& listed) const {
    const auto [begin, end] = range(block);
    std::uint32_t wrong = 0;
    for (std::size_t i = begin; i < end; ++i) {
      low_[i] = static_cast<std::uint16_t>(master_[i]);
      wrong |= joined(weights_[i], low_[i]) ^ master_[i];
    }
    digests_[block] = digest(block);
    if (wrong == 0) return;
    for (std::size_t i = begin; i < end; ++i) {
      if (joined(weights_[i], low_[i]) == master_[i]) continue;
      listed.push_back({static_cast<std::uint32_t>(i), master_[i]});
    }
  }

 private:
  [[nodiscard]] std::pair<std::size_t, std::size_t> range(std::size_t block) const noexcept {
    const std::size_t begin = block * block_elements;
    return {begin, std::min(begin + block_elements, master_.size())};
  }

  [[nodiscard]] std::uint64_t digest(std::size_t block) const noexcept {
    const auto [begin, end] = range(block);
    return XXH3_64bits(weights_.data() + begin, (end - begin) * sizeof(std::uint16_t));
  }

  std::span<std::uint32_t> master_;
  std::span<const std::uint16_t> weights_;
  std::span<std::uint16_t> low_;
  std::span<std::uint64_t> digests_;
};

std::size_t join_masters(nb::handle master, nb::handle weights, nb::handle low, nb::handle digests,
                         const nb::bytes& listed, unsigned threads) {
  const Buffer filled(master, Use::fill), taken(weights, Use::take), lower(low, Use::take),
      known(digests, Use::take);
  const Masters masters(filled, taken, lower, known);
  std::vector<Listed> entries(listed.size() / sizeof(Listed));
  std::memcpy(entries.data(), listed.data(), entries.size() * sizeof(Listed));
  std::vector<std::size_t> changed(std::max(threads, 1U));
  {
    const GilRelease released;
    in_threads(masters.blocks(), thread_blocks, threads,
               [&](std::size_t thread, std::size_t at, std::size_t end) {
                 for (; at < end; ++at) changed[thread] += masters.join(at, entries) ? 0 : 1;
               });
  }
  return std::accumulate(changed.begin(), changed.end(), std::size_t{0});
}

nb::bytes cut_masters(nb::handle master, nb::handle weights, nb::handle low, nb::handle digests,
                      unsigned threads) {
  const Buffer taken(master, Use::take), rounded(weights, Use::take), filled(low, Use::fill),
      known(digests, Use::fill);
  const Masters masters(taken, rounded, filled, known);
  std::vector<std::vector<Listed>> listed(std::max(threads, 1U));
  {
    const GilRelease released;
    in_threads(masters.blocks(), thread_blocks, threads,
               [&](std::size_t thread, std::size_t at, std::size_t end) {
                 for (; at < end; ++at) masters.cut(at, listed[thread]);
               });
    for (std::size_t i = 1; i < listed.size(); ++i) {
      listed[0].insert(listed[0].end(), listed[i].begin(), listed[i].end());
    }
  }
  return nb::bytes(listed[0].data(), listed[0].size() * sizeof(Listed));
}

}  // namespace

void bind_masters(nb::module_& module) {
  module.attr("MASTER_BLOCK") = block_elements;
  module.def(
      "join_masters", &join_masters, nb::arg("master"), nb::arg("weights"), nb::arg("low"),
      nb::arg("digests"), nb::arg("listed"), nb::arg("threads"),
      nb::sig("def join_masters(master: object, weights: object, low: object, digests: object, "
              "listed: bytes, threads: int) -> int"),
      "Makes masters in fp32 of their weights in bf16 and their lower halves. Blocks whose weights "
      "have another digest get their weights as masters. Returns how many.");
  module.def(
      "cut_masters", &cut_masters, nb::arg("master"), nb::arg("weights"), nb::arg("low"),
      nb::arg("digests"), nb::arg("threads"),
      nb::sig("def cut_masters(master: object, weights: object, low: object, digests: object, "
              "threads: int) -> bytes"),
      "Cuts masters in fp32 that have been rounded to weights in bf16: fills `low` and `digests`. "
      "Returns the list of masters that the weights and `low` do not give back.");
}

}  // namespace tensorferry::python
