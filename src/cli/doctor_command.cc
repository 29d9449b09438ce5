// `tensorferry doctor`: prints what works here, what does not, and what to do about it.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>

#include "bench/doctor/doctor.h"
#include "bench/run/interrupt.h"
#include "cli/commands.h"

namespace tensorferry::cli {

namespace {

using bench::Finding;
using bench::FindingStatus;

struct DoctorArguments {
  std::vector<std::string> directories{std::filesystem::current_path()};
  bool json = false;
};

constexpr const char* doctor_footer = R"(It changes nothing; its advice says what you can change.
Exit status: 0 tensors can move at full speed, 1 something needs attention.

Examples:
  tensorferry doctor /mnt/nvme
  tensorferry doctor /mnt/nvme0 /mnt/nvme1         several drives
  tensorferry doctor --json /mnt/nvme | jq -r '.findings[] | select(.needs_attention) | .advice'
)";

enum class Ink : std::uint8_t { plain, coloured };

// https://no-color.org
Ink ink_of_stdout() {
  const char* refused = secure_getenv("NO_COLOR");
  if (refused != nullptr && *refused != '\0') return Ink::plain;
  return isatty(STDOUT_FILENO) != 0 ? Ink::coloured : Ink::plain;
}

std::string painted(const std::string& text, const char* code, Ink ink) {
  return ink == Ink::coloured ? fmt::format("\033[{}m{}\033[0m", code, text) : text;
}

constexpr const char* green = "32";
constexpr const char* yellow = "33";
constexpr const char* red = "31";
constexpr const char* faint = "2";
constexpr const char* bold = "1";

const char* colour_of(const Finding& finding) {
  if (finding.status == FindingStatus::ok) return green;
  if (!bench::needs_attention(finding)) return faint;
  return finding.status == FindingStatus::warning ? yellow : red;
}

const char* mark_of(FindingStatus status) {
  switch (status) {
    case FindingStatus::ok:
      return "✓";
    case FindingStatus::warning:
      return "!";
    case FindingStatus::missing:
      return "✗";
  }
  return "";
}

std::string title_of(const std::string& area) {
  return area == "machine" ? "Machine" : area == "gpu" ? "GPU" : area;
}

void print_findings(const std::vector<Finding>& findings, Ink ink) {
  std::size_t width = 0;
  for (const Finding& finding : findings) width = std::max(width, finding.name.size());
  std::string area;
  for (const Finding& finding : findings) {
    if (finding.area != area) {
      fmt::print("{}{}\n", area.empty() ? "" : "\n", painted(title_of(finding.area), bold, ink));
      area = finding.area;
    }
    const std::string status =
        fmt::format("{} {:<7}", mark_of(finding.status), bench::to_string(finding.status));
    fmt::print("  {}  {:<{}}  {}\n", painted(status, colour_of(finding), ink), finding.name, width,
               finding.found);
    if (finding.status != FindingStatus::ok && !finding.advice.empty()) {
      fmt::print("  {:9}  {:<{}}  {}\n", "", "", width, painted("→ " + finding.advice, faint, ink));
    }
  }
}

void print_verdict(const std::vector<Finding>& findings, Ink ink) {
  const auto count = std::ranges::count_if(findings, bench::needs_attention);
  if (count == 0) {
    fmt::print("\n{}\n", painted("Tensors can move at full speed.", green, ink));
    return;
  }
  std::string names;
  for (const Finding& finding : findings) {
    if (bench::needs_attention(finding)) names += (names.empty() ? "" : ", ") + finding.name;
  }
  const std::string verdict = fmt::format(
      "{} need{} attention: {}.", count == 1 ? "One thing" : fmt::format("{} things", count),
      count == 1 ? "s" : "", names);
  fmt::print("\n{}\n", painted(verdict, yellow, ink));
}

int run_doctor(const DoctorArguments& options) {
  bench::catch_interrupts();
  std::vector<Finding> findings = bench::check_machine();
  for (const std::string& directory : options.directories) {
    bench::check_interrupt();
    std::ranges::move(bench::check_directory(directory), std::back_inserter(findings));
  }
  std::ranges::move(bench::check_gpu(options.directories), std::back_inserter(findings));
  if (options.json) {
    // The name of a directory may hold bytes that JSON may not.
    fmt::print("{}\n",
               bench::to_json(findings).dump(2, ' ', false, bench::Json::error_handler_t::replace));
  } else {
    const Ink ink = ink_of_stdout();
    print_findings(findings, ink);
    fmt::print(
        "\nTo see which models fit here and how long a step takes: "
        "`tensorferry plan --parameters 7B --check {}`\n",
        options.directories.front());
    print_verdict(findings, ink);
  }
  return std::ranges::any_of(findings, bench::needs_attention) ? exit_failed : exit_ok;
}

}  // namespace

Command add_doctor(CLI::App& program) {
  auto options = std::make_shared<DoctorArguments>();
  CLI::App* app = program.add_subcommand(
      "doctor", "Find what keeps tensors from moving at full speed, and what to do about it");
  app->footer(doctor_footer);
  app->add_option("directories", options->directories,
                  "directories on the drives to check; by default the working directory")
      ->type_name("DIR");
  app->add_flag("--json", options->json, "print the findings as JSON");
  return {app, [options] { return run_doctor(*options); }};
}

}  // namespace tensorferry::cli
