#include "tensorferry/version.h"

namespace tensorferry {

std::uint32_t library_version_number() noexcept { return TENSORFERRY_VERSION_NUMBER; }
std::string_view library_version() noexcept { return TENSORFERRY_VERSION; }

}  // namespace tensorferry
