#include "cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace tensorferry::cli {

namespace {

using Seconds = std::chrono::duration<double>;

std::string clock_text(double seconds) {
  const auto whole = static_cast<std::uint64_t>(std::clamp(seconds, 0.0, 359'999.0));
  if (whole < 3600) return fmt::format("{:02}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

// Eighths of a cell, so that the bar moves smoothly.
std::string bar_text(double share, unsigned cells) {
  static constexpr const char* eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const auto filled = static_cast<unsigned>(share * cells * 8);
  std::string text;
  for (unsigned i = 0; i < filled / 8; ++i) text += "█";
  unsigned used = filled / 8;
  if (filled % 8 != 0) {
    text += eighths[filled % 8];
    ++used;
  }
  return text + std::string(cells - used, ' ');
}

}  // namespace

unsigned terminal_columns(int descriptor) {
  if (isatty(descriptor) == 0) return 0;
  winsize size{};
  if (ioctl(descriptor, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

Progress::Progress(std::string title, std::uint64_t total)
    : title_(std::move(title)),
      total_(std::max<std::uint64_t>(total, 1)),
      visible_(isatty(STDERR_FILENO) != 0) {
  if (visible_) draw();
}

Progress::~Progress() {
  if (!visible_) return;
  try {
    draw();
  } catch (const std::exception&) {
    done_ = 0;  // a bar must not end the process
  }
  std::fputc('\n', stderr);
}

void Progress::show(std::uint64_t done, const std::string& note) {
  constexpr auto interval = std::chrono::milliseconds(100);
  done_ = done;
  if (!visible_) return;
  note_ = note;
  if (Clock::now() - drawn_ >= interval) draw();
}

void Progress::say(const std::string& line) {
  if (visible_) fmt::print(stderr, "\r\033[K");
  fmt::print("{}\n", line);
  std::fflush(stdout);
  if (visible_) draw();
}

void Progress::draw() {
  drawn_ = Clock::now();
  const double share = std::min(static_cast<double>(done_) / static_cast<double>(total_), 1.0);
  const double elapsed = Seconds(drawn_ - begin_).count();
  const std::string left = share > 0 ? clock_text(elapsed / share - elapsed) : "?";
  const std::string rate =
      !note_.empty() ? note_ : fmt::format("{:.1f}/s", static_cast<double>(done_) / elapsed);
  const std::string head = fmt::format("{}: {:3.0f}%|", title_, share * 100);
  const std::string tail =
      fmt::format("| {}/{} [{}<{}, {}]", done_, total_, clock_text(elapsed), left, rate);
  constexpr unsigned cells_min = 4;
  constexpr unsigned cells_max = 40;
  const unsigned columns = terminal_columns(STDERR_FILENO);
  const auto used = static_cast<unsigned>(head.size() + tail.size() + 1);
  if (columns < used + cells_min) {  // no room for a bar
    fmt::print(
        stderr, "\r\033[K{}",
        fmt::format("{}: {:3.0f}%", title_, share * 100).substr(0, columns > 0 ? columns - 1 : 0));
    std::fflush(stderr);
    return;
  }
  const unsigned cells = std::min(columns - used, cells_max);
  fmt::print(stderr, "\r\033[K{}{}{}", head, bar_text(share, cells), tail);
  std::fflush(stderr);
}

}  // namespace tensorferry::cli
