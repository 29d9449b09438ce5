// The jobs of ferry_job that use several drives at once.
#pragma once

#include "job_options.h"
#include "job_report.h"

// Queues the operations of all files at once on one handle, each file's in proportion to its bytes,
// and waits for all of them.
[[nodiscard]] Result run_drives(const Job& job);

// Puts tensors into a SwapSpace over all directories, or gets them, and waits for all of them.
[[nodiscard]] Result run_swap(const Job& job);
