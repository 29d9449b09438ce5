#include "cli/arguments.h"

#include <algorithm>
#include <fstream>

#include "bench/run/sizes.h"

namespace tensorferry::cli {

namespace {

std::uint64_t size_or_complaint(const std::string& text) {
  const auto bytes = bench::parse_size(text);
  if (!bytes) throw CLI::ValidationError(text + " is not a size; write 4K, 2M or 1G");
  if (*bytes == 0) throw CLI::ValidationError("the size must not be 0");
  return *bytes;
}

// How many letters to change, add, remove or swap with their neighbour.
std::size_t distance(const std::string& one, const std::string& other) {
  std::vector<std::vector<std::size_t>> rows(one.size() + 1,
                                             std::vector<std::size_t>(other.size() + 1));
  for (std::size_t i = 0; i <= one.size(); ++i) {
    for (std::size_t j = 0; j <= other.size(); ++j) {
      if (i == 0 || j == 0) {
        rows[i][j] = i + j;
        continue;
      }
      const std::size_t change = one[i - 1] == other[j - 1] ? 0 : 1;
      rows[i][j] = std::min({rows[i - 1][j - 1] + change, rows[i - 1][j] + 1, rows[i][j - 1] + 1});
      if (i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1]) {
        rows[i][j] = std::min(rows[i][j], rows[i - 2][j - 2] + 1);
      }
    }
  }
  return rows.back().back();
}

}  // namespace

std::vector<std::string> normalize(const std::vector<std::string>& arguments) {
  std::vector<std::string> normal = arguments;
  for (std::string& argument : normal) {
    if (argument == "--") break;
    if (!argument.starts_with("--")) continue;
    const auto name_end = argument.begin() + static_cast<std::ptrdiff_t>(
                                                 std::min(argument.find('='), argument.size()));
    std::replace(argument.begin(), name_end, '_', '-');
  }
  return normal;
}

std::vector<std::string> own_arguments() {
  std::ifstream words("/proc/self/cmdline");
  std::vector<std::string> arguments;
  for (std::string word; std::getline(words, word, '\0');) arguments.push_back(word);
  constexpr std::size_t names = 2;  // of the program and of the command
  arguments.erase(arguments.begin(), arguments.begin() + static_cast<std::ptrdiff_t>(
                                                             std::min(names, arguments.size())));
  return arguments;
}

std::string nearest(const std::string& unknown, const std::vector<std::string>& known) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(unknown.size() / 2, 2);
  for (const std::string& name : known) {
    // The beginning of a name counts as near, however short it is.
    const bool beginning = unknown.size() > 3 && name.starts_with(unknown);
    const std::size_t away = beginning ? 1 : distance(unknown, name);
    if (away >= best_distance) continue;
    best = name;
    best_distance = away;
  }
  return best;
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& bytes,
                      const std::string& description) {
  return app
      .add_option_function<std::string>(
          name, [&bytes](const std::string& text) { bytes = size_or_complaint(text); }, description)
      ->type_name("SIZE")
      ->default_str(bench::size_text(bytes));
}

CLI::Option* add_sizes(CLI::App& app, const std::string& name, std::vector<std::uint64_t>& bytes,
                       const std::string& description) {
  std::string defaults;
  for (const std::uint64_t size : bytes) {
    defaults += (defaults.empty() ? "" : " ") + bench::size_text(size);
  }
  return app
      .add_option_function<std::vector<std::string>>(
          name,
          [&bytes](const std::vector<std::string>& texts) {
            bytes.clear();
            for (const std::string& text : texts) bytes.push_back(size_or_complaint(text));
          },
          description)
      ->type_name("SIZE")
      ->default_str(defaults);
}

CLI::Option* add_count(CLI::App& app, const std::string& name, unsigned& value, unsigned min,
                       unsigned max, const std::string& description) {
  CLI::Validator range = CLI::Range(min, max);
  range.description("");  // not in the help, only in the error message
  return app.add_option(name, value, description)
      ->check(range)
      ->type_name("N")
      ->capture_default_str();
}

CLI::Option* add_engine(CLI::App& app, EngineKind& engine) {
  return app
      .add_option_function<std::string>(
          "--engine",
          [&engine](const std::string& text) {
            try {
              engine = parse_engine_kind(text);
            } catch (const std::exception&) {
              throw CLI::ValidationError("--engine", text +
                                                         " is not an engine; choose auto, "
                                                         "io_uring, libaio, threads or gds");
            }
          },
          "auto, io_uring, libaio, threads, or gds for GPUs")
      ->type_name("NAME")
      ->default_str(std::string(to_string(engine)));
}

CLI::Option* add_polling(CLI::App& app, Polling& polling) {
  return app
      .add_option_function<std::string>(
          "--polling",
          [&polling](const std::string& text) {
            try {
              polling = parse_polling(text);
            } catch (const std::exception&) {
              throw CLI::ValidationError(
                  "--polling",
                  text + " is not a kind of polling; choose off, submission or completion");
            }
          },
          "off, submission or completion; burns a core per worker")
      ->type_name("NAME")
      ->default_str(std::string(to_string(polling)));
}

}  // namespace tensorferry::cli
