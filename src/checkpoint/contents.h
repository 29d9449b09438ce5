// An open safetensors file, or a set of them, from the inside.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "checkpoint/checksums.h"
#include "checkpoint/header.h"
#include "os/system.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry::checkpoint {

// Immutable once it is open, so thread-safe.
class Contents {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const Contents>> open(os::System& system,
                                                                    const std::string& path);

  [[nodiscard]] const std::vector<File>& files() const noexcept { return files_; }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const TensorInfo* find(std::string_view name) const noexcept;
  [[nodiscard]] const std::optional<Metadata>& metadata() const noexcept { return metadata_; }
  // The digests that a tensor should have; empty if the file does not tell.
  [[nodiscard]] const Digests& digests_of(const TensorInfo& tensor) const;
  // The names of the tensors that have bytes and no digests.
  [[nodiscard]] const std::vector<std::string_view>& unchecked() const noexcept {
    return unchecked_;
  }
  // Why the checksums of a file are of no use; empty if they are, or if there are none.
  [[nodiscard]] const std::string& checksums_problem() const noexcept { return checksums_problem_; }

 private:
  Contents() = default;
  [[nodiscard]] Status add_file(os::System& system, const std::string& path);
  // All files that the index at `path` names. Each must have the tensors that it says, and no
  // others.
  [[nodiscard]] Status add_set(os::System& system, const std::string& path);

  void index_names();

  std::vector<File> files_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, std::size_t> names_;  // of tensors_, which never changes
  std::map<std::string, Digests, std::less<>> digests_;
  std::optional<Metadata> metadata_;
  std::vector<std::string_view> unchecked_;  // names in tensors_
  std::string checksums_problem_;
};

}  // namespace tensorferry::checkpoint
