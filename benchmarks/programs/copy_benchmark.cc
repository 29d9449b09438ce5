// Compares copy() with memcpy, by length, by what is in cache and by the hint for copy().
//
//   copy_benchmark [pairs]               everything, as a table
//   copy_benchmark pairs FROM TO TOLD BYTES [stores]   one line of JSON: the seconds of each pair.
//                                        FROM and TO are hot or cold, TOLD is any or cold; with
//                                        "stores" against streaming stores that read nothing
//
// A figure is the median, with the quartiles, of the paired ratios memcpy time / copy time: above
// 1 copy() is faster. An untimed batch of the same kind precedes each timed one, so that neither
// side pays for dirty lines that the other left in the cache. The sides alternate in going first.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "tensorferry/copy.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace {

using tensorferry::Destination;

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;
constexpr std::size_t arena_bytes = 512 * MiB;  // far beyond any cache
constexpr std::size_t batch_bytes = 128 * MiB;
constexpr std::size_t hot_bytes_max = 8 * MiB;

enum class Heat { hot, cold };

// Memory that is used repeatedly (hot) or once (cold).
class Walk {
 public:
  Walk(std::byte* memory, Heat heat, std::size_t bytes)
      : memory_(memory), bytes_(bytes), limit_(heat == Heat::hot ? bytes : arena_bytes) {}

  std::span<std::byte> next() {
    if (at_ + bytes_ > limit_) at_ = 0;
    const std::span<std::byte> here(memory_ + at_, bytes_);
    at_ += bytes_;
    return here;
  }

 private:
  std::byte* memory_;
  std::size_t bytes_;
  std::size_t limit_;
  std::size_t at_ = 0;
};

template <class Copy>
double seconds_per_copy(Walk& to, Walk& from, std::size_t copies, Copy copy_bytes) {
  for (std::size_t i = 0; i < copies; ++i) copy_bytes(to.next(), from.next());
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < copies; ++i) copy_bytes(to.next(), from.next());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return took.count() / static_cast<double>(copies);
}

double quantile(std::vector<double>& values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

struct Situation {
  const char* name;
  Heat source;
  Heat destination;
};

struct Arenas {
  std::unique_ptr<std::byte[]> source{new std::byte[arena_bytes]};
  std::unique_ptr<std::byte[]> destination{new std::byte[arena_bytes]};  // 16-byte aligned
};

struct Pairs {
  std::vector<double> plain_seconds, our_seconds, ratios;  // per copy
};

// Types, not pointers, so that both calls are direct.
struct PlainCopy {
  void operator()(std::span<std::byte> to, std::span<const std::byte> from) const {
    std::memcpy(to.data(), from.data(), to.size());
  }
};

// The limit of every copy to cold memory: how fast the processor can write past its caches.
struct StoresAlone {
  void operator()(std::span<std::byte> to, std::span<const std::byte> from) const {
#if defined(__x86_64__)
    const auto value = _mm_set1_epi8(static_cast<char>(from[0]));
    for (std::size_t at = 0; at + 16 <= to.size(); at += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to.data() + at), value);
    }
    _mm_sfence();
#else
    std::memset(to.data(), static_cast<int>(from[0]), to.size());
#endif
  }
};

template <class Plain = PlainCopy>
Pairs measure(const Arenas& arenas, const Situation& situation, Destination told, std::size_t bytes,
              unsigned pairs, Plain plain = {}) {
  Walk from(arenas.source.get(), situation.source, bytes);
  Walk to(arenas.destination.get(), situation.destination, bytes);
  const auto ours = [told](std::span<std::byte> t, std::span<const std::byte> f) {
    tensorferry::copy(t, f, told);
  };
  const std::size_t copies = std::max<std::size_t>(1, batch_bytes / bytes);
  Pairs result;
  for (unsigned pair = 0; pair < pairs; ++pair) {
    double plain_took = 0;
    if (pair % 2 == 0) plain_took = seconds_per_copy(to, from, copies, plain);
    const double our_took = seconds_per_copy(to, from, copies, ours);
    if (pair % 2 != 0) plain_took = seconds_per_copy(to, from, copies, plain);
    result.plain_seconds.push_back(plain_took);
    result.our_seconds.push_back(our_took);
    result.ratios.push_back(plain_took / our_took);
  }
  return result;
}

void print(const Situation& situation, Destination told, std::size_t bytes, Pairs pairs) {
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf(
      "%-12s %-5s %8zu KiB  memcpy %6.1f GB/s  copy %6.1f GB/s  ratio %.2f (%.2f to %.2f)\n",
      situation.name, told == Destination::any ? "any" : "cold", bytes / KiB,
      gigabytes / quantile(pairs.plain_seconds, 0.5), gigabytes / quantile(pairs.our_seconds, 0.5),
      quantile(pairs.ratios, 0.5), quantile(pairs.ratios, 0.25), quantile(pairs.ratios, 0.75));
  std::fflush(stdout);
}

void print_json(const Pairs& pairs) {
  const auto list = [](const char* name, const std::vector<double>& values) {
    std::printf("\"%s\": [", name);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::printf("%s%.6g", i > 0 ? ", " : "", values[i]);
    }
  };
  std::printf("{");
  list("copy", pairs.our_seconds);
  std::printf("], ");
  list("other", pairs.plain_seconds);
  std::printf("]}\n");
}

void measure_all(const Arenas& arenas, unsigned pairs) {
  std::printf("instructions: %s; %u pairs\n", tensorferry::copy_instructions(), pairs);
  const Situation situations[] = {{"hot -> cold", Heat::hot, Heat::cold},
                                  {"hot -> hot", Heat::hot, Heat::hot},
                                  {"cold -> cold", Heat::cold, Heat::cold}};
  for (const Situation& situation : situations) {
    const std::size_t longest = situation.source == Heat::hot ? hot_bytes_max : 256 * MiB;
    for (const Destination told : {Destination::any, Destination::cold}) {
      for (std::size_t bytes = 4 * KiB; bytes <= longest; bytes *= 4) {
        print(situation, told, bytes, measure(arenas, situation, told, bytes, pairs));
      }
    }
  }
}

}  // namespace

int main(int argument_count, char** arguments) {
  const long asked = argument_count > 1 ? std::strtol(arguments[1], nullptr, 10) : 0;
  const unsigned pairs = asked > 0 ? static_cast<unsigned>(asked) : 11;
  const Arenas arenas;
  std::memset(arenas.source.get(), 1, arena_bytes);
  std::memset(arenas.destination.get(), 2, arena_bytes);
  if (argument_count < 6) {
    measure_all(arenas, pairs);
    return 0;
  }
  const auto heat = [](const char* word) {
    return std::strcmp(word, "hot") == 0 ? Heat::hot : Heat::cold;
  };
  const Situation situation{"", heat(arguments[2]), heat(arguments[3])};
  const Destination told =
      std::strcmp(arguments[4], "any") == 0 ? Destination::any : Destination::cold;
  const std::size_t bytes = std::strtoull(arguments[5], nullptr, 10);
  if (bytes == 0 || bytes > arena_bytes) {
    std::fprintf(stderr, "copy_benchmark: BYTES must be 1 to %zu\n", arena_bytes);
    return 2;
  }
  print_json(argument_count > 6 ? measure(arenas, situation, told, bytes, pairs, StoresAlone{})
                                : measure(arenas, situation, told, bytes, pairs, PlainCopy{}));
}
