// Ctrl-C, SIGTERM, SIGHUP and SIGQUIT: work ends at the next chance, files are removed, results are
// kept.
#pragma once

#include <exception>

#include "tensorferry/operation.h"

namespace tensorferry::bench {

// Thrown where an interrupt is noticed.
class Interrupted : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

// From now on these signals only set a flag; one that comes seconds later ends the process.
void catch_interrupts();

[[nodiscard]] bool interrupted() noexcept;

// Throws Interrupted if there was one.
void check_interrupt();

// Waits for an operation, or cancels it and throws Interrupted when one comes.
void finish(const Operation& operation);

}  // namespace tensorferry::bench
