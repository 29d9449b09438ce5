// Ctrl-C, SIGTERM, SIGHUP and SIGQUIT: the command ends its work soon, removes its files and keeps
// its results.
#pragma once

#include <exception>

#include "tensorferry/operation.h"

namespace tensorferry::bench {

// Thrown by code that notices an interrupt.
class Interrupted : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

// Makes these signals set a flag only. A second one, seconds later, ends the process.
void catch_interrupts();

[[nodiscard]] bool interrupted() noexcept;

// Throws Interrupted after an interrupt.
void check_interrupt();

// Waits for an operation. On an interrupt cancels it and throws Interrupted.
void finish(const Operation& operation);

}  // namespace tensorferry::bench
