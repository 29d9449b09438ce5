// `tensorferry completion SHELL`: a script for the shell, generated from the commands.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"

namespace tensorferry::cli {

namespace {

constexpr const char* completion_footer = R"(Examples:
  source <(tensorferry completion bash)            in ~/.bashrc
  source <(tensorferry completion zsh)             in ~/.zshrc, after compinit
  tensorferry completion fish > ~/.config/fish/completions/tensorferry.fish
)";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

std::vector<const CLI::App*> commands_of(const CLI::App& program) {
  return program.get_subcommands(
      [](const CLI::App* command) { return !command->get_name().empty(); });
}

// What completes words after these: commands of its own first, then flags.
std::string bash_case(const std::string& words, const CLI::App& command) {
  std::vector<std::string> offered;
  for (const CLI::App* part : commands_of(command)) offered.push_back(part->get_name());
  for (const std::string& flag : flags_of(command)) offered.push_back(flag);
  return fmt::format("    {}) words=\"{}\" ;;\n", words, joined(offered));
}

// zsh reads bash's completions through bashcompinit.
std::string bash_script(const CLI::App& program) {
  std::vector<std::string> names;
  std::string cases;
  std::string parts;  // of commands that have commands of their own
  for (const CLI::App* command : commands_of(program)) {
    names.push_back(command->get_name());
    cases += bash_case(command->get_name(), *command);
    for (const CLI::App* part : commands_of(*command)) {
      parts += bash_case(command->get_name() + "\\ " + part->get_name(), *part);
    }
  }
  return fmt::format(R"(_tensorferry() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=""
  case $before in
    --polling) COMPREPLY=($(compgen -W "off submission completion" -- "$word")); return ;;
    --engine) COMPREPLY=($(compgen -W "auto io_uring libaio threads gds" -- "$word")); return ;;
    --objective) COMPREPLY=($(compgen -W "read write balanced latency" -- "$word")); return ;;
    --to) COMPREPLY=($(compgen -W "safetensors torch dcp" -- "$word")); return ;;
  esac
  case ${{COMP_WORDS[1]}} in
{}    *) words="{} --help --version" ;;
  esac
  [[ $COMP_CWORD -lt 3 ]] || case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{}  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [[ ${{#COMPREPLY[@]}} -gt 0 || $word == -* ]] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _tensorferry tensorferry
)",
                     cases, joined(names), parts);
}

std::string fish_script(const CLI::App& program) {
  std::string text = "complete -c tensorferry -n __fish_use_subcommand -l help -l version\n";
  for (const CLI::App* command : commands_of(program)) {
    text += fmt::format("complete -c tensorferry -n __fish_use_subcommand -f -a {} -d '{}'\n",
                        command->get_name(), command->get_description());
    for (const std::string& flag : flags_of(*command)) {
      text += fmt::format("complete -c tensorferry -n '__fish_seen_subcommand_from {}' -l {}\n",
                          command->get_name(), flag.substr(2));
    }
    for (const CLI::App* part : commands_of(*command)) {
      text +=
          fmt::format("complete -c tensorferry -n '__fish_seen_subcommand_from {}' -a {} -d '{}'\n",
                      command->get_name(), part->get_name(), part->get_description());
      for (const std::string& flag : flags_of(*part)) {
        text += fmt::format(
            "complete -c tensorferry -n '__fish_seen_subcommand_from {}; and "
            "__fish_seen_subcommand_from {}' -l {}\n",
            command->get_name(), part->get_name(), flag.substr(2));
      }
    }
  }
  return text;
}

}  // namespace

Command add_completion(CLI::App& program) {
  auto shell = std::make_shared<std::string>();
  CLI::App* app = program.add_subcommand("completion",
                                         "Print a script that completes commands "
                                         "and flags in bash, zsh or fish");
  app->footer(completion_footer);
  app->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->type_name("SHELL");
  return {app, [shell, &program] {
            if (*shell == "zsh") fmt::print("autoload -U +X bashcompinit && bashcompinit\n");
            fmt::print("{}", *shell == "fish" ? fish_script(program) : bash_script(program));
            return exit_ok;
          }};
}

}  // namespace tensorferry::cli
