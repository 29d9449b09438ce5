#include "cli/plan_check.h"

#include <fmt/format.h>

#include <fstream>
#include <sstream>
#include <stdexcept>

#include "bench/plan/plan_results.h"
#include "bench/run/results.h"
#include "bench/run/scratch.h"
#include "bench/run/sizes.h"
#include "cli/python_program.h"
#include "cli/table.h"

namespace tensorferry::cli {

namespace {

// Of the files that are measured.
constexpr std::uint64_t needed_bytes = std::uint64_t{2} << 30;

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string cost_text(const std::string& name, double value) {
  if (!name.ends_with("seconds")) return bench::rounded_count(value);
  if (value < 1e-6) return number_text(value * 1e9, 0) + " ns";
  return number_text(value * 1e6, 0) + " us";
}

}  // namespace

Checked check_machine(const std::string& directory, bench::Precision precision, bool on_gpu,
                      const bench::Costs& otherwise) {
  const bench::Scratch scratch(directory, needed_bytes);
  const std::string found = scratch.file("costs.json");
  const std::string said = scratch.file("said");
  const PythonProgram program{
      .command = "plan --check", .module = "tensorferry.plan", .install = ". torch"};
  const int status = run_to_end(program,
                                {scratch.path(), "--dtype", to_string(precision), "--device",
                                 on_gpu ? "cuda" : "cpu", "--output", found},
                                said);
  if (status != 0) {
    throw std::runtime_error(
        fmt::format("plan --check could not measure this machine:\n{}", text_of(said)));
  }
  Checked checked;
  checked.costs = otherwise;
  checked.json = bench::read_json(found);
  const bench::Json& drive = checked.json.at("drive");
  checked.drive = {drive.at("read").get<double>(), drive.at("write").get<double>(),
                   drive.at("both").get<double>()};
  checked.flops = checked.json.at("flops").get<double>();
  take_costs(checked.costs, checked.json, found);
  return checked;
}

std::string check_table(const bench::Machine& planned, const bench::Costs& costs,
                        const Checked& checked) {
  std::vector<std::vector<std::string>> rows;
  const auto row = [&rows](const std::string& name, double told, double found) {
    rows.push_back({name, cost_text(name, told), cost_text(name, found),
                    told > 0 ? fmt::format("{:.2f}x", found / told) : ""});
  };
  row("drive_read", planned.drive.read, checked.drive.read);
  row("drive_write", planned.drive.write, checked.drive.write);
  row("drive_both", planned.drive.both, checked.drive.both);
  row("flops", planned.flops, checked.flops);
  const bench::Json here = to_json(checked.costs);
  const bench::Json there = to_json(costs);  // items() of a temporary would outlive it
  for (const auto& [name, value] : there.items()) {
    if (checked.json.at("costs").contains(name)) {
      row(name, value.get<double>(), here.at(name).get<double>());
    }
  }
  return table(
      {{"cost"}, {"in the plan", Align::right}, {"here", Align::right}, {"ratio", Align::right}},
      rows);
}

}  // namespace tensorferry::cli
