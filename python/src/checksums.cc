// Checksums of formats that others define.
#include <libdeflate.h>

#include "bindings.h"
#include "buffer.h"
#include "gil_release.h"

namespace tensorferry::python {

void bind_checksums(nb::module_& module) {
  module.def(
      "crc32",
      [](nb::handle buffer, std::uint32_t value) {
        const Buffer memory(buffer, Use::take);
        in_pieces(memory.bytes().size(), [&](std::size_t begin, std::size_t bytes) {
          value = libdeflate_crc32(value, memory.bytes().data() + begin, bytes);
        });
        return value;
      },
      nb::arg("buffer").none(), nb::arg("value") = 0,
      nb::sig("def crc32(buffer: object, value: int = 0) -> int"),
      "Returns the CRC-32 of zip archives, of the bytes that gave `value` followed by the buffer.");
}

}  // namespace tensorferry::python
