// Devices from fake sysfs trees and mount tables, and one look at the real machine.
#include "files/device.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <filesystem>
#include <fstream>
#include <stop_token>
#include <string>
#include <thread>

#include "base/alignment.h"
#include "support/temp_dir.h"

namespace tensorferry::files {
namespace {

namespace fs = std::filesystem;

struct Queue {
  std::string sectors_kb_max = {};  // empty: no such file
  std::string segments_max = {};
  std::string logical_block = "512";
  std::string requests = {};
  std::string segment_bytes_max = {};
  std::string poll = {};
};

// A sysfs with the folders that the kernel makes: devices below /devices, links elsewhere.
class FakeTree {
 public:
  FakeTree() { mountinfo(""); }

  void disk(const std::string& name, const std::string& number, const Queue& queue) {
    const fs::path folder = make(root_ / "sys/devices/block" / name, name, number);
    write(folder / "queue/max_sectors_kb", queue.sectors_kb_max);
    write(folder / "queue/max_segments", queue.segments_max);
    write(folder / "queue/logical_block_size", queue.logical_block);
    write(folder / "queue/nr_requests", queue.requests);
    write(folder / "queue/max_segment_size", queue.segment_bytes_max);
    write(folder / "queue/io_poll", queue.poll);
  }

  void partition(const std::string& disk_name, const std::string& name, const std::string& number) {
    const fs::path folder = make(root_ / "sys/devices/block" / disk_name / name, name, number);
    write(folder / "partition", "1");
  }

  // `upper` consists of `lower` and others.
  void slave(const std::string& upper, const std::string& lower) {
    const fs::path folder = root_ / "sys/devices/block" / upper / "slaves";
    fs::create_directories(folder);
    fs::create_symlink(fs::canonical(root_ / "sys/class/block" / lower), folder / lower);
  }

  void backing_file(const std::string& loop, const std::string& path) {
    write(root_ / "sys/devices/block" / loop / "loop/backing_file", path);
  }

  // The machine has these NUMA nodes.
  void nodes(const std::string& list) { write(root_ / "sys/devices/system/node/online", list); }

  // A device that is no block device, as a bus or a controller. Names have slashes.
  void device(const std::string& name, const std::string& numa_node) {
    fs::create_directories(root_ / "sys/devices" / name);
    write(root_ / "sys/devices" / name / "numa_node", numa_node);
  }

  void driver(const std::string& name, const std::string& driver) {
    fs::create_directories(root_ / "sys/bus/drivers" / driver);
    fs::create_directories(root_ / "sys/devices" / name);
    fs::create_directory_symlink(root_ / "sys/bus/drivers" / driver,
                                 root_ / "sys/devices" / name / "driver");
  }

  // Such a device has the disk.
  void attach(const std::string& disk, const std::string& device) {
    fs::create_directory_symlink(root_ / "sys/devices" / device,
                                 root_ / "sys/devices/block" / disk / "device");
  }

  void controller(const std::string& subsystem, const std::string& device) {
    fs::create_directory_symlink(root_ / "sys/devices" / device,
                                 root_ / "sys/devices" / subsystem / fs::path(device).filename());
  }

  void mountinfo(const std::string& text) { write(root_ / "mountinfo", text + "\n"); }

  [[nodiscard]] Device inspect(unsigned major, unsigned minor) const {
    return inspect_device(major, minor, tree());
  }
  [[nodiscard]] SystemTree tree() const {
    return {(root_ / "sys").string(), (root_ / "mountinfo").string()};
  }
  [[nodiscard]] std::string root() const { return root_.string(); }

 private:
  static void write(const fs::path& path, const std::string& text) {
    if (text.empty()) return;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }

  fs::path make(const fs::path& folder, const std::string& name, const std::string& number) {
    write(folder / "dev", number);
    write(folder / "uevent", "MAJOR=0\nDEVNAME=" + name + "\nDEVTYPE=disk");
    fs::create_directories(root_ / "sys/dev/block");
    fs::create_directories(root_ / "sys/class/block");
    fs::create_symlink(folder, root_ / "sys/dev/block" / number);
    fs::create_symlink(folder, root_ / "sys/class/block" / name);
    return folder;
  }

  const support::TempDir dir_;
  const fs::path root_ = dir_.path();
};

// The number of the device that really holds `path`, in the form of sysfs.
std::string real_number_of(const std::string& path) {
  struct stat facts{};
  EXPECT_EQ(stat(path.c_str(), &facts), 0);
  return std::to_string(major(facts.st_dev)) + ":" + std::to_string(minor(facts.st_dev));
}

void expect_nothing_known(const Device& device) {
  EXPECT_EQ(device.name, "");
  EXPECT_EQ(device.logical_block_bytes, 0u);
  EXPECT_EQ(device.request_bytes_max, 0u);
  EXPECT_EQ(device.block_bytes, 512 * KiB);
  EXPECT_EQ(device.huge_page_block_bytes, 512 * KiB);
}

TEST(Device, prefers_huge_pages_if_its_disks_are_virtio_disks) {
  FakeTree tree;
  tree.driver("virtio0", "virtio_blk");
  tree.driver("nvme0", "nvme");
  tree.disk("vda", "254:0", {});
  tree.attach("vda", "virtio0");
  tree.partition("vda", "vda1", "254:1");
  tree.disk("dm-0", "253:0", {});
  tree.slave("dm-0", "vda");
  tree.disk("nvme0n1", "259:0", {});
  tree.attach("nvme0n1", "nvme0");
  EXPECT_TRUE(tree.inspect(254, 0).prefers_huge_pages);
  EXPECT_TRUE(tree.inspect(254, 1).prefers_huge_pages) << "a partition of it";
  EXPECT_TRUE(tree.inspect(253, 0).prefers_huge_pages) << "a volume on it";
  EXPECT_FALSE(tree.inspect(259, 0).prefers_huge_pages);
}

TEST(Device, does_not_prefer_huge_pages_if_it_is_a_loop_device_on_a_virtio_disk) {
  FakeTree tree;
  const std::string file = tree.root() + "/image";
  std::ofstream(file) << "image";
  tree.driver("virtio0", "virtio_blk");
  tree.disk("vda", real_number_of(file), {});
  tree.attach("vda", "virtio0");
  tree.disk("loop0", "7:0", {});
  tree.backing_file("loop0", file);
  EXPECT_FALSE(tree.inspect(7, 0).prefers_huge_pages);
}

TEST(Device, has_polled_queues_if_its_disk_says_so) {
  FakeTree tree;
  tree.disk("nvme0n1", "259:0", {.poll = "1"});
  tree.partition("nvme0n1", "nvme0n1p1", "259:1");
  tree.disk("nvme1n1", "259:2", {.poll = "0"});
  tree.disk("vda", "254:0", {});
  EXPECT_TRUE(tree.inspect(259, 0).polled_queues);
  EXPECT_TRUE(tree.inspect(259, 1).polled_queues);
  EXPECT_FALSE(tree.inspect(259, 2).polled_queues);
  EXPECT_FALSE(tree.inspect(254, 0).polled_queues);
}

TEST(Device, plain_disk_is_limited_by_sectors) {
  FakeTree tree;
  tree.disk("nvme0n1", "259:0", {"512", "65535"});
  const Device device = tree.inspect(259, 0);
  EXPECT_EQ(device.name, "nvme0n1");
  EXPECT_EQ(device.logical_block_bytes, 512u);
  EXPECT_EQ(device.request_bytes_max, 512 * KiB);
  EXPECT_EQ(device.block_bytes, 512 * KiB);
}

TEST(Device, plain_disk_is_limited_by_segments) {
  FakeTree tree;
  tree.disk("vda", "254:0", {"4096", "254", "4096"});
  const Device device = tree.inspect(254, 0);
  EXPECT_EQ(device.logical_block_bytes, 4096u);
  EXPECT_EQ(device.request_bytes_max, 254u * 4096u);
  EXPECT_EQ(device.block_bytes, 512 * KiB);
}

// A huge page needs one entry of a request; the same bytes in usual pages need 512.
TEST(Device, requests_of_huge_pages_are_limited_by_sectors_and_by_large_segments) {
  FakeTree tree;
  unsigned minor = 0;
  const auto huge_page_block_bytes = [&](const Queue& queue) {
    const std::string number = std::to_string(++minor);
    tree.disk("vd" + number, "254:" + number, queue);
    const Device device = tree.inspect(254, minor);
    EXPECT_GE(device.huge_page_block_bytes, device.block_bytes);
    return device.huge_page_block_bytes;
  };
  const Queue few_segments = {.sectors_kb_max = "4096", .segments_max = "254"};
  EXPECT_EQ(huge_page_block_bytes(few_segments), 4 * MiB);
  Queue queue = few_segments;
  queue.segment_bytes_max = "4294967295";
  EXPECT_EQ(huge_page_block_bytes(queue), 4 * MiB);
  queue.sectors_kb_max = "32768";
  EXPECT_EQ(huge_page_block_bytes(queue), 4 * MiB);
  queue = few_segments;
  queue.segment_bytes_max = "4096";
  EXPECT_EQ(huge_page_block_bytes(queue), 512 * KiB);
  queue.segment_bytes_max = "8192";
  EXPECT_EQ(huge_page_block_bytes(queue), 1 * MiB);
  queue = {.sectors_kb_max = "1280", .segments_max = "65535", .segment_bytes_max = "65536"};
  EXPECT_EQ(huge_page_block_bytes(queue), 1 * MiB);
  queue.sectors_kb_max = "128";
  EXPECT_EQ(huge_page_block_bytes(queue), 256 * KiB);
}

// The smallest limit in a stack of devices counts.
TEST(Device, requests_of_huge_pages_are_limited_by_every_device_of_a_stack) {
  FakeTree tree;
  tree.disk("nvme0n1", "259:0", {"1024", "65535"});
  tree.disk("md0", "9:0", {"4096", "65535"});
  tree.slave("md0", "nvme0n1");
  EXPECT_EQ(tree.inspect(9, 0).huge_page_block_bytes, 1 * MiB);
}

TEST(Device, block_bytes_stay_between_256_KiB_and_1_MiB) {
  FakeTree tree;
  tree.disk("small", "8:0", {"128", "65535"});
  tree.disk("large", "8:16", {"32767", "65535"});
  tree.disk("exact", "8:32", {"1024", "256"});
  EXPECT_EQ(tree.inspect(8, 0).request_bytes_max, 128 * KiB);
  EXPECT_EQ(tree.inspect(8, 0).block_bytes, 256 * KiB);
  EXPECT_EQ(tree.inspect(8, 16).block_bytes, 1 * MiB);
  EXPECT_EQ(tree.inspect(8, 32).block_bytes, 1 * MiB);
}

TEST(Device, depth_keeps_16_MiB_in_flight_but_no_more_than_the_queue_holds) {
  FakeTree tree;
  tree.disk("sda", "8:0", {.sectors_kb_max = "256", .segments_max = "", .requests = "1023"});
  tree.disk("sdb", "8:16", {.sectors_kb_max = "1024", .segments_max = "", .requests = "256"});
  tree.disk("sdc", "8:32", {.sectors_kb_max = "512", .segments_max = "", .requests = "8"});
  tree.disk("sdd", "8:48", {.sectors_kb_max = "512", .segments_max = "", .requests = "1"});
  EXPECT_EQ(tree.inspect(8, 0).queue_depth, 64u);
  EXPECT_EQ(tree.inspect(8, 16).queue_depth, 16u);
  EXPECT_EQ(tree.inspect(8, 32).queue_depth, 8u);
  EXPECT_EQ(tree.inspect(8, 48).queue_depth, 4u);
}

TEST(Device, each_disk_of_a_stack_is_counted_once_and_adds_depth) {
  FakeTree tree;
  for (const char* digit : {"0", "1", "2"}) {
    tree.disk(std::string("nvme") + digit, std::string("259:") + digit, {.sectors_kb_max = "512"});
  }
  tree.partition("nvme2", "nvme2p1", "259:8");
  tree.partition("nvme2", "nvme2p2", "259:9");
  tree.disk("md0", "9:0", {.sectors_kb_max = "512"});
  for (const char* lower : {"nvme0", "nvme1", "nvme2p1", "nvme2p2"}) tree.slave("md0", lower);
  EXPECT_EQ(tree.inspect(9, 0).disks, 3u);
  EXPECT_EQ(tree.inspect(9, 0).queue_depth, 96u);
}

TEST(Device, partition_uses_the_queue_and_the_name_of_its_disk) {
  FakeTree tree;
  tree.disk("nvme0n1", "259:0", {"1280", "256"});
  tree.partition("nvme0n1", "nvme0n1p2", "259:2");
  const Device device = tree.inspect(259, 2);
  EXPECT_EQ(device.name, "nvme0n1");
  EXPECT_EQ(device.request_bytes_max, 1 * MiB);
}

TEST(Device, md_takes_the_smallest_of_its_disks) {
  FakeTree tree;
  tree.disk("nvme0n1", "259:0", {"1024", "512", "512"});
  tree.disk("nvme1n1", "259:1", {"256", "512", "4096"});
  tree.disk("md0", "9:0", {"2048", ""});
  tree.slave("md0", "nvme0n1");
  tree.slave("md0", "nvme1n1");
  const Device device = tree.inspect(9, 0);
  EXPECT_EQ(device.name, "md0");
  EXPECT_EQ(device.request_bytes_max, 256 * KiB);
  EXPECT_EQ(device.logical_block_bytes, 4096u);
}

TEST(Device, dm_over_md_over_partitions_is_followed_to_the_disks) {
  FakeTree tree;
  tree.disk("nvme0n1", "259:0", {"512", ""});
  tree.disk("nvme1n1", "259:1", {"1024", ""});
  tree.partition("nvme0n1", "nvme0n1p1", "259:2");
  tree.partition("nvme1n1", "nvme1n1p1", "259:3");
  tree.disk("md0", "9:0", {"", ""});
  tree.slave("md0", "nvme0n1p1");
  tree.slave("md0", "nvme1n1p1");
  tree.disk("dm-0", "252:0", {"4096", ""});
  tree.slave("dm-0", "md0");
  const Device device = tree.inspect(252, 0);
  EXPECT_EQ(device.name, "dm-0");
  EXPECT_EQ(device.request_bytes_max, 512 * KiB);
}

TEST(Device, own_queue_counts_where_it_is_smaller_than_those_below) {
  FakeTree tree;
  tree.disk("sda", "8:0", {"4096", ""});
  tree.disk("dm-0", "252:0", {"300", ""});
  tree.slave("dm-0", "sda");
  EXPECT_EQ(tree.inspect(252, 0).request_bytes_max, 300 * KiB);
}

TEST(Device, loop_is_limited_by_the_device_of_its_file) {
  FakeTree tree;
  const std::string image = tree.root() + "/image of a disk";
  std::ofstream(image) << "image";
  tree.disk("under", real_number_of(image), {"384", ""});
  tree.disk("loop0", "7:0", {"1280", ""});
  tree.backing_file("loop0", image);
  const Device device = tree.inspect(7, 0);
  EXPECT_EQ(device.name, "loop0");
  EXPECT_EQ(device.request_bytes_max, 384 * KiB);
}

TEST(Device, loop_over_a_deleted_file_keeps_its_own_queue) {
  FakeTree tree;
  tree.disk("loop0", "7:0", {"1280", ""});
  tree.backing_file("loop0", tree.root() + "/gone (deleted)");
  EXPECT_EQ(tree.inspect(7, 0).request_bytes_max, 1280 * KiB);
}

TEST(Device, btrfs_is_followed_to_its_source_by_name) {
  FakeTree tree;
  tree.disk("testdisk7", "259:0", {"768", ""});
  tree.partition("testdisk7", "testdisk7p3", "259:3");
  tree.mountinfo(
      "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
      "40 27 0:45 /@home /home rw,relatime shared:1 - btrfs /dev/testdisk7p3 rw,ssd,subvol=/@home");
  const Device device = tree.inspect(0, 45);
  EXPECT_EQ(device.name, "testdisk7");
  EXPECT_EQ(device.request_bytes_max, 768 * KiB);
}

TEST(Device, btrfs_subvolume_is_found_by_its_mount_point) {
  FakeTree tree;
  tree.disk("testdisk7", "259:0", {"768", ""});
  const std::string point = tree.root() + "/mount point";
  fs::create_directories(point);
  std::string escaped = point;
  escaped.replace(escaped.find(' '), 1, "\\040");
  tree.mountinfo("40 27 0:4444 /@ " + escaped + " rw - btrfs /dev/testdisk7 rw");
  struct stat facts{};
  ASSERT_EQ(stat(point.c_str(), &facts), 0);
  EXPECT_EQ(tree.inspect(major(facts.st_dev), minor(facts.st_dev)).name, "testdisk7");
}

TEST(Device, source_is_followed_to_a_real_block_device) {
  for (const auto& entry : fs::directory_iterator("/dev")) {
    struct stat facts{};
    if (stat(entry.path().c_str(), &facts) != 0 || !S_ISBLK(facts.st_mode)) continue;
    FakeTree tree;
    tree.disk("found",
              std::to_string(major(facts.st_rdev)) + ":" + std::to_string(minor(facts.st_rdev)),
              {"320", ""});
    tree.mountinfo("40 27 0:45 / /data rw - f2fs " + entry.path().string() + " rw");
    EXPECT_EQ(tree.inspect(0, 45).request_bytes_max, 320 * KiB);
    return;
  }
  GTEST_SKIP() << "no block device in /dev";
}

TEST(Device, overlay_is_followed_to_its_upper_directory) {
  FakeTree tree;
  const std::string upper = tree.root() + "/upper";
  fs::create_directories(upper);
  tree.disk("under", real_number_of(upper), {"640", ""});
  tree.mountinfo("50 27 0:52 / / rw,relatime - overlay overlay rw,lowerdir=/a:/b,upperdir=" +
                 upper + ",workdir=/w");
  const Device device = tree.inspect(0, 52);
  EXPECT_EQ(device.name, "under");
  EXPECT_EQ(device.request_bytes_max, 640 * KiB);
}

TEST(Device, file_systems_without_a_device_keep_the_defaults) {
  FakeTree tree;
  tree.mountinfo(
      "30 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684100k\n"
      "31 25 0:28 / /net rw - nfs4 server:/export rw,vers=4.2\n"
      "32 25 0:29 / / ro - overlay overlay ro,lowerdir=/a:/b");
  for (const unsigned minor_number : {27u, 28u, 29u, 30u}) {
    expect_nothing_known(tree.inspect(0, minor_number));
  }
}

TEST(Device, missing_sys_and_proc_keep_the_defaults) {
  expect_nothing_known(inspect_device(254, 0, {"/nonexistent/sys", "/nonexistent/mountinfo"}));
  expect_nothing_known(inspect_device(0, 27, {"/nonexistent/sys", "/nonexistent/mountinfo"}));
}

TEST(Device, garbage_numbers_are_ignored) {
  FakeTree tree;
  const char* const garbage[] = {"-1", "0", "12x", "x", " ", "99999999999999999999999", "0x200"};
  unsigned minor_number = 0;
  for (const char* const text : garbage) {
    const std::string number = std::to_string(minor_number);
    tree.disk("sd" + number, "8:" + number, {text, text, text});
    Device device = tree.inspect(8, minor_number++);
    EXPECT_EQ(device.name, "sd" + number);
    device.name.clear();
    expect_nothing_known(device);
  }
  tree.disk("odd", "8:100", {"garbage", "128", "1000"});
  EXPECT_EQ(tree.inspect(8, 100).request_bytes_max, 512 * KiB);
  EXPECT_EQ(tree.inspect(8, 100).logical_block_bytes, 0u);
}

TEST(Device, garbage_mountinfo_is_ignored) {
  FakeTree tree;
  tree.disk("testdisk7", "259:0", {"768", ""});
  tree.mountinfo(
      "\n\n0:45\n 0:45 \na b 0:45 c d e\na b 0:45 c d e - \na b 0:45 - btrfs\n"
      "a b :45 / /x rw - btrfs /dev/testdisk7 rw\na b 0: / /x rw - btrfs /dev/testdisk7 rw\n"
      "a b 0:45 / /x rw - btrfs /dev/ rw\na b 0:45 / \\04 rw - btrfs /dev/\\999 rw");
  expect_nothing_known(tree.inspect(0, 45));
}

TEST(Device, cycles_end) {
  FakeTree tree;
  tree.disk("dm-0", "252:0", {"1024", ""});
  tree.disk("dm-1", "252:1", {"512", ""});
  tree.slave("dm-0", "dm-1");
  tree.slave("dm-1", "dm-0");
  tree.slave("dm-0", "dm-0");
  EXPECT_EQ(tree.inspect(252, 0).request_bytes_max, 512 * KiB);
  tree.mountinfo("50 27 0:52 / / rw - overlay overlay rw,upperdir=" + tree.root() + "\n51 27 " +
                 real_number_of(tree.root()) +
                 " / / rw - overlay overlay rw,upperdir=" + tree.root());
  expect_nothing_known(tree.inspect(0, 52));
}

TEST(Device, tangles_end_soon) {
  FakeTree tree;
  constexpr int count = 16;
  for (int i = 0; i < count; ++i) {
    tree.disk("dm-" + std::to_string(i), "252:" + std::to_string(i), {"512", ""});
  }
  for (int i = 0; i < count * count; ++i) {
    tree.slave("dm-" + std::to_string(i / count), "dm-" + std::to_string(i % count));
  }
  EXPECT_EQ(tree.inspect(252, 0).request_bytes_max, 512 * KiB);
}

TEST(Device, endless_stacks_end) {
  FakeTree tree;
  for (int i = 0; i < 100; ++i) {
    const std::string number = std::to_string(i);
    tree.disk("dm-" + number, "252:" + number, {std::to_string(4096 - i), ""});
  }
  for (int i = 0; i + 1 < 100; ++i) {
    tree.slave("dm-" + std::to_string(i), "dm-" + std::to_string(i + 1));
  }
  const std::size_t request_bytes_max = tree.inspect(252, 0).request_bytes_max;
  EXPECT_LT(request_bytes_max, 4096 * KiB);
  EXPECT_GT(request_bytes_max, 4000 * KiB);
}

TEST(Device, node_is_that_of_the_bus_above_the_disk) {
  FakeTree tree;
  tree.nodes("0-1");
  tree.device("pci0000:80/0000:81:00.0", "1");
  tree.device("pci0000:80/0000:81:00.0/nvme/nvme0", "");
  tree.disk("nvme0n1", "259:0", {"512", ""});
  tree.partition("nvme0n1", "nvme0n1p1", "259:1");
  tree.attach("nvme0n1", "pci0000:80/0000:81:00.0/nvme/nvme0");
  EXPECT_EQ(tree.inspect(259, 0).numa_node, 1);
  EXPECT_EQ(tree.inspect(259, 1).numa_node, 1);
}

TEST(Device, nearest_device_that_knows_the_node_counts) {
  FakeTree tree;
  tree.nodes("0-3");
  tree.device("pci0", "3");
  tree.device("pci0/bridge", "2");
  tree.device("pci0/bridge/virtio0", "-1");
  tree.disk("vda", "254:0", {"512", ""});
  tree.attach("vda", "pci0/bridge/virtio0");
  EXPECT_EQ(tree.inspect(254, 0).numa_node, 2);
}

TEST(Device, node_is_unknown_without_one_that_exists) {
  const auto node_of = [](const std::string& numa_node) {
    FakeTree tree;
    tree.nodes("0,2");
    tree.device("pci0", numa_node);
    tree.disk("vda", "254:0", {"512", ""});
    tree.attach("vda", "pci0");
    return tree.inspect(254, 0).numa_node;
  };
  EXPECT_EQ(node_of("2"), 2);
  for (const char* text : {"", "-1", "1", "3", "x", "2x", "4294967294", "99999999999"}) {
    EXPECT_EQ(node_of(text), -1) << text;
  }
  FakeTree alone;
  alone.nodes("0-1");
  alone.disk("loop0", "7:0", {"512", ""});
  EXPECT_EQ(alone.inspect(7, 0).numa_node, -1);
}

TEST(Device, node_does_not_count_on_a_machine_with_one) {
  for (const char* online : {"", "0"}) {
    FakeTree tree;
    tree.nodes(online);
    tree.device("pci0", "0");
    tree.disk("vda", "254:0", {"512", ""});
    tree.attach("vda", "pci0");
    EXPECT_EQ(tree.inspect(254, 0).numa_node, -1);
  }
}

TEST(Device, node_of_several_disks_is_the_one_that_they_share) {
  FakeTree tree;
  tree.nodes("0-1");
  tree.device("pci0", "0");
  tree.device("pci1", "1");
  for (const char* digit : {"0", "1", "2", "3"}) {
    tree.disk(std::string("sd") + digit, std::string("8:") + digit, {"512", ""});
    tree.disk(std::string("md") + digit, std::string("9:") + digit, {"512", ""});
  }
  tree.attach("sd0", "pci1");
  tree.attach("sd1", "pci1");
  tree.attach("sd2", "pci0");  // and nobody knows where sd3 is
  for (const char* digit : {"1", "2", "3"}) {
    tree.slave(std::string("md") + digit, "sd0");
    tree.slave(std::string("md") + digit, std::string("sd") + digit);
  }
  EXPECT_EQ(tree.inspect(9, 1).numa_node, 1);
  EXPECT_EQ(tree.inspect(9, 2).numa_node, -1);
  EXPECT_EQ(tree.inspect(9, 3).numa_node, -1);
}

TEST(Device, node_of_a_shared_nvme_drive_is_that_of_its_controllers) {
  FakeTree tree;
  tree.nodes("0-1");
  tree.device("pci1/nvme/nvme0", "1");
  tree.device("pci1/nvme/nvme1", "1");
  tree.device("pci0/nvme/nvme2", "0");
  tree.device("virtual/nvme-subsystem/nvme-subsys0", "");
  tree.device("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "");
  tree.disk("nvme0n1", "259:0", {"512", ""});
  tree.attach("nvme0n1", "virtual/nvme-subsystem/nvme-subsys0");
  EXPECT_EQ(tree.inspect(259, 0).numa_node, -1);
  tree.controller("virtual/nvme-subsystem/nvme-subsys0", "pci1/nvme/nvme0");
  tree.controller("virtual/nvme-subsystem/nvme-subsys0", "pci1/nvme/nvme1");
  EXPECT_EQ(tree.inspect(259, 0).numa_node, 1);
  tree.controller("virtual/nvme-subsystem/nvme-subsys0", "pci0/nvme/nvme2");
  EXPECT_EQ(tree.inspect(259, 0).numa_node, -1);
}

TEST(Device, of_the_current_directory_is_sane) {
  struct stat facts{};
  ASSERT_EQ(stat(".", &facts), 0);
  const Device& device = device_of(major(facts.st_dev), minor(facts.st_dev));
  EXPECT_TRUE(std::has_single_bit(device.block_bytes));
  EXPECT_GE(device.block_bytes, 256 * KiB);
  EXPECT_LE(device.block_bytes, 1 * MiB);
  if (device.name.empty()) GTEST_SKIP() << "no block device under the current directory";
  EXPECT_GE(device.logical_block_bytes, 512u);
  EXPECT_LE(device.logical_block_bytes, 64 * KiB);
  EXPECT_GE(device.request_bytes_max, device.logical_block_bytes);
}

TEST(Device, is_remembered) {
  const Device& first = device_of(0, 0xFFFFF);
  EXPECT_EQ(&first, &device_of(0, 0xFFFFF));
  EXPECT_NE(&first, &device_of(0, 0xFFFFE));
}

TEST(Device, can_be_asked_for_in_a_child_forked_while_other_threads_ask) {
  const std::jthread asker([](const std::stop_token& stop) {
    while (!stop.stop_requested()) static_cast<void>(device_of(0, 0xFFFFF));
  });
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a deadlock ends the child by a signal
      _exit(device_of(0, 0xFFFFF).block_bytes == 512 * KiB ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace tensorferry::files
