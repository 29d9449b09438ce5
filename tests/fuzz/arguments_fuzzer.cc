// Any words that a person types become settings or a complaint.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bench/run/sizes.h"
#include "cli/arguments.h"
#include "fuzz/promise.h"

using namespace tensorferry;

namespace {

struct Settings {
  std::uint64_t bytes = 1;
  std::vector<std::uint64_t> sizes{1};
  unsigned count = 1;
  EngineKind engine = EngineKind::automatic;
};

void check_words(const std::vector<std::string>& words) {
  Settings settings;
  CLI::App app;
  cli::add_size(app, "--size", settings.bytes, "");
  cli::add_sizes(app, "--sizes", settings.sizes, "");
  cli::add_count(app, "--count", settings.count, 1, 256, "");
  cli::add_engine(app, settings.engine);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::Error&) {
    return;
  }
  fuzz::promise(settings.bytes > 0, "a size is not 0");
  for (const std::uint64_t bytes : settings.sizes) fuzz::promise(bytes > 0, "no size is 0");
  fuzz::promise(settings.count >= 1 && settings.count <= 256, "a count has limits");
}

void check_word(const std::string& word) {
  (void)cli::nearest(word.substr(0, 64), {"--size", "--sizes", "--count", "--engine"});
  const auto bytes = bench::parse_size(word);
  if (!bytes) return;
  fuzz::promise(*bytes < std::uint64_t{1} << 63, "a size has 63 bits");
  fuzz::promise(bench::parse_size(bench::size_text(*bytes)) == bytes, "a size is read as written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::string> words;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (!rest.empty()) {
    const std::size_t end = rest.find('\n');
    words.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  for (const std::string& word : words) check_word(word);
  const std::vector<std::string> normal = cli::normalize(words);
  fuzz::promise(cli::normalize(normal) == normal, "normal words stay as they are");
  check_words(normal);
  return 0;
}
