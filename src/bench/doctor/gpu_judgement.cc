// CUDA and GPUDirect Storage (GDS), from the files of their drivers. Starts no driver.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench/doctor/judgement.h"

namespace tensorferry::bench {

namespace {

namespace fs = std::filesystem;

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 ..." -> "550.54.15"
std::string driver_version(const SystemTree& tree) {
  std::istringstream words(first_line(tree.proc + "/driver/nvidia/version"));
  std::string last;
  for (std::string word; words >> word; last = word) {
    const bool number = std::isdigit(static_cast<unsigned char>(word.front())) != 0;
    if (number && word.find('.') != std::string::npos) return word;
  }
  return last.empty() ? "" : "of an unknown version";
}

Finding judge_cuda(const GpuLibraries& libraries, const SystemTree& tree) {
  Finding finding{.name = "CUDA"};
  const std::string version = driver_version(tree);
  const std::size_t gpus = count_numbered(tree.dev, "nvidia");
  if (version.empty()) {
    finding.status = FindingStatus::missing;
    finding.found = "no NVIDIA driver";
    finding.advice = "needed only for tensors on a GPU";
    finding.concern = Concern::nothing;
    return finding;
  }
  finding.found = fmt::format("driver {}, {} GPU{}", version, gpus, gpus == 1 ? "" : "s");
  if (gpus == 0) {
    finding.status = FindingStatus::missing;
    finding.advice =
        "/dev/nvidia0 is missing: start the container with --gpus all, or run "
        "nvidia-smi once as root";
  } else if (!libraries.cuda) {
    finding.status = FindingStatus::missing;
    finding.found += ", but libcuda.so.1 cannot be loaded";
    finding.advice = "install the driver's libraries, or start the container with --gpus all";
  }
  return finding;
}

// In compat mode cuFile goes through memory. It may, unless its file of settings forbids it.
bool compat_mode_allowed(const SystemTree& tree) {
  const char* chosen = secure_getenv("CUFILE_ENV_PATH_JSON");
  std::ifstream file(chosen != nullptr ? std::string(chosen) : tree.etc + "/cufile.json");
  const Json settings = Json::parse(file, nullptr, false, true);  // NVIDIA's file has comments
  const Json::json_pointer name("/properties/allow_compat_mode");
  if (settings.is_discarded() || !settings.contains(name)) return true;
  const Json& allowed = settings.at(name);
  return !allowed.is_boolean() || allowed.get<bool>();
}

// GPUDirect Storage reaches drives under ext4 with ordered data, and under xfs.
bool reached_by_gds(const Volume& volume) {
  if (volume.file_system == "xfs") return true;
  return volume.file_system == "ext4" &&
         volume.mount_options.find("data=journal") == std::string::npos &&
         volume.mount_options.find("data=writeback") == std::string::npos;
}

Finding judge_gds(const GpuLibraries& libraries, std::span<const Volume> volumes,
                  const SystemTree& tree) {
  Finding finding{.name = "GDS"};
  const bool has_gpu = !driver_version(tree).empty();
  std::string module = first_line(tree.proc + "/driver/nvidia-fs/version");
  if (module.empty() && fs::exists(tree.sys + "/module/nvidia_fs")) module = "nvidia-fs is loaded";
  if (!has_gpu) {
    finding.status = FindingStatus::missing;
    finding.found = "no NVIDIA driver";
    finding.advice = "needed only for transfers between a drive and a GPU";
    finding.concern = Concern::nothing;
    return finding;
  }
  const char* compat = compat_mode_allowed(tree)
                           ? "compat mode, through memory"
                           : "refused, because cufile.json forbids compat mode";
  if (!libraries.cufile) {
    finding.status = FindingStatus::missing;
    finding.found = "libcufile.so.0 cannot be loaded";
    finding.advice =
        "install CUDA's GDS package (nvidia-gds); only programs that have loaded torch find the "
        "library from pip (nvidia-cufile)";
  } else if (module.empty()) {
    finding.status = FindingStatus::warning;
    finding.found = fmt::format("the module nvidia-fs is not loaded: {}", compat);
    finding.advice = "install nvidia-fs-dkms, then as root: modprobe nvidia-fs";
  } else if (count_numbered(tree.dev, "nvidia-fs") == 0) {
    finding.status = FindingStatus::warning;
    finding.found = fmt::format("/dev/nvidia-fs0 is missing: {}", compat);
    finding.advice = "give the container the devices /dev/nvidia-fs*";
  } else {
    std::vector<std::string> out_of_reach;
    for (const Volume& volume : volumes) {
      if (!reached_by_gds(volume)) out_of_reach.push_back(volume.directory);
    }
    finding.found = module;
    if (!out_of_reach.empty()) {
      finding.status = FindingStatus::warning;
      finding.found = fmt::format("{} in {}", compat, fmt::join(out_of_reach, ", "));
      finding.advice = "use ext4 (data=ordered) or xfs on an NVMe drive";
    }
  }
  return finding;
}

}  // namespace

std::vector<Finding> judge_gpu(const GpuLibraries& libraries, std::span<const Volume> volumes,
                               const SystemTree& tree) {
  return {judge_cuda(libraries, tree), judge_gds(libraries, volumes, tree)};
}

}  // namespace tensorferry::bench
