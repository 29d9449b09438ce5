#include "handle/retry.h"

#include <algorithm>
#include <cerrno>

#include "base/alignment.h"

namespace tensorferry::handle {

namespace {

using engines::RequestKind;

constexpr unsigned fruitless_max = 120;

Judgement try_again(Attempt& attempt, int code) {
  if (++attempt.fruitless > fruitless_max) return {Verdict::fail, code};
  return {Verdict::retry, code};
}

Judgement judge_error(Attempt& attempt, int code) {
  // Never repeats a failed sync: the kernel has marked the lost pages clean, so a second attempt
  // would succeed.
  if (engines::is_sync(attempt.kind)) return {Verdict::fail, code};
  if (code == EINTR || code == EAGAIN) return try_again(attempt, code);
  return {Verdict::fail, code};
}

}  // namespace

int without_second_meaning(int code) noexcept {
  return code == ENODATA || code == ETIMEDOUT ? EIO : code;
}

Judgement judge(Attempt& attempt, std::int32_t result) noexcept {
  if (result < 0) return judge_error(attempt, without_second_meaning(-result));
  if (engines::is_sync(attempt.kind)) return {Verdict::done, 0};

  const std::uint32_t end = attempt.done + static_cast<std::uint32_t>(result);
  if (end >= attempt.needed) {
    attempt.done = attempt.needed;
    return {Verdict::done, 0};
  }
  if (result == 0) {
    if (attempt.kind == RequestKind::read) return {Verdict::ended, ENODATA};
    return try_again(attempt, EIO);  // a write that writes nothing and gives no reason
  }
  // Short. A direct request resumes at an aligned offset, so it moves up to one alignment again. If
  // it ends at the same ragged offset twice, the file most likely ends there.
  const std::uint32_t resumable = align_down(end, attempt.alignment);
  const bool farther = end > attempt.reached;
  attempt.reached = std::max(attempt.reached, end);
  if (resumable > attempt.done) {
    attempt.done = resumable;
    attempt.fruitless = 0;
    return {Verdict::resume, 0};
  }
  if (!farther && attempt.kind == RequestKind::read) return {Verdict::ended, ENODATA};
  return try_again(attempt, EIO);
}

Judgement judge_false_end(Attempt& attempt) noexcept { return try_again(attempt, EIO); }

Verdict judge_refusal(int code, unsigned times) noexcept {
  const bool passing = code == EAGAIN || code == EBUSY || code == ENOMEM || code == EINTR;
  return passing && times <= fruitless_max ? Verdict::retry : Verdict::fail;
}

std::chrono::nanoseconds retry_delay(unsigned fruitless) noexcept {
  using std::chrono::microseconds;
  if (fruitless <= 1) return microseconds(0);
  return std::min(microseconds(10) * (1 << std::min(fruitless - 2, 10U)), microseconds(10'000));
}

std::string hint_for(int code) {
  switch (code) {
    case EIO:
    case EILSEQ:     // data protection failed
    case ENODEV:     // the drive is offline
    case ENOLINK:    // the path to the drive failed
    case EREMOTEIO:  // the target failed
      return "the drive or its driver reported an error; see dmesg and smartctl";
    case EDQUOT:
      return "the file would exceed the disk quota";
    case EFBIG:
      return "the file would exceed the largest size of the file system or of ulimit -f";
    case EBADF:
      return "the descriptor was closed, or not opened for this access";
    case EFAULT:
      return "the memory is not mapped, or not writable for a read";
    case EINVAL:
      return "the file system refused the request, perhaps for its alignment";
    case EAGAIN:
    case EINTR:
      return "the kernel refused the request for about a second; lower the queue depth";
    case EBUSY:
    case ENOMEM:
      return "the system is short of memory, or too busy; lower the queue depth or the block size";
    case EROFS:
      return "the file system is read-only, perhaps after an error; see dmesg";
    default:
      return {};
  }
}

}  // namespace tensorferry::handle
