// Writes a safetensors file: the tensors first, then the header, which has their checksums.
#include <cerrno>
#include <chrono>
#include <memory>
#include <utility>

#include "checkpoint/checksums.h"
#include "checkpoint/digester.h"
#include "checkpoint/hidden_file.h"
#include "checkpoint/new_header.h"
#include "handle/conductor.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry {

namespace checkpoint {

namespace {

constexpr std::chrono::milliseconds progress_pause{100};

Error refuse(const std::string& path, std::string hint) {
  return Error({.operation = "save", .path = path, .code = EINVAL, .hint = std::move(hint)});
}

// Ends the operation, so that nobody uses its memory any more.
void give_up(const Operation& operation) {
  operation.cancel();
  try {
    operation.wait();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the caller has given up
  }
}

// Asks the user whether to go on. If that throws, ends the operation first.
bool ask(const Progress& progress, const Operation& operation, std::uint64_t total_bytes) {
  try {
    return progress(operation.bytes(), total_bytes);
  } catch (...) {
    give_up(operation);
    throw;
  }
}

// Waits for the operation. Ends it when the user gives up.
void wait_for(const Operation& operation, const std::string& path, std::uint64_t total_bytes,
              const Progress& progress) {
  if (!progress) return operation.wait();
  bool given_up = false;
  while (!given_up && !operation.wait_for(progress_pause)) {
    given_up = !ask(progress, operation, total_bytes);
  }
  if (given_up) give_up(operation);
  // Done. wait_for() has thrown if it failed otherwise.
  if (given_up || !progress(total_bytes, total_bytes)) {
    throw Error({.operation = "save",
                 .path = path,
                 .code = ECANCELED,
                 .hint = "the caller gave up; the old file is unchanged"});
  }
}

std::vector<NewTensor> described(std::span<const TensorWrite> tensors) {
  std::vector<NewTensor> all;
  for (const TensorWrite& tensor : tensors) {
    all.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return all;
}

void check_sizes(const std::string& path, std::span<const TensorWrite> tensors) {
  for (const TensorWrite& tensor : tensors) {
    const std::uint64_t bytes = tensor_bytes(tensor.dtype, tensor.shape).or_throw();
    if (tensor.memory.size() != bytes) {
      throw refuse(path, "tensor '" + tensor.name + "' has " + std::to_string(bytes) +
                             " bytes by its shape, and the memory has " +
                             std::to_string(tensor.memory.size()));
    }
  }
}

void check_metadata(const std::string& path, const SafetensorsOptions& options) {
  if (options.metadata && options.metadata->contains(std::string(checksums_key))) {
    throw refuse(path, "the metadata must not have the key " + std::string(checksums_key) +
                           ": checksums are kept there");
  }
}

// The header with these digests of the tensors.
NewHeader header_with(std::span<const TensorWrite> tensors, const SafetensorsOptions& options,
                      const std::vector<Digests>& digests) {
  std::vector<TensorDigests> of_tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    of_tensors.push_back({tensors[i].name, digests[i]});
  }
  Metadata entries = options.metadata.value_or(Metadata{});
  entries[std::string(checksums_key)] = write_checksums(of_tensors);
  return make_header(described(tensors), entries, options.alignment).or_throw();
}

NewHeader header_without(std::span<const TensorWrite> tensors, const SafetensorsOptions& options) {
  return make_header(described(tensors), options.metadata, options.alignment).or_throw();
}

}  // namespace

}  // namespace checkpoint

SafetensorsHeader make_safetensors_header(std::span<const TensorWrite> tensors,
                                          const SafetensorsOptions& options,
                                          std::span<const std::vector<std::uint64_t>> pieces) {
  using namespace checkpoint;
  NewHeader made;
  if (pieces.empty()) {
    made = header_without(tensors, options);
  } else {
    check_metadata({}, options);
    if (pieces.size() != tensors.size()) {
      throw refuse({}, "each tensor needs the checksums of its pieces");
    }
    std::vector<Digests> digests;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto bytes = tensor_bytes(tensors[i].dtype, tensors[i].shape).or_throw();
      if (pieces[i].size() != (bytes + checksum_piece_bytes - 1) / checksum_piece_bytes) {
        throw refuse({}, "tensor '" + tensors[i].name + "' needs a checksum for each 64 KiB");
      }
      digests.push_back(digests_of_pieces(pieces[i]));
    }
    made = header_with(tensors, options, digests);
  }
  return {std::move(made.bytes), std::move(made.order)};
}

void save_safetensors(Handle& handle, const std::string& path, std::span<const TensorWrite> tensors,
                      const SafetensorsOptions& options) {
  using namespace checkpoint;
  check_sizes(path, tensors);
  check_metadata(path, options);
  // Digests have a fixed width: the header is as long with those that are not known yet.
  std::vector<Digests> digests;
  for (const TensorWrite& tensor : tensors) digests.emplace_back(chunk_count(tensor.memory.size()));
  const auto header_now = [&] {
    return options.checksums ? header_with(tensors, options, digests)
                             : header_without(tensors, options);
  };
  const NewHeader header = header_now();
  auto& system = handle.conductor().system();
  const auto hidden = HiddenFile::create(system, path, options.permissions).or_throw();

  std::vector<handle::Part> parts;
  std::vector<WatchedTensor> watched;
  std::uint64_t offset = header.bytes.size();
  for (const std::size_t index : header.order) {
    const TensorWrite& tensor = tensors[index];
    parts.push_back(handle::part_of(tensor.memory, hidden->file(), offset, tensor.stream));
    watched.push_back({tensor.name, hidden->file().opened(), offset, tensor.memory.size()});
    offset += tensor.memory.size();
  }
  const auto digester = options.checksums ? std::make_shared<Digester>(watched) : nullptr;
  const Operation written = handle.conductor()
                                .transfer(handle::Direction::write, parts, Durability::none,
                                          handle::Caller::goes_on, digester)
                                .or_throw();
  wait_for(written, path, header.data_bytes, options.progress);
  if (digester != nullptr) {
    for (std::size_t i = 0; i < watched.size(); ++i) digests[header.order[i]] = digester->of(i);
  }
  const NewHeader whole = options.checksums ? header_now() : header;
  handle.write_now(std::as_bytes(std::span(whole.bytes)), hidden->file());
  hidden->commit().or_throw();
}

}  // namespace tensorferry
