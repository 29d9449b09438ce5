// What `tensorferry plan` prints: tables, and the lines that set it up.
#pragma once

#include <string>
#include <vector>

#include "bench/plan/choices.h"

namespace tensorferry::cli {

// The task and the machine, in words.
[[nodiscard]] std::string plan_head(const bench::Task& task, const bench::Machine& machine);

// The choices beside each other: seconds, bytes, memory, wear.
[[nodiscard]] std::string choices_table(const bench::Task& task, const bench::Machine& machine,
                                        const std::vector<bench::Choice>& choices);

// What goes where in one choice, for each rank.
[[nodiscard]] std::string places_table(const bench::Machine& machine, const bench::Choice& choice);

// What is missing where, and what would help.
[[nodiscard]] std::string shortage_text(const bench::Task& task, const bench::Machine& machine,
                                        const bench::Choice& choice);

[[nodiscard]] std::string changes_table(const bench::Task& task, double seconds,
                                        const std::vector<bench::Change>& changes);

// The lines of Python that set up a choice by tensorferry's own names, those about activations, and
// the configuration of DeepSpeed that tensorferry.initialize() takes.
[[nodiscard]] std::string python_lines(const bench::Task& task, const bench::Machine& machine,
                                       const bench::Settings& settings,
                                       const std::string& nvme_path);
[[nodiscard]] std::string activation_lines(const bench::Task& task, const std::string& nvme_path);
[[nodiscard]] bench::Json deepspeed_config(const bench::Task& task, const bench::Settings& settings,
                                           const std::string& nvme_path);
// The call of tensorferry.initialize() that goes with the configuration; empty if it cannot do
// what these settings say.
[[nodiscard]] std::string initialize_line(const bench::Machine& machine,
                                          const bench::Settings& settings, const std::string& file);

}  // namespace tensorferry::cli
