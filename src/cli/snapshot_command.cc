// `tensorferry snapshot`: runs the Python package, which takes snapshots and reads them.
#include <memory>

#include "cli/commands.h"
#include "cli/python_program.h"

namespace tensorferry::cli {

namespace {

struct SnapshotArguments {
  std::string path;
  std::string second;  // the target of an export, or the name of what is dropped
  std::string name;
  std::string format;
  unsigned rank = 0;
  bool json = false;
};

constexpr const char* snapshot_footer =
    R"(
A folder of snapshots is what tensorferry.snapshot.take() in Python was given.
Exit status: 0 done and sound, 1 damaged or failed, 2 wrong usage or no such snapshot.

Examples:
  tensorferry snapshot list snapshots
  tensorferry snapshot verify snapshots                  is every byte as it was written?
  tensorferry snapshot export snapshots model.safetensors
  tensorferry snapshot export snapshots folder --format dcp
  tensorferry snapshot drop snapshots snapshot-00000001
)";

CLI::App* add_part(CLI::App& app, const char* name, const char* description,
                   SnapshotArguments& options) {
  CLI::App* part = app.add_subcommand(name, description);
  part->add_option("path", options.path, "a folder of snapshots")
      ->required()
      ->check(CLI::ExistingDirectory)
      ->type_name("PATH");
  part->add_flag("--json", options.json, "print the answer as JSON");
  return part;
}

void add_name(CLI::App* part, SnapshotArguments& options) {
  part->add_option("--name", options.name, "which snapshot; default: the newest")
      ->type_name("NAME");
}

void add_parts(CLI::App& app, SnapshotArguments& options) {
  add_part(app, "list", "List the snapshots in a folder", options);
  add_name(add_part(app, "verify", "Read a snapshot and compare its checksums", options), options);
  CLI::App* to_export =
      add_part(app, "export", "Write the weights of a snapshot to a checkpoint", options);
  to_export
      ->add_option("target", options.second,
                   "the file to write, or the folder of a checkpoint of torch.distributed")
      ->required()
      ->type_name("PATH");
  add_name(to_export, options);
  to_export
      ->add_option("--format", options.format,
                   "torch, safetensors or dcp; default: safetensors if the target ends so, else "
                   "torch")
      ->check(CLI::IsMember({"torch", "safetensors", "dcp"}))
      ->type_name("NAME");
  to_export
      ->add_option("--rank", options.rank,
                   "whose weights to export, if several ranks took the snapshot")
      ->type_name("N");
  add_part(app, "drop", "Remove a snapshot and free its space", options)
      ->add_option("name", options.second, "the snapshot to remove")
      ->required()
      ->type_name("NAME");
}

int run_snapshot(const CLI::App& app, const SnapshotArguments& options) {
  std::vector<std::string> words{app.get_subcommands().front()->get_name()};
  if (options.json) words.emplace_back("--json");
  if (!options.name.empty()) words.push_back("--name=" + options.name);
  if (!options.format.empty()) words.push_back("--format=" + options.format);
  if (options.rank > 0) words.push_back("--rank=" + std::to_string(options.rank));
  words.emplace_back("--");
  words.push_back(options.path);
  if (!options.second.empty()) words.push_back(options.second);
  become({.command = "snapshot", .module = "tensorferry.snapshot.program", .install = "."}, words);
}

}  // namespace

Command add_snapshot(CLI::App& program) {
  auto options = std::make_shared<SnapshotArguments>();
  CLI::App* app = program.add_subcommand(
      "snapshot", "List, verify, export and drop the snapshots of runs on NVMe");
  app->footer(snapshot_footer);
  app->require_subcommand(1);
  add_parts(*app, *options);
  return {app, [app, options] { return run_snapshot(*app, *options); }};
}

}  // namespace tensorferry::cli
