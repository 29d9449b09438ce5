#include "handle/trace.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "base/errno_name.h"
#include "os/environment.h"
#include "os/fork_mutex.h"
#include "os/system.h"
#include "tensorferry/trace.h"

namespace tensorferry::handle {

namespace {

constexpr std::size_t gathered_max = std::size_t{256} << 10;
constexpr const char* tail = "\n]\n";

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      out += '\\';
      out += letter;
    } else if (code < 0x20 || code >= 0x7f) {  // a path need not be UTF-8, JSON must
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", code);
      out += escape;
    } else {
      out += letter;
    }
  }
  return out + "\"";
}

std::string microseconds(std::chrono::nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(time.count() / 1000),
                static_cast<int>(time.count() % 1000));
  return text;
}

std::string event(const std::string& name, const char* category, std::uint64_t row,
                  Trace::Time begin, Trace::Time end, const std::string& arguments) {
  return R"({"ph":"X","name":)" + quoted(name) + R"(,"cat":")" + category + R"(","pid":)" +
         std::to_string(::getpid()) + R"(,"tid":)" + std::to_string(row) + R"(,"ts":)" +
         microseconds(begin.time_since_epoch()) + R"(,"dur":)" + microseconds(end - begin) +
         R"(,"args":{)" + arguments + "}}";
}

// Why the trace is missing or incomplete. Never destroyed, like the Trace itself.
struct Trouble {
  std::mutex mutex;
  std::string text;
};

Trouble& trouble() {
  static Trouble& one = *new Trouble();
  return one;
}

std::mutex& trouble_mutex() { return trouble().mutex; }

[[maybe_unused]] const int trace_fork_watch = os::hold_during_forks<trouble_mutex>();

void note_problem(const std::string& what, int code, const char* why = "") {
  const std::lock_guard lock(trouble().mutex);
  trouble().text = "TENSORFERRY_TRACE: " + what + ": " + errno_name(code) + why;
}

const char* why_not_opened(int code) noexcept {
  switch (code) {
    case ELOOP:
      return ": it is a symbolic link, and links are not followed; name the file itself";
    case EINVAL:
    case ENXIO:
      return ": it is not a regular file; name another one";
    case EPERM:
      return ": it belongs to another user, or cannot be changed; name another file, or remove it";
    case EMLINK:
      return ": it has several hard links; name another file, or remove it";
    default:
      return "";
  }
}

}  // namespace

Trace::Trace(int fd) : fd_(fd), generation_(os::fork_generation()) {}

Trace* Trace::open() noexcept {
  std::string path = os::variable("TENSORFERRY_TRACE").value_or("");
  if (path.empty()) return nullptr;
  if (const std::size_t at = path.find("%p"); at != std::string::npos) {
    path.replace(at, 2, std::to_string(::getpid()));
  }
  const int fd = os::open_own_file(path);
  if (fd < 0) {
    note_problem("open " + path, -fd, why_not_opened(-fd));
    return nullptr;
  }
  auto* trace =
      new (std::nothrow) Trace(fd);  // never destroyed: threads may write until the very end
  std::atexit([] {
    if (Trace* last = active()) last->flush();
  });
  return trace;
}

std::string Trace::problem() {
  if (Trace* trace = active()) trace->flush();
  const std::lock_guard lock(trouble().mutex);
  return trouble().text;
}

Trace* Trace::active() noexcept {
  static Trace* const trace = open();
  if (trace == nullptr || trace->generation_ != os::fork_generation()) return nullptr;
  return trace;
}

void Trace::operation(const EndedOperation& operation) {
  std::string arguments = R"("operation":)" + std::to_string(operation.id) + R"(,"path":)" +
                          quoted(operation.path) + R"(,"bytes":)" + std::to_string(operation.bytes);
  if (operation.error != nullptr) arguments += R"(,"error":)" + quoted(operation.error->what());
  add(event(operation.verb, "operation", 0, operation.begin, operation.end, arguments));
}

void Trace::request(const EndedRequest& request, Time end) {
  add(event(request.verb, "request", static_cast<std::uint64_t>(::gettid()), request.begin, end,
            R"("operation":)" + std::to_string(request.operation) + R"(,"offset":)" +
                std::to_string(request.offset) + R"(,"bytes":)" + std::to_string(request.bytes) +
                R"(,"result":)" + std::to_string(request.result)));
}

void Trace::work(const std::string& name, Time begin, Time end) {
  add(event(name, "work", static_cast<std::uint64_t>(::gettid()), begin, end, ""));
}

void Trace::add(const std::string& event) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  gathered_ += written_ + gathered_.size() == 0 ? "[\n" : ",\n";
  gathered_ += event;
  if (gathered_.size() >= gathered_max) write_out();
}

void Trace::flush() {
  const std::lock_guard lock(mutex_);
  write_out();
}

// Appends over the closing bracket and writes a new one. If that fails, cuts the file back to what
// it was and ends the trace.
void Trace::write_out() {
  if (gathered_.empty()) return;
  const int failed = -os::write_all(fd_, gathered_ + tail, written_);
  if (failed == 0) {
    written_ += gathered_.size();
  } else {
    const std::string rest = written_ == 0 ? std::string("[") + tail : tail;
    (void)os::write_all(fd_, rest, written_);
    (void)os::System::real().truncate(fd_, written_ + rest.size());
    ended_ = true;
    note_problem("write", failed);
  }
  gathered_.clear();
}

}  // namespace tensorferry::handle

namespace tensorferry {

bool tracing() noexcept { return handle::Trace::active() != nullptr; }

void trace_span(const std::string& name, std::chrono::steady_clock::time_point begin,
                std::chrono::steady_clock::time_point end) {
  if (handle::Trace* trace = handle::Trace::active()) trace->work(name, begin, end);
}

}  // namespace tensorferry
