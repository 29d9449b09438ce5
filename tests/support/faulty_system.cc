#include "support/faulty_system.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace tensorferry::support {

void FaultySystem::add(const SystemRule& rule) {
  const std::lock_guard lock(mutex_);
  rules_.push_back({rule});
}

void FaultySystem::clear_rules() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
}

std::uint64_t FaultySystem::calls(Call call) const noexcept {
  return calls_[static_cast<std::size_t>(call)].load();
}

std::uint64_t FaultySystem::struck() const noexcept { return struck_.load(); }

FaultySystem::Verdict FaultySystem::judge(Call call, int open_flags, std::size_t bytes) {
  const std::uint64_t index = calls_[static_cast<std::size_t>(call)].fetch_add(1);
  Verdict verdict;
  std::chrono::nanoseconds delay{};
  {
    const std::lock_guard lock(mutex_);
    for (Armed& armed : rules_) {
      const SystemRule& rule = armed.rule;
      if (rule.call != call || index < rule.first || armed.struck >= rule.times) continue;
      if ((index - rule.first) % rule.every != 0) continue;
      if (rule.open_flags != 0 && (open_flags & rule.open_flags) == 0) continue;
      if (rule.bytes_above != 0 && bytes <= rule.bytes_above) continue;
      if (rule.probability < 1 &&
          std::uniform_real_distribution<double>(0, 1)(dice_) >= rule.probability) {
        continue;
      }
      ++armed.struck;
      struck_.fetch_add(1);
      delay += rule.delay;
      if (rule.error != 0) verdict.error = rule.error;
      verdict.short_bytes = std::min(verdict.short_bytes, rule.short_bytes);
    }
  }
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  return verdict;
}

int FaultySystem::open(const char* path, int flags, mode_t mode) {
  const Verdict verdict = judge(Call::open, flags);
  return verdict.error != 0 ? -verdict.error : System::open(path, flags, mode);
}

int FaultySystem::close(int fd) {
  const Verdict verdict = judge(Call::close);
  const int result = System::close(fd);  // a close that fails closes too
  return verdict.error != 0 ? -verdict.error : result;
}

int FaultySystem::duplicate(int fd) {
  const Verdict verdict = judge(Call::duplicate);
  return verdict.error != 0 ? -verdict.error : System::duplicate(fd);
}

int FaultySystem::set_flags(int fd, int flags) {
  const Verdict verdict = judge(Call::set_flags);
  return verdict.error != 0 ? -verdict.error : System::set_flags(fd, flags);
}

ssize_t FaultySystem::pread(int fd, std::byte* memory, std::size_t bytes, std::uint64_t offset) {
  const Verdict verdict = judge(Call::pread, 0, bytes);
  if (verdict.error != 0) return -verdict.error;
  const ssize_t result = System::pread(fd, memory, bytes, offset);
  if (result < 0 || static_cast<std::size_t>(result) <= verdict.short_bytes) return result;
  std::memset(memory + verdict.short_bytes, 0xa5,
              static_cast<std::size_t>(result) - verdict.short_bytes);
  return static_cast<ssize_t>(verdict.short_bytes);
}

ssize_t FaultySystem::pwrite(int fd, const std::byte* memory, std::size_t bytes,
                             std::uint64_t offset) {
  const Verdict verdict = judge(Call::pwrite, 0, bytes);
  if (verdict.error != 0) return -verdict.error;
  return System::pwrite(fd, memory, std::min(bytes, verdict.short_bytes), offset);
}

int FaultySystem::fdatasync(int fd) {
  const Verdict verdict = judge(Call::fdatasync);
  return verdict.error != 0 ? -verdict.error : System::fdatasync(fd);
}

int FaultySystem::fsync(int fd) {
  const Verdict verdict = judge(Call::fsync);
  return verdict.error != 0 ? -verdict.error : System::fsync(fd);
}

int FaultySystem::fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  const Verdict verdict = judge(Call::fallocate);
  return verdict.error != 0 ? -verdict.error : System::fallocate(fd, mode, offset, bytes);
}

int FaultySystem::statx(int fd, unsigned mask, struct statx* facts) {
  const Verdict verdict = judge(Call::statx);
  return verdict.error != 0 ? -verdict.error : System::statx(fd, mask, facts);
}

int FaultySystem::stat_path(const char* path, unsigned mask, struct statx* facts) {
  const Verdict verdict = judge(Call::stat_path);
  return verdict.error != 0 ? -verdict.error : System::stat_path(path, mask, facts);
}

int FaultySystem::stat_at(int directory, const char* name, unsigned mask, struct statx* facts) {
  const Verdict verdict = judge(Call::stat_at);
  return verdict.error != 0 ? -verdict.error : System::stat_at(directory, name, mask, facts);
}

int FaultySystem::statfs(int fd, struct statfs* facts) {
  const Verdict verdict = judge(Call::statfs);
  return verdict.error != 0 ? -verdict.error : System::statfs(fd, facts);
}

std::byte* FaultySystem::map(std::size_t bytes) {
  const Verdict verdict = judge(Call::map);
  return verdict.error != 0 ? nullptr : System::map(bytes);
}

int FaultySystem::lock(std::byte* memory, std::size_t bytes) {
  const Verdict verdict = judge(Call::lock);
  return verdict.error != 0 ? -verdict.error : System::lock(memory, bytes);
}

int FaultySystem::advise(std::byte* memory, std::size_t bytes, int advice) {
  const Verdict verdict = judge(Call::advise);
  return verdict.error != 0 ? -verdict.error : System::advise(memory, bytes, advice);
}

std::int64_t FaultySystem::huge_bytes(std::byte* memory, std::size_t bytes) {
  return all_memory_is_huge ? static_cast<std::int64_t>(bytes) : System::huge_bytes(memory, bytes);
}

int FaultySystem::resident(std::byte* page) {
  return all_memory_is_huge ? 1 : System::resident(page);
}

}  // namespace tensorferry::support
