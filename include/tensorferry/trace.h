// A program's own work in the trace that TENSORFERRY_TRACE asks for, beside the operations. In a
// program with privileges (setuid, setgid, file capabilities) the variable does not count.
#pragma once

#include <chrono>
#include <string>

#include "tensorferry/export.h"

namespace tensorferry {

// Whether there is a trace. The variable is read once.
[[nodiscard]] TENSORFERRY_EXPORT bool tracing() noexcept;

// Adds a span of the calling thread, of category "work". Does nothing where there is no trace.
TENSORFERRY_EXPORT void trace_span(const std::string& name,
                                   std::chrono::steady_clock::time_point begin,
                                   std::chrono::steady_clock::time_point end);

}  // namespace tensorferry
