// Checksums of formats that others define.
#include <libdeflate.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "buffer.h"
#include "gil_release.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::python {

namespace {

// Polynomials over two elements, modulo that of CRC-32. The highest bit is the constant term.
constexpr std::uint32_t one = std::uint32_t{1} << 31;

std::uint32_t product(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t sum = 0;
  for (std::uint32_t term = one; term != 0; term >>= 1) {
    if ((a & term) != 0) sum ^= b;
    b = (b & 1) != 0 ? (b >> 1) ^ 0xEDB88320 : b >> 1;
  }
  return sum;
}

// What moves a checksum in front of so many bytes.
std::uint32_t shift_by(std::uint64_t bytes) noexcept {
  std::uint32_t shift = one;
  std::uint32_t power = one >> 8;  // of one byte; then of two, four...
  for (; bytes != 0; bytes >>= 1) {
    if ((bytes & 1) != 0) shift = product(shift, power);
    power = product(power, power);
  }
  return shift;
}

std::uint32_t crc32(std::uint32_t value, std::span<const std::byte> bytes) noexcept {
  return libdeflate_crc32(value, bytes.data(), bytes.size());
}

// The checksums of bytes that pass: of all, and of each piece. Looks at each byte once.
class PieceChecksums {
 public:
  explicit PieceChecksums(std::size_t piece_bytes)
      : piece_bytes_(piece_bytes), whole_piece_(shift_by(piece_bytes)) {}

  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t count = std::min(piece_bytes_ - filled_, bytes.size());
      piece_ = crc32(piece_, bytes.first(count));
      filled_ += count;
      bytes = bytes.subspan(count);
      if (filled_ == piece_bytes_) end();
    }
  }

  // Ends the piece that is under way.
  void end() {
    if (filled_ == 0) return;
    const std::uint32_t shift = filled_ == piece_bytes_ ? whole_piece_ : shift_by(filled_);
    whole_ = product(shift, whole_) ^ piece_;
    pieces_.push_back(piece_);
    piece_ = 0;
    filled_ = 0;
  }

  [[nodiscard]] std::uint32_t whole() const noexcept { return whole_; }
  [[nodiscard]] const std::vector<std::uint32_t>& pieces() const noexcept { return pieces_; }

 private:
  std::size_t piece_bytes_;
  std::uint32_t whole_piece_;
  std::uint32_t whole_ = 0;  // of the pieces that have ended
  std::uint32_t piece_ = 0;
  std::size_t filled_ = 0;
  std::vector<std::uint32_t> pieces_;
};

}  // namespace

void bind_checksums(nb::module_& module) {
  module.def(
      "crc32",
      [](nb::handle buffer, std::uint32_t value) {
        const Buffer memory(buffer, Use::take);
        in_pieces(memory.bytes().size(), [&](std::size_t begin, std::size_t bytes) {
          value = crc32(value, memory.bytes().subspan(begin, bytes));
        });
        return value;
      },
      nb::arg("buffer").none(), nb::arg("value") = 0,
      nb::sig("def crc32(buffer: object, value: int = 0) -> int"),
      "Returns the CRC-32 of zip archives, of the bytes that gave `value` followed by the buffer.");
  nb::class_<PieceChecksums>(module, "PieceChecksums",
                             "The CRC-32 of bytes that pass, and those of their pieces.")
      .def(
          "__init__",
          [](PieceChecksums* self, std::size_t piece_bytes) {
            if (piece_bytes == 0) throw nb::value_error("piece_bytes is 0");
            new (self) PieceChecksums(piece_bytes);
          },
          nb::arg("piece_bytes"))
      .def(
          "add",
          [](PieceChecksums& self, nb::handle buffer) {
            const Buffer memory(buffer, Use::take);
            in_pieces(memory.bytes().size(), [&](std::size_t begin, std::size_t bytes) {
              self.add(memory.bytes().subspan(begin, bytes));
            });
          },
          nb::arg("buffer"), nb::sig("def add(self, buffer: object) -> None"),
          "Takes the bytes that come next. One thread at a time may call this.")
      .def("end", &PieceChecksums::end, "Ends the piece that is under way, the last one.")
      .def_prop_ro("whole", &PieceChecksums::whole, "Of all pieces that have ended.")
      .def_prop_ro("pieces", &PieceChecksums::pieces);
  module.def(
      "safetensors_checksum",
      [](nb::handle chunk) {
        const Buffer memory(chunk, Use::take);
        const GilRelease released;
        return safetensors_checksum(memory.bytes());
      },
      nb::arg("chunk").none(), nb::sig("def safetensors_checksum(chunk: object) -> int"),
      "Returns the checksum of 16 MiB of a tensor, or of what is left at its end.");
}

}  // namespace tensorferry::python
