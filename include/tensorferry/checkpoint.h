// Checkpoints: named tensors in files of the safetensors format, read and written at the speed of
// the drive, and files that take their name only when they are whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensorferry/error.h"
#include "tensorferry/export.h"
#include "tensorferry/file.h"
#include "tensorferry/handle.h"
#include "tensorferry/operation.h"
#include "tensorferry/options.h"

namespace tensorferry {

namespace checkpoint {
class Contents;
class HiddenFile;
}  // namespace checkpoint

// The element types of safetensors, in its order. Those of fewer than 8 bits are packed.
enum class DType : std::uint8_t {
  boolean,
  f4,
  f6_e2m3,
  f6_e3m2,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};

// The name that safetensors files use: "F32", "BF16". And back; nullopt for an unknown name.
[[nodiscard]] TENSORFERRY_EXPORT std::string_view to_string(DType dtype) noexcept;
[[nodiscard]] TENSORFERRY_EXPORT std::optional<DType> dtype_named(std::string_view name) noexcept;
[[nodiscard]] TENSORFERRY_EXPORT unsigned bits_of(DType dtype) noexcept;  // of one element

struct TensorInfo {
  std::string name;
  DType dtype = DType::u8;
  std::vector<std::uint64_t> shape;
  std::size_t file = 0;      // index in Safetensors::files()
  std::uint64_t offset = 0;  // of its first byte, from the start of the file
  std::uint64_t bytes = 0;
};

// The indexes [begin, end) of one dimension.
struct IndexRange {
  std::uint64_t begin = 0;
  std::uint64_t end = ~std::uint64_t{0};  // beyond the dimension: up to its end
};

struct TensorRead {
  std::string_view name;
  std::span<std::byte> memory;          // exactly as long as what is read, row by row
  std::vector<IndexRange> ranges = {};  // of the first dimensions; all of those that follow
  CudaStream stream = {};               // for memory of a GPU
};

// Whether a read checks the checksums of the tensors that it reads as a whole.
enum class Verify : std::uint8_t {
  no,
  if_present,  // those that have one
  required     // throws Error (ENODATA) for a tensor that has none or is not read as a whole
};

// The tensors of a safetensors file, or of a set of files that an index names. Copies share it. All
// members may be called from any number of threads at once.
class TENSORFERRY_EXPORT Safetensors {
 public:
  // Opens a file, or all files of a set by its "*.index.json". Reads the headers, no tensors.
  // Throws Error: with EBADMSG and the offset for a file that breaks a rule of the format.
  [[nodiscard]] static Safetensors open(const std::string& path);

  [[nodiscard]] const std::vector<File>& files() const noexcept;
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept;       // by file and offset
  [[nodiscard]] const TensorInfo* find(std::string_view name) const noexcept;  // or nullptr
  // As the file has it, without our checksums; nullopt if there is none. Of a set: the index's
  // own, whose values that are not strings are left as JSON.
  [[nodiscard]] const std::optional<std::map<std::string, std::string>>& metadata() const noexcept;
  [[nodiscard]] bool has_checksums() const noexcept;  // of every tensor
  // The names of the tensors that have bytes and no checksum, by file and offset.
  [[nodiscard]] std::vector<std::string_view> unchecked() const;
  // Why the checksums of a file are of no use; empty if they are, or if there are none.
  [[nodiscard]] const std::string& checksums_problem() const noexcept;

  // Starts to read tensors, or ranges of them, and returns at once. Reads in the order of the files
  // and as few bytes as it can. Throws Error for an unknown name and for memory or ranges that do
  // not fit. With a wrong checksum the operation fails: EBADMSG, the tensor in the hint, the path
  // and the offset of the bytes that differ.
  Operation read(Handle& handle, std::span<const TensorRead> reads,
                 Verify verify = Verify::no) const;

 private:
  explicit Safetensors(std::shared_ptr<const checkpoint::Contents> contents);
  std::shared_ptr<const checkpoint::Contents> contents_;
};

// A file that takes its name only when it is whole. Until commit() its bytes are in a hidden file
// beside it, and whatever has the name stays as it is. A file that is replaced passes its mode on.
// A symbolic link stays: the file that it points to is replaced.
class TENSORFERRY_EXPORT NewFile {
 public:
  // Creates the hidden file, and removes those that killed processes have left for this path.
  // Throws Error, also if `path` names something that is not a regular file.
  [[nodiscard]] static NewFile create(const std::string& path,
                                      unsigned permissions = File::usual_permissions);
  ~NewFile();  // removes the hidden file unless commit() has succeeded
  NewFile(NewFile&&) noexcept;
  NewFile& operator=(NewFile&&) noexcept;

  [[nodiscard]] const File& file() const noexcept;         // for writing
  [[nodiscard]] const std::string& path() const noexcept;  // the name that it will have

  // Takes space for a file of so many bytes and makes it that long, which the caller then fills.
  // Without it every write at the end makes the file longer, and waits for those before it. Where
  // space cannot be taken ahead, or is too little, it does nothing: the writes tell.
  void reserve(std::uint64_t bytes);

  // Syncs the file, gives it its name and syncs the directory. All writes must be done before. When
  // it returns, the new file is on the drive. When it throws Error, the name may belong to the new
  // file only if the last sync failed; else everything is as before.
  void commit();

 private:
  explicit NewFile(std::unique_ptr<checkpoint::HiddenFile> hidden);
  std::unique_ptr<checkpoint::HiddenFile> hidden_;
};

struct TensorWrite {
  std::string name;
  DType dtype = DType::u8;
  std::vector<std::uint64_t> shape;
  std::span<const std::byte> memory;
  CudaStream stream = {};
};

// Called by the thread that saves, about ten times a second. Returns false to give up. What it
// throws passes to the caller of the save, after all writes have ended.
using Progress = std::function<bool(std::uint64_t done_bytes, std::uint64_t total_bytes)>;

struct SafetensorsOptions {
  std::optional<std::map<std::string, std::string>> metadata = {};
  // XXH3 of every 16 MiB of each tensor, in an entry of the metadata.
  bool checksums = true;
  // Where tensors begin: the header is padded with spaces to a multiple of this. With 4096 drives
  // read straight into memory; safetensors itself writes 8.
  std::size_t alignment = 4096;
  unsigned permissions = File::usual_permissions;
  Progress progress = {};
};

// Writes tensors in the order of safetensors, by falling alignment and then by name, to a new file
// that replaces `path`. When it returns, the file is on the drive; when it throws Error, the old
// file is as it was and nothing else is left. Throws Error (EINVAL) for a name twice and for memory
// that does not have the size of its tensor; with ECANCELED if `progress` gave up.
TENSORFERRY_EXPORT void save_safetensors(Handle& handle, const std::string& path,
                                         std::span<const TensorWrite> tensors,
                                         const SafetensorsOptions& options = {});

// For files that are in memory or are written by other means.
struct SafetensorsHeader {
  std::string bytes;               // from the start of the file to its first tensor
  std::vector<std::size_t> order;  // indexes of the given tensors, in the order of the file
};

// The pieces of a tensor that have a checksum each; the last may be shorter.
inline constexpr std::uint64_t checksum_piece_bytes = std::uint64_t{64} * 1024;

// The checksums of pieces of a tensor that follow each other. Several programs that write parts of
// one tensor compute those of their pieces.
[[nodiscard]] TENSORFERRY_EXPORT std::vector<std::uint64_t> checksums_of_pieces(
    std::span<const std::byte> bytes);

// The header that save_safetensors() writes. It has checksums only if `pieces` has, for each
// tensor, those of all its pieces; their values do not change its length. Looks at no memory.
// Throws Error.
[[nodiscard]] TENSORFERRY_EXPORT SafetensorsHeader
make_safetensors_header(std::span<const TensorWrite> tensors, const SafetensorsOptions& options,
                        std::span<const std::vector<std::uint64_t>> pieces = {});

// The checksum of a chunk of a tensor: of 16 MiB from the start of the tensor on, or of what is
// left at its end.
[[nodiscard]] TENSORFERRY_EXPORT std::uint64_t safetensors_checksum(
    std::span<const std::byte> chunk);

struct SafetensorsContents {
  std::vector<TensorInfo> tensors;  // by offset
  std::optional<std::map<std::string, std::string>> metadata;
};

// What the bytes of a whole file say. Throws Error as Safetensors::open() does.
[[nodiscard]] TENSORFERRY_EXPORT SafetensorsContents
parse_safetensors(std::span<const std::byte> bytes);

}  // namespace tensorferry
