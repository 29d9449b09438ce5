// tensorferry: moves tensors between memory and NVMe files, asynchronously, at the speed of the
// drive, and never loses a byte without saying so. This header is the whole public API except
// torch.h and deepspeed_py_aio.h, which need libtorch.
//
// Structs of options and of counts may grow: a new field comes last, and its default keeps the old
// behaviour, so that designated initializers stay valid. docs/reference/cpp.md lists what else
// stays compatible, in source and in binary form, from one version to the next.
#pragma once

#include "tensorferry/aio.h"            // IWYU pragma: export
#include "tensorferry/checkpoint.h"     // IWYU pragma: export
#include "tensorferry/copy.h"           // IWYU pragma: export
#include "tensorferry/device.h"         // IWYU pragma: export
#include "tensorferry/error.h"          // IWYU pragma: export
#include "tensorferry/file.h"           // IWYU pragma: export
#include "tensorferry/gds.h"            // IWYU pragma: export
#include "tensorferry/gpu.h"            // IWYU pragma: export
#include "tensorferry/handle.h"         // IWYU pragma: export
#include "tensorferry/operation.h"      // IWYU pragma: export
#include "tensorferry/options.h"        // IWYU pragma: export
#include "tensorferry/pinned_buffer.h"  // IWYU pragma: export
#include "tensorferry/priority.h"       // IWYU pragma: export
#include "tensorferry/stats.h"          // IWYU pragma: export
#include "tensorferry/swap_space.h"     // IWYU pragma: export
#include "tensorferry/trace.h"          // IWYU pragma: export
#include "tensorferry/version.h"        // IWYU pragma: export
