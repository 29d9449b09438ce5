#include "checkpoint/hidden_file.h"
#include "files/open_file.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry {

NewFile::NewFile(std::unique_ptr<checkpoint::HiddenFile> hidden) : hidden_(std::move(hidden)) {}
NewFile::~NewFile() = default;
NewFile::NewFile(NewFile&&) noexcept = default;
NewFile& NewFile::operator=(NewFile&&) noexcept = default;

NewFile NewFile::create(const std::string& path, unsigned permissions) {
  return NewFile(checkpoint::HiddenFile::create(os::System::real(), path, permissions).or_throw());
}

const File& NewFile::file() const noexcept { return hidden_->file(); }
const std::string& NewFile::path() const noexcept { return hidden_->path(); }
void NewFile::reserve(std::uint64_t bytes) { hidden_->file().opened()->reserve(0, bytes, 0); }
void NewFile::commit() { hidden_->commit().or_throw(); }

}  // namespace tensorferry
