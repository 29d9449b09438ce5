#include "bench/doctor/doctor.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <iterator>
#include <optional>
#include <system_error>

#include "bench/doctor/judgement.h"
#include "bench/run/owned_descriptor.h"
#include "bench/run/scratch.h"
#include "bench/run/sizes.h"
#include "bench/run/volume.h"
#include "bench/run/workload.h"
#include "tensorferry/handle.h"
#include "tensorferry/pinned_buffer.h"

namespace tensorferry::bench {

namespace {

constexpr std::size_t trial_buffer_bytes = 64 * MiB;
constexpr std::size_t trial_file_bytes = 64 * KiB;

std::vector<Finding> check_memory(const SystemTree& tree) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  LockTrial trial{.bytes = trial_buffer_bytes, .limit_bytes = limit.rlim_cur};
  std::string huge_page_problem;
  try {
    const PinnedBuffer buffer(trial_buffer_bytes);
    trial.problem = buffer.lock_reason();
    huge_page_problem = buffer.huge_page_reason();
  } catch (const Error& error) {
    trial.problem = error.what();
  }
  return {judge_memlock(trial), judge_huge_pages(huge_page_problem, tree)};
}

// Writes a file and checks that the same bytes come back past the page cache.
Finding try_direct(const Scratch& scratch) {
  Finding finding{.name = "O_DIRECT"};
  try {
    const File file = File::open(scratch.file("trial"), Access::read_write);
    const PinnedBuffer buffer(2 * trial_file_bytes);
    const auto written = buffer.bytes().first(trial_file_bytes);
    const auto read = buffer.bytes().last(trial_file_bytes);
    for (std::size_t i = 0; i < written.size(); ++i) written[i] = std::byte(i % 251 + 1);
    Handle handle;
    handle.write_now(written, file, 0, Durability::data);
    handle.read_now(read, file);
    if (!std::ranges::equal(written, read)) {
      finding.status = FindingStatus::missing;
      finding.found = "a file reads back with other bytes than were written";
      finding.advice = "do not trust this drive; run `tensorferry verify` on it";
    } else if (file.direct()) {
      finding.found = fmt::format("works; memory aligned to {}, offsets to {}",
                                  file.memory_alignment(), file.offset_alignment());
    } else {
      finding.status = FindingStatus::warning;
      finding.found = file.direct_reason() + ": the page cache copies every byte";
      finding.advice = "use a directory on ext4 or xfs";
    }
  } catch (const Error& error) {
    finding.status = FindingStatus::missing;
    finding.found = error.what();
    finding.advice = "fix this first: no tensor can move to or from this directory";
  }
  return finding;
}

// `chattr +C` does for a directory of btrfs what the mount option nodatacow does for all.
bool overwrites_in_place(const std::string& directory) {
  const OwnedDescriptor folder(directory, O_RDONLY | O_DIRECTORY);
  int flags = 0;
  return ioctl(folder.get(), FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_NOCOW_FL) != 0;
}

Finding unusable(const Error& error) {
  return {.name = "directory",
          .status = FindingStatus::missing,
          .found = std::generic_category().message(error.code()),
          .advice = error.hint()};
}

bool can_be_loaded(std::initializer_list<const char*> names) {
  return std::ranges::any_of(names, [](const char* name) {
    void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    if (library != nullptr) dlclose(library);
    return library != nullptr;
  });
}

std::vector<Finding> in_area(const std::string& area, std::vector<Finding> findings) {
  for (Finding& finding : findings) finding.area = area;
  return findings;
}

}  // namespace

const char* to_string(FindingStatus status) noexcept {
  switch (status) {
    case FindingStatus::ok:
      return "ok";
    case FindingStatus::warning:
      return "warning";
    case FindingStatus::missing:
      return "missing";
  }
  return "";
}

std::vector<Finding> check_machine(const SystemTree& tree) {
  utsname names{};
  uname(&names);
  const auto io_uring = try_engine(EngineKind::io_uring);
  std::vector<Finding> findings{
      judge_kernel(names.release),
      judge_io_uring(io_uring, tree),
      // libaio replaces io_uring, so nobody misses it if io_uring works.
      judge_libaio(try_engine(EngineKind::libaio), io_uring ? Concern::speed : Concern::nothing,
                   tree),
  };
  std::ranges::move(check_memory(tree), std::back_inserter(findings));
  return in_area("machine", std::move(findings));
}

std::vector<Finding> check_directory(const std::string& directory, const SystemTree& tree) {
  std::vector<Finding> findings;
  try {
    Volume volume = volume_of(directory);
    if (overwrites_in_place(directory)) volume.mount_options += ",nodatacow";
    findings.push_back(judge_file_system(volume));
    try {
      const Scratch scratch(directory, trial_file_bytes);
      findings.push_back(try_direct(scratch));
    } catch (const Error& error) {
      findings.insert(findings.begin(), unusable(error));
    }
    std::ranges::move(judge_drives(volume.device.number, tree), std::back_inserter(findings));
    findings.push_back(judge_space(volume));
    findings.push_back(judge_profile(volume.device));
  } catch (const Error& error) {
    findings = {unusable(error)};
  }
  return in_area(directory, std::move(findings));
}

std::vector<Finding> check_gpu(std::span<const std::string> directories, const SystemTree& tree) {
  std::vector<Volume> volumes;
  for (const std::string& directory : directories) {
    try {
      volumes.push_back(volume_of(directory));
    } catch (const Error&) {
      continue;  // check_directory reports it
    }
  }
  const GpuLibraries libraries{
      .cuda = can_be_loaded({"libcuda.so.1"}),
      .cufile = can_be_loaded({"libcufile.so.0", "/usr/local/cuda/lib64/libcufile.so.0"})};
  return in_area("gpu", judge_gpu(libraries, volumes, tree));
}

bool needs_attention(const Finding& finding) noexcept {
  return finding.status != FindingStatus::ok && finding.concern == Concern::speed;
}

Json to_json(std::span<const Finding> findings) {
  const bool attention = std::ranges::any_of(findings, needs_attention);
  Json list = Json::array();
  for (const Finding& finding : findings) {
    list.push_back({{"area", finding.area},
                    {"name", finding.name},
                    {"status", to_string(finding.status)},
                    {"found", finding.found},
                    {"advice", finding.advice},
                    {"needs_attention", needs_attention(finding)}});
  }
  return {{"format", "tensorferry-doctor"},
          {"version", 1},
          {"verdict", attention ? "attention" : "ok"},
          {"findings", list}};
}

}  // namespace tensorferry::bench
