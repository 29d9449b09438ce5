// The command `tensorferry`. It only reads arguments and prints; what it measures is in bench/.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "bench/run/interrupt.h"
#include "cli/commands.h"
#include "tensorferry/error.h"
#include "tensorferry/version.h"

namespace tensorferry::cli {

namespace {

constexpr const char* footer = R"(Flags may be written with - or _. Sizes take K, M and G (binary).
Exit status: 0 done, 1 failed, 2 wrong usage.

Examples:
  tensorferry doctor /mnt/nvme                 is this drive set up right?
  tensorferry bench --nvme-path /mnt/nvme      how fast is it, as a tensor program sees it?
  tensorferry tune /mnt/nvme                   which settings suit it best?
  tensorferry bench --json results.json && tensorferry report results.json -o report.html

`tensorferry COMMAND --help` says more about each.
)";

std::vector<std::string> commands_of(const CLI::App& program) {
  std::vector<std::string> names;
  for (const CLI::App* command : program.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

const CLI::App* command_named(const CLI::App& program, const std::string& name) {
  for (const CLI::App* command : program.get_subcommands({})) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

std::string unknown(const char* kind, const std::string& word,
                    const std::vector<std::string>& known) {
  const std::string meant = nearest(word, known);
  return fmt::format("unknown {} {}{}", kind, word,
                     meant.empty() ? "" : "; did you mean " + meant + "?");
}

// A command or a flag that does not exist, and what was probably meant; empty if all exist. Looked
// for first, because a flag that is not known makes the words after it look wrong too.
std::string find_unknown(const CLI::App& program, const std::vector<std::string>& words) {
  const CLI::App* app = &program;
  for (const std::string& word : words) {
    if (word == "--") break;
    // An unset variable of a shell, more likely than a wish.
    if (word.empty() || (word.starts_with("--") && word.ends_with("="))) {
      return "an argument is empty";
    }
    if (word.starts_with("--")) {
      const std::string name = word.substr(0, word.find('='));
      const auto known = flags_of(*app);
      if (std::ranges::find(known, name) == known.end()) return unknown("flag", name, known);
    } else if (app == &program && !word.starts_with("-")) {
      app = command_named(program, word);
      if (app == nullptr) return unknown("command", word, commands_of(program));
    }
  }
  return app == &program && words.empty()
             ? "say what to do: bench, sweep, tune, doctor, verify or report"
             : "";
}

// A flag that is given twice counts as given last, as people expect who repeat a line with changes.
void let_the_last_one_count(CLI::App& program) {
  for (CLI::App* command : program.get_subcommands({})) {
    for (CLI::Option* option : command->get_options()) {
      if (option->get_expected_max() == 1 && option->get_lnames().size() == 1) {
        option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
      }
    }
  }
}

int complain(const std::vector<std::string>& words, const std::string& message) {
  const bool in_command = !words.empty() && !words.front().starts_with("-");
  const std::string name = in_command ? "tensorferry " + words.front() : "tensorferry";
  fmt::print(stderr, "{}: {}\n`{} --help` lists what there is.\n", name, message,
             message.starts_with("unknown command") ? "tensorferry" : name);
  return exit_usage;
}

int run(const std::vector<std::string>& arguments) {
  CLI::App program("tensorferry measures, tunes and checks drives as a tensor program sees them.",
                   "tensorferry");
  program.footer(footer);
  program.set_version_flag("--version", "tensorferry " TENSORFERRY_VERSION);
  program.require_subcommand(1);
  const std::vector<Command> commands{
      add_bench(program),  add_sweep(program),  add_point(program),  add_tune(program),
      add_doctor(program), add_verify(program), add_report(program), add_completion(program)};
  let_the_last_one_count(program);
  const std::vector<std::string> words = normalize(arguments);
  if (const std::string problem = find_unknown(program, words); !problem.empty()) {
    return complain(words, problem);
  }
  try {
    std::vector<std::string> reversed(words.rbegin(), words.rend());  // as CLI11 wants them
    program.parse(reversed);
  } catch (const CLI::Success& asked) {
    return program.exit(asked);  // --help and --version
  } catch (const CLI::ParseError& error) {
    return complain(words, error.what());
  }
  const auto chosen =
      std::ranges::find_if(commands, [](const Command& command) { return command.app->parsed(); });
  return chosen->run();
}

}  // namespace

}  // namespace tensorferry::cli

int main(int argument_count, char** arguments) {
  using tensorferry::cli::exit_failed;
  // It writes the files and starts the programs that its arguments and the PATH name.
  if (getuid() != geteuid() || getgid() != getegid()) {
    std::fputs(
        "tensorferry: it is setuid or setgid, which would lend its owner's rights to everybody; "
        "remove that with chmod ug-s\n",
        stderr);
    return exit_failed;
  }
  // A reader that goes away must not keep us from removing our files.
  signal(SIGPIPE, SIG_IGN);
  try {
    const int status = tensorferry::cli::run({arguments + 1, arguments + argument_count});
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
    std::fputs("tensorferry: not all could be written to the output\n", stderr);
  } catch (const tensorferry::bench::Interrupted&) {
    std::fputs("tensorferry: interrupted\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tensorferry: %s\n", error.what());
  }
  return exit_failed;
}
