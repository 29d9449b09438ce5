#include "bench/doctor/doctor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "bench/doctor/judgement.h"
#include "bench/run/sizes.h"
#include "support/temp_dir.h"

namespace tensorferry::bench {
namespace {

namespace fs = std::filesystem;

Error refusal(int code, const std::string& operation = "io_uring_setup") {
  return Error({.operation = operation, .code = code, .hint = "a hint"});
}

// A machine made of files, into which tests plant faults.
class DoctorTest : public testing::Test {
 protected:
  DoctorTest() {
    tree_ = {.sys = temp_.file("sys"),
             .proc = temp_.file("proc"),
             .dev = temp_.file("dev"),
             .etc = temp_.file("etc")};
    for (const std::string& folder : {tree_.sys, tree_.proc, tree_.dev, tree_.etc}) {
      fs::create_directories(folder);
    }
  }

  static void plant(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << text << '\n';
  }

  // A sound NVMe drive.
  void plant_drive(const std::string& number, const std::string& name) const {
    const std::string folder = tree_.sys + "/dev/block/" + number;
    plant(folder + "/dev", number);
    plant(folder + "/uevent", "MAJOR=259\nDEVNAME=" + name + "\nDEVTYPE=disk");
    plant(folder + "/queue/scheduler", "[none] mq-deadline kyber bfq");
    plant(folder + "/queue/rotational", "0");
    plant(folder + "/queue/max_sectors_kb", "1280");
    plant(folder + "/queue/max_hw_sectors_kb", "2048");
    plant(folder + "/queue/max_segments", "127");
    plant(folder + "/queue/nr_requests", "1023");
    plant(folder + "/device/model", "FAST SSD 9000");
    plant(folder + "/device/numa_node", "-1");
  }

  void plant_fact(const std::string& number, const std::string& file,
                  const std::string& text) const {
    plant(tree_.sys + "/dev/block/" + number + "/" + file, text);
  }

  void plant_nvidia_driver() const {
    plant(tree_.proc + "/driver/nvidia/version",
          "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC");
    for (const char* node : {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"}) {
      plant(tree_.dev + "/" + node, "");
    }
  }

  static Finding named(const std::vector<Finding>& findings, const std::string& name) {
    const auto found = std::ranges::find(findings, name, &Finding::name);
    return found == findings.end() ? Finding{.found = "there is no finding " + name} : *found;
  }

  [[nodiscard]] Finding of_drives(const std::string& number, const std::string& name) const {
    return named(judge_drives(number, tree_), name);
  }

  support::TempDir temp_;
  SystemTree tree_;
};

constexpr GpuLibraries all_libraries{.cuda = true, .cufile = true};

TEST_F(DoctorTest, a_sound_drive_gives_no_warning) {
  plant_drive("259:0", "nvme0n1");
  const auto findings = judge_drives("259:0", tree_);
  EXPECT_EQ(findings.size(), 4U);
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.status, FindingStatus::ok) << finding.name << ": " << finding.found;
    EXPECT_EQ(finding.advice, "");
  }
  EXPECT_EQ(findings[0].found, "nvme0n1 FAST SSD 9000, NVMe");
  EXPECT_EQ(findings[1].found, "none");
}

TEST_F(DoctorTest, a_slow_scheduler_is_named_with_the_command_that_changes_it) {
  plant_drive("259:0", "nvme0n1");
  for (const char* slow : {"bfq", "kyber"}) {
    plant_fact("259:0", "queue/scheduler", std::string("none mq-deadline [") + slow + "]");
    const Finding finding = of_drives("259:0", "scheduler");
    EXPECT_EQ(finding.status, FindingStatus::warning);
    EXPECT_EQ(finding.found, slow);
    EXPECT_EQ(finding.advice, "as root: echo none > /sys/block/nvme0n1/queue/scheduler");
    EXPECT_TRUE(needs_attention(finding));
  }
  plant_fact("259:0", "queue/scheduler", "none [mq-deadline] kyber bfq");
  EXPECT_EQ(of_drives("259:0", "scheduler").status, FindingStatus::ok);
}

TEST_F(DoctorTest, small_requests_are_named_unless_the_drive_takes_no_more) {
  plant_drive("259:0", "nvme0n1");
  plant_fact("259:0", "queue/max_sectors_kb", "64");
  const Finding finding = of_drives("259:0", "queue");
  EXPECT_EQ(finding.status, FindingStatus::warning);
  EXPECT_EQ(finding.advice, "as root: echo 1024 > /sys/block/nvme0n1/queue/max_sectors_kb");
  plant_fact("259:0", "queue/max_hw_sectors_kb", "64");
  EXPECT_EQ(of_drives("259:0", "queue").status, FindingStatus::ok);
}

TEST_F(DoctorTest, a_spinning_drive_is_named_but_not_a_virtual_one_that_claims_to_spin) {
  plant_drive("8:0", "sda");
  plant_fact("8:0", "queue/rotational", "1");
  EXPECT_EQ(of_drives("8:0", "drive").status, FindingStatus::warning);
  plant_fact("8:0", "device/vendor", "QEMU");
  EXPECT_EQ(of_drives("8:0", "drive").status, FindingStatus::ok);
  plant_drive("254:0", "vda");
  plant_fact("254:0", "queue/rotational", "1");
  EXPECT_EQ(of_drives("254:0", "drive").status, FindingStatus::ok);
}

TEST_F(DoctorTest, the_drives_under_a_stack_are_asked) {
  plant_drive("259:0", "nvme0n1");
  plant_drive("259:4", "nvme1n1");
  plant_fact("259:4", "queue/scheduler", "none [bfq]");
  plant_fact("9:0", "dev", "9:0");
  plant_fact("9:0", "uevent", "DEVNAME=md0");
  plant_fact("9:0", "slaves/nvme0n1/dev", "259:0");
  plant_fact("9:0", "slaves/nvme1n1/dev", "259:4");
  EXPECT_EQ(of_drives("9:0", "drive").found,
            "nvme0n1 FAST SSD 9000, NVMe; nvme1n1 FAST SSD 9000, NVMe");
  const Finding scheduler = of_drives("9:0", "scheduler");
  EXPECT_EQ(scheduler.found, "nvme0n1: none; nvme1n1: bfq");
  EXPECT_EQ(scheduler.advice, "as root: echo none > /sys/block/nvme1n1/queue/scheduler");
}

TEST_F(DoctorTest, processors_far_from_the_drive_are_told) {
  plant_drive("259:0", "nvme0n1");
  const std::string nodes = tree_.sys + "/devices/system/node/";
  plant(nodes + "node0/cpulist", "900-915");
  EXPECT_EQ(of_drives("259:0", "NUMA").status, FindingStatus::ok) << "one node";
  plant(nodes + "node1/cpulist", "916-931");
  EXPECT_EQ(of_drives("259:0", "NUMA").status, FindingStatus::ok) << "the node is not known";
  plant_fact("259:0", "device/numa_node", "1");
  const Finding far = of_drives("259:0", "NUMA");
  EXPECT_EQ(far.status, FindingStatus::warning);
  EXPECT_EQ(far.found, "node 1 of 2, near processors 916-931");
  EXPECT_NE(far.advice.find("--cpunodebind=1"), std::string::npos);
  plant(nodes + "node1/cpulist", "916-931,0-899");
  EXPECT_EQ(of_drives("259:0", "NUMA").status, FindingStatus::ok);
}

TEST_F(DoctorTest, no_block_device_needs_no_attention) {
  EXPECT_FALSE(needs_attention(of_drives("", "drive")));
  EXPECT_FALSE(needs_attention(of_drives("7:7", "drive")));
}

TEST_F(DoctorTest, the_reason_why_io_uring_is_refused_is_told) {
  EXPECT_EQ(judge_io_uring({}, tree_).status, FindingStatus::ok);
  plant(tree_.proc + "/sys/kernel/io_uring_disabled", "2");
  const Finding disabled = judge_io_uring(refusal(EPERM), tree_);
  EXPECT_EQ(disabled.status, FindingStatus::missing);
  EXPECT_NE(disabled.found.find("kernel.io_uring_disabled is 2"), std::string::npos);
  EXPECT_EQ(disabled.advice, "as root: sysctl -w kernel.io_uring_disabled=0");
  EXPECT_EQ(judge_io_uring(refusal(EPERM, "io_uring_enter"), tree_).advice, "a hint")
      << "no sysctl refuses this call";
  plant(tree_.proc + "/sys/kernel/io_uring_disabled", "0");
  plant(tree_.proc + "/self/status", "Name:\tx\nSeccomp:\t2");
  EXPECT_NE(judge_io_uring(refusal(EPERM, "io_uring_enter"), tree_).found.find("io_uring_enter"),
            std::string::npos);
  EXPECT_NE(judge_io_uring(refusal(EPERM), tree_).found.find("seccomp"), std::string::npos);
  EXPECT_NE(judge_io_uring(refusal(ENOMEM), tree_).advice.find("ulimit -l"), std::string::npos);
  EXPECT_EQ(judge_io_uring(refusal(EIO), tree_).advice, "a hint");
}

TEST_F(DoctorTest, libaio_near_its_limit_is_told) {
  plant(tree_.proc + "/sys/fs/aio-max-nr", "65536");
  plant(tree_.proc + "/sys/fs/aio-nr", "0");
  EXPECT_EQ(judge_libaio({}, Concern::speed, tree_).status, FindingStatus::ok);
  plant(tree_.proc + "/sys/fs/aio-nr", "65000");
  EXPECT_EQ(judge_libaio({}, Concern::speed, tree_).status, FindingStatus::warning);
  plant(tree_.proc + "/sys/fs/aio-nr", "65536");
  const Finding full = judge_libaio(refusal(EAGAIN), Concern::speed, tree_);
  EXPECT_EQ(full.status, FindingStatus::missing);
  EXPECT_EQ(full.found, "65536 of 65536 requests in use");
  EXPECT_EQ(full.advice, "as root: sysctl -w fs.aio-max-nr=1048576");
  EXPECT_FALSE(needs_attention(judge_libaio(refusal(EAGAIN), Concern::nothing, tree_)));
}

TEST_F(DoctorTest, huge_pages_that_are_switched_off_are_told) {
  const std::string file = tree_.sys + "/kernel/mm/transparent_hugepage/enabled";
  plant(file, "always [madvise] never");
  EXPECT_EQ(judge_huge_pages("", tree_).status, FindingStatus::ok);
  EXPECT_FALSE(needs_attention(judge_huge_pages("memory is fragmented", tree_)));
  plant(file, "always madvise [never]");
  const Finding off = judge_huge_pages("", tree_);
  EXPECT_TRUE(needs_attention(off));
  EXPECT_EQ(off.advice, "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
}

TEST_F(DoctorTest, an_old_kernel_is_told) {
  EXPECT_EQ(judge_kernel("6.1.0-18-amd64").status, FindingStatus::ok);
  EXPECT_EQ(judge_kernel("5.11.0").status, FindingStatus::ok);
  EXPECT_EQ(judge_kernel("5.10.0-28-amd64").status, FindingStatus::warning);
  EXPECT_EQ(judge_kernel("5.4.0-150-generic").status, FindingStatus::warning);
  EXPECT_EQ(judge_kernel("4.18.0-553.el8").status, FindingStatus::warning);
}

TEST_F(DoctorTest, a_low_memlock_limit_is_told_with_its_number) {
  const Finding low = judge_memlock(
      {.bytes = 64 * MiB, .limit_bytes = 8 * MiB, .problem = "mlock: over the limit"});
  EXPECT_EQ(low.status, FindingStatus::warning);
  EXPECT_EQ(low.found, "64 MiB cannot be locked; limit 8 MiB");
  EXPECT_NE(low.advice.find("LimitMEMLOCK"), std::string::npos);
  const Finding root = judge_memlock({.bytes = 64 * MiB, .limit_bytes = 8 * MiB, .problem = ""});
  EXPECT_EQ(root.status, FindingStatus::ok);
  EXPECT_NE(root.found.find("privileged"), std::string::npos);
  EXPECT_EQ(judge_memlock({.bytes = 64 * MiB, .limit_bytes = RLIM_INFINITY, .problem = ""}).found,
            "64 MiB can be locked; no limit");
}

TEST_F(DoctorTest, file_systems_that_cost_speed_are_told) {
  const auto judged = [](const char* kind, const char* options) {
    Volume volume;
    volume.mount_point = "/m";
    volume.file_system = kind;
    volume.mount_options = options;
    return judge_file_system(volume).status;
  };
  EXPECT_EQ(judged("ext4", "rw,relatime"), FindingStatus::ok);
  EXPECT_EQ(judged("xfs", "rw,noatime"), FindingStatus::ok);
  EXPECT_EQ(judged("btrfs", "rw,nodatacow"), FindingStatus::ok);
  EXPECT_EQ(judged("btrfs", "rw,relatime"), FindingStatus::warning);
  EXPECT_EQ(judged("btrfs", "rw,compress=zstd:3"), FindingStatus::warning);
  EXPECT_EQ(judged("ext4", "rw,sync"), FindingStatus::warning);
  EXPECT_EQ(judged("ext4", "ro"), FindingStatus::missing);
  for (const char* kind : {"tmpfs", "nfs4", "fuse.sshfs", "overlay"}) {
    EXPECT_EQ(judged(kind, "rw"), FindingStatus::warning) << kind;
  }
}

TEST_F(DoctorTest, little_space_is_told) {
  Volume volume;
  volume.bytes = 1000 * GiB;
  volume.free_bytes = 200 * GiB;
  EXPECT_EQ(judge_space(volume).status, FindingStatus::ok);
  volume.free_bytes = 99 * GiB;
  EXPECT_EQ(judge_space(volume).status, FindingStatus::warning);
  volume.bytes = 4 * GiB;
  volume.free_bytes = 2 * GiB - 1;
  EXPECT_EQ(judge_space(volume).status, FindingStatus::warning);
}

TEST_F(DoctorTest, a_machine_without_a_gpu_needs_no_attention) {
  for (const Finding& finding : judge_gpu({}, {}, tree_)) {
    EXPECT_EQ(finding.status, FindingStatus::missing) << finding.name;
    EXPECT_FALSE(needs_attention(finding)) << finding.name;
  }
}

TEST_F(DoctorTest, a_gpu_without_nvidia_fs_is_in_compat_mode) {
  plant_nvidia_driver();
  const auto findings = judge_gpu(all_libraries, {}, tree_);
  EXPECT_EQ(named(findings, "CUDA").status, FindingStatus::ok);
  EXPECT_EQ(named(findings, "CUDA").found, "driver 550.54.15, 2 GPUs");
  const Finding storage = named(findings, "GDS");
  EXPECT_TRUE(needs_attention(storage));
  EXPECT_NE(storage.found.find("compat mode"), std::string::npos);
  EXPECT_NE(storage.advice.find("modprobe nvidia-fs"), std::string::npos);
  plant(tree_.etc + "/cufile.json",
        "{\n // NVIDIA's has comments\n \"properties\": {\"allow_compat_mode\": false}}");
  EXPECT_NE(named(judge_gpu(all_libraries, {}, tree_), "GDS").found.find("forbids"),
            std::string::npos);
}

TEST_F(DoctorTest, libraries_of_the_gpu_that_are_missing_are_told) {
  plant_nvidia_driver();
  for (const Finding& finding : judge_gpu({}, {}, tree_)) {
    EXPECT_EQ(finding.status, FindingStatus::missing) << finding.name;
    EXPECT_TRUE(needs_attention(finding)) << finding.name;
  }
}

TEST_F(DoctorTest, gpudirect_storage_needs_its_module_and_a_file_system_it_knows) {
  plant_nvidia_driver();
  plant(tree_.proc + "/driver/nvidia-fs/version", "version: 2.19");
  plant(tree_.dev + "/nvidia-fs0", "");
  std::vector<Volume> volumes(1);
  volumes[0].directory = "/mnt/nvme";
  volumes[0].file_system = "ext4";
  volumes[0].mount_options = "rw,relatime";
  const auto judged = [&] { return named(judge_gpu(all_libraries, volumes, tree_), "GDS"); };
  EXPECT_EQ(judged().status, FindingStatus::ok);
  EXPECT_EQ(judged().found, "version: 2.19");
  volumes[0].mount_options = "rw,data=writeback";
  EXPECT_EQ(judged().status, FindingStatus::warning);
  volumes[0].file_system = "btrfs";
  EXPECT_EQ(judged().found, "compat mode, through memory in /mnt/nvme");
}

TEST_F(DoctorTest, a_directory_is_left_as_it_was_found) {
  const auto findings = check_directory(temp_.path());
  EXPECT_NE(named(findings, "O_DIRECT").status, FindingStatus::missing);
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(temp_.path())) ++entries;
  EXPECT_EQ(entries, 4U) << "sys, proc, dev and etc";
}

TEST_F(DoctorTest, a_missing_directory_is_a_finding) {
  const auto findings = check_directory(temp_.file("nowhere"));
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].status, FindingStatus::missing);
  EXPECT_EQ(findings[0].area, temp_.file("nowhere"));
  EXPECT_TRUE(needs_attention(findings[0]));
}

}  // namespace
}  // namespace tensorferry::bench
