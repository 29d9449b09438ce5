// The command `tensorferry`. It parses arguments and prints; bench/ measures.
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

constexpr const char* footer = R"(Write flags with - or _. Sizes take K, M and G (binary).
Exit status: 0 done, 1 failed, 2 wrong usage.

Examples:
  tensorferry doctor /mnt/nvme                 is this drive set up well?
  tensorferry bench --nvme-path /mnt/nvme      how fast is it for tensors?
  tensorferry tune /mnt/nvme                   which settings are best for it?
  tensorferry plan --parameters 7B --profile /mnt/nvme     what fits where, how fast?
  tensorferry checkpoint inspect model.pt      which tensors are in it?
  tensorferry bench --json results.json && tensorferry report results.json -o report.html

`tensorferry COMMAND --help` explains a command.
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

// The message about an unknown command or flag, with a suggestion; empty if all are known. Runs
// before the parser, which would blame the words after an unknown flag.
std::string find_unknown(const CLI::App& program, const std::vector<std::string>& words) {
  const CLI::App* app = &program;
  for (const std::string& word : words) {
    const bool has_commands = !app->get_subcommands({}).empty();
    if (word == "--") break;
    // Most likely an unset variable of a shell.
    if (word.empty() || (word.starts_with("--") && word.ends_with("="))) {
      return "an argument is empty; is a shell variable unset?";
    }
    if (word.starts_with("--")) {
      const std::string name = word.substr(0, word.find('='));
      const auto known = flags_of(*app);
      if (std::ranges::find(known, name) == known.end()) return unknown("flag", name, known);
    } else if (has_commands && !word.starts_with("-")) {
      const CLI::App* named = command_named(*app, word);
      if (named == nullptr) return unknown("command", word, commands_of(*app));
      app = named;
    }
  }
  if (words.empty()) {
    return "give a command: bench, sweep, tune, doctor, plan, verify, checkpoint, snapshot or "
           "report";
  }
  return "";
}

// The last one of a repeated flag counts, as people expect who append to an earlier line.
void let_the_last_one_count(CLI::App& program) {
  for (CLI::App* command : program.get_subcommands({})) {
    let_the_last_one_count(*command);
    for (CLI::Option* option : command->get_options()) {
      if (option->get_expected_max() == 1 && option->get_lnames().size() == 1) {
        option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
      }
    }
  }
}

// "tensorferry checkpoint verify": as far as the words name commands.
std::string command_line_of(const CLI::App& program, const std::vector<std::string>& words) {
  std::string name = "tensorferry";
  const CLI::App* app = &program;
  for (const std::string& word : words) {
    app = command_named(*app, word);
    if (app == nullptr) break;
    name += " " + word;
  }
  return name;
}

int complain(const CLI::App& program, const std::vector<std::string>& words,
             const std::string& message) {
  const std::string name = command_line_of(program, words);
  fmt::print(stderr, "{}: {}\n`{} --help` lists the possibilities.\n", name, message, name);
  return exit_usage;
}

int run(const std::vector<std::string>& arguments) {
  CLI::App program("Measures, tunes and checks drives for programs that move tensors.",
                   "tensorferry");
  program.footer(footer);
  program.set_version_flag("--version", "tensorferry " TENSORFERRY_VERSION);
  program.require_subcommand(1);
  const std::vector<Command> commands{
      add_bench(program),    add_sweep(program),  add_point(program),     add_tune(program),
      add_doctor(program),   add_plan(program),   add_verify(program),    add_checkpoint(program),
      add_snapshot(program), add_report(program), add_completion(program)};
  let_the_last_one_count(program);
  const std::vector<std::string> words = normalize(arguments);
  if (const std::string problem = find_unknown(program, words); !problem.empty()) {
    return complain(program, words, problem);
  }
  try {
    std::vector<std::string> reversed(words.rbegin(), words.rend());  // CLI11 parses from the back
    program.parse(reversed);
  } catch (const CLI::Success& asked) {
    return program.exit(asked);  // --help and --version
  } catch (const CLI::ParseError& error) {
    return complain(program, words, error.what());
  }
  const auto chosen =
      std::ranges::find_if(commands, [](const Command& command) { return command.app->parsed(); });
  return chosen->run();
}

}  // namespace

}  // namespace tensorferry::cli

int main(int argument_count, char** arguments) {
  using tensorferry::cli::exit_failed;
  // Its arguments and the PATH name files that it writes and programs that it starts.
  if (getuid() != geteuid() || getgid() != getegid()) {
    std::fputs(
        "tensorferry: the program is setuid or setgid and would give its owner's rights to "
        "everybody; remove that with chmod ug-s\n",
        stderr);
    return exit_failed;
  }
  // If the reader of our output ends, we still remove our files.
  signal(SIGPIPE, SIG_IGN);
  try {
    const int status = tensorferry::cli::run({arguments + 1, arguments + argument_count});
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
    std::fputs("tensorferry: could not write all of the output\n", stderr);
  } catch (const tensorferry::bench::Interrupted&) {
    std::fputs("tensorferry: interrupted\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tensorferry: %s\n", error.what());
  }
  return exit_failed;
}
