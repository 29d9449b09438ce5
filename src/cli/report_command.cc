// `tensorferry report`: runs the Python package, which makes the page with plotly.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <system_error>

#include "bench/run/process.h"
#include "cli/commands.h"

namespace tensorferry::cli {

namespace {

struct ReportArguments {
  std::vector<std::string> results;
  std::string output = "report.html";
};

constexpr const char* report_footer = R"(Examples:
  tensorferry report results.json -o report.html
  tensorferry report before.json after.json        the runs side by side
)";

// Catches the ImportError, so that a person without the package reads one line, not a traceback.
constexpr const char* report_program = R"(
import sys
try:
    from tensorferry.report import main
except ImportError as error:
    sys.exit("tensorferry report: %s: the Python package makes the report; to install it, run "
             "`%s -m pip install '.[report]'` in a checkout" % (error, sys.executable))
sys.exit(main(sys.argv[1:]))
)";

// The Python beside this command, else the first one on the PATH.
std::string python() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = self.parent_path() / "python3";
  return !error && access(beside.c_str(), X_OK) == 0 ? beside.string() : "python3";
}

int run_report(const ReportArguments& options) {
  std::vector<std::string> words{python(), "-c", report_program};
  words.insert(words.end(), options.results.begin(), options.results.end());
  words.push_back("--output=" + options.output);
  execvp(words.front().c_str(), bench::pointers_to(words).data());
  throw std::system_error(errno, std::generic_category(),
                          "tensorferry report needs Python, but cannot start " + words.front());
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
  app->add_option("results", options->results, "files that bench, sweep or tune wrote (--json)")
      ->required()
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
  app->add_option("-o,--output", options->output, "the page to write")->capture_default_str();
  return {app, [options] { return run_report(*options); }};
}

}  // namespace tensorferry::cli
