// `tensorferry report`: runs the Python package, which makes the page with plotly.
#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/python_program.h"

namespace tensorferry::cli {

namespace {

struct ReportArguments {
  std::vector<std::string> results;
  std::string output = "report.html";
};

constexpr const char* report_footer = R"(Examples:
  tensorferry report results.json -o report.html
  tensorferry report before.json after.json        the runs side by side
  tensorferry report trace.json                    an iteration that TENSORFERRY_TRACE recorded
)";

int run_report(const ReportArguments& options) {
  std::vector<std::string> words = options.results;
  words.push_back("--output=" + options.output);
  become({.command = "report", .module = "tensorferry.report", .install = "'.[report]'"}, words);
}

}  // namespace

std::string results_line(const std::string& path) {
  return fmt::format("Results: {} (`tensorferry report {}` makes a page of them)\n", path, path);
}

Command add_report(CLI::App& program_app) {
  auto options = std::make_shared<ReportArguments>();
  CLI::App* app = program_app.add_subcommand(
      "report", "Make an HTML page with interactive plots from results files");
  app->footer(report_footer);
  app->add_option("results", options->results,
                  "files that bench, sweep, tune or plan wrote (--json), or traces of training")
      ->required()
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  app->add_option("-o,--output", options->output, "the page to write")->capture_default_str();
  return {app, [options] { return run_report(*options); }};
}

}  // namespace tensorferry::cli
