// `tensorferry checkpoint`: runs the Python package, which reads and writes every format.
#include <memory>

#include "cli/commands.h"
#include "cli/python_program.h"

namespace tensorferry::cli {

namespace {

struct CheckpointArguments {
  std::vector<std::string> paths;
  std::string source;
  std::string target;
  std::string format;
  bool without_objects = false;
  bool json = false;
};

constexpr const char* checkpoint_footer =
    R"(
Checkpoints are safetensors files, sets of them by their *.index.json or their folder, files of
torch.save, and folders of torch.distributed.checkpoint.
Exit status: 0 done and sound or equal, 1 damaged, different or failed, 2 wrong usage.

Examples:
  tensorferry checkpoint inspect model.safetensors       which tensors are in it?
  tensorferry checkpoint verify step-1000/               is every byte as it was saved?
  tensorferry checkpoint convert model.pt model.safetensors
  tensorferry checkpoint compare before.pt after.pt      which tensors differ, and how much?
)";

constexpr const char* inspect_footer = R"(Examples:
  tensorferry checkpoint inspect model.safetensors
  tensorferry checkpoint inspect model.safetensors.index.json
  tensorferry checkpoint inspect step-1000/ --json | jq '.checkpoints[].bytes'
)";

constexpr const char* verify_footer =
    R"(Exit status: 0 sound, 1 damaged or not readable, 2 wrong usage.

Examples:
  tensorferry checkpoint verify model.pt step-1000/
)";

constexpr const char* convert_footer =
    R"(The target is a safetensors file if its name ends in .safetensors, a file of torch.save if it
ends in .pt, .pth, .bin or .ckpt, and a folder of torch.distributed.checkpoint if it has no ending.
It is replaced as a whole when all bytes are on the drive.

Examples:
  tensorferry checkpoint convert model.pt model.safetensors
  tensorferry checkpoint convert training.pt weights.safetensors --without-objects
  tensorferry checkpoint convert step-1000/ model.pt
  tensorferry checkpoint convert model.safetensors.index.json step-0/ --to dcp
)";

constexpr const char* compare_footer =
    R"(Exit status: 0 equal, 1 different or not readable, 2 wrong usage.

Examples:
  tensorferry checkpoint compare before.safetensors after.safetensors
  tensorferry checkpoint compare model.pt step-1000/ --json | jq '.different[].name'
)";

// The subcommand adds itself to `app`. All of them fill the same arguments.
CLI::App* add_part(CLI::App& app, const char* name, const char* description, const char* footer,
                   CheckpointArguments& options) {
  CLI::App* part = app.add_subcommand(name, description);
  part->footer(footer);
  part->add_flag("--json", options.json, "print the answer as JSON");
  return part;
}

void add_parts(CLI::App& app, CheckpointArguments& options) {
  const auto add_paths = [&options](CLI::App* part, const std::string& description) {
    part->add_option("paths", options.paths, description)
        ->required()
        ->check(CLI::ExistingPath)
        ->type_name("PATH");
  };
  const auto add_path = [](CLI::App* part, const char* name, std::string& path,
                           const std::string& description) {
    return part->add_option(name, path, description)->required()->type_name("PATH");
  };
  add_paths(add_part(app, "inspect", "List the tensors with dtype, shape, bytes and checksum",
                     inspect_footer, options),
            "checkpoints");
  add_paths(add_part(app, "verify", "Read all bytes and compare them with their checksums",
                     verify_footer, options),
            "checkpoints");
  CLI::App* convert = add_part(app, "convert", "Write the tensors in another format, bit by bit",
                               convert_footer, options);
  add_path(convert, "source", options.source, "a checkpoint")->check(CLI::ExistingPath);
  add_path(convert, "target", options.target, "the checkpoint to write");
  convert
      ->add_option("--to", options.format,
                   "safetensors, torch or dcp; default: as the name of the target says")
      ->check(CLI::IsMember({"safetensors", "torch", "dcp"}))
      ->type_name("FORMAT");
  convert->add_flag("--without-objects", options.without_objects,
                    "leave out objects that are not tensors, instead of refusing them");
  CLI::App* compare = add_part(app, "compare", "Say which tensors differ, and by how much",
                               compare_footer, options);
  add_path(compare, "before", options.source, "a checkpoint")->check(CLI::ExistingPath);
  add_path(compare, "after", options.target, "another one")->check(CLI::ExistingPath);
}

int run_checkpoint(const CLI::App& app, const CheckpointArguments& options) {
  std::vector<std::string> words{app.get_subcommands().front()->get_name()};
  if (options.json) words.emplace_back("--json");
  if (options.without_objects) words.emplace_back("--without-objects");
  if (!options.format.empty()) words.push_back("--to=" + options.format);
  words.emplace_back("--");
  words.insert(words.end(), options.paths.begin(), options.paths.end());
  for (const std::string& path : {options.source, options.target}) {
    if (!path.empty()) words.push_back(path);
  }
  become({.command = "checkpoint", .module = "tensorferry.inspection", .install = "."}, words);
}

}  // namespace

Command add_checkpoint(CLI::App& program) {
  auto options = std::make_shared<CheckpointArguments>();
  CLI::App* app = program.add_subcommand(
      "checkpoint", "Inspect, verify, convert and compare the files of checkpoints");
  app->footer(checkpoint_footer);
  app->require_subcommand(1);
  add_parts(*app, *options);
  return {app, [app, options] { return run_checkpoint(*app, *options); }};
}

}  // namespace tensorferry::cli
