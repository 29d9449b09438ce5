// Adds a program's own work to the trace that TENSORFERRY_TRACE asks for, beside the operations. A
// program with privileges (setuid, setgid, file capabilities) ignores the variable.
#pragma once

#include <chrono>
#include <string>

#include "tensorferry/export.h"

namespace tensorferry {

// Whether this process writes a trace. Reads the variable once.
[[nodiscard]] TENSORFERRY_EXPORT bool tracing() noexcept;

// Adds a span of the calling thread, of category "work". Does nothing without a trace.
TENSORFERRY_EXPORT void trace_span(const std::string& name,
                                   std::chrono::steady_clock::time_point begin,
                                   std::chrono::steady_clock::time_point end);

}  // namespace tensorferry
