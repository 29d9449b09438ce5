// Progress for a person who waits: one line on a terminal, nothing in a pipe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tensorferry::cli {

// A bar with the share done, the time left and the rate:
//   Writes: 45%|█████████      | 90/200 [00:01<00:02, 1.2 GB/s]
// Writes to stderr if that is a terminal, at most ten times a second. The destructor leaves the
// last state on the screen and ends the line.
class Progress {
 public:
  Progress(std::string title, std::uint64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `note` replaces the rate of steps: "1.2 GB/s".
  void show(std::uint64_t done, const std::string& note = {});

  // Prints a line to stdout above the bar.
  void say(const std::string& line);

 private:
  using Clock = std::chrono::steady_clock;

  void draw();

  const std::string title_;
  const std::uint64_t total_;
  const bool visible_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point drawn_;
  std::uint64_t done_ = 0;
  std::string note_;
};

// Columns of the terminal on this descriptor; 0 if it is no terminal.
[[nodiscard]] unsigned terminal_columns(int descriptor);

}  // namespace tensorferry::cli
