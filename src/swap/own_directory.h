// Directories that the swap spaces of one user share, beside other users' directories.
#pragma once

#include <string>

#include "base/result.h"
#include "os/system.h"

namespace tensorferry::swap {

// Opens a directory of this user in an open one, and makes it if need be. `path` is that of the
// directory, for errors. Follows no link. Fails with EPERM if the directory belongs to another
// user, or if others may write to it. Returns a descriptor that the caller closes.
[[nodiscard]] Result<int> open_own_directory(os::System& system, int parent,
                                             const std::string& name, const std::string& path);

}  // namespace tensorferry::swap
