#include "tensorferry/error.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errno_name.h"

namespace tensorferry {

struct Error::State {
  Details details;
  std::string text;
};

namespace {

const char* words_for(const Error::Details& details) noexcept {
  const bool ours = details.code == ETIMEDOUT || details.code == ECHILD || details.code == EBADMSG;
  if (ours && !details.hint.empty()) return "";
  const char* words = strerrordesc_np(details.code);
  return words != nullptr ? words : "unknown error";
}

std::string describe(const Error::Details& details) {
  std::string text = details.operation;
  if (!details.path.empty()) text += ": " + details.path;
  if (details.offset) text += ": offset " + std::to_string(*details.offset);
  if (details.length) {
    text += details.offset ? ", length " : ": length ";
    text += std::to_string(*details.length);
  }
  if (details.code != 0) {
    const std::string words = words_for(details);
    const std::string name = errno_name(details.code);
    text += ": " + (words.empty() ? name : words + " (" + name + ")");
  }
  if (!details.hint.empty()) text += ": " + details.hint;
  return text;
}

}  // namespace

std::string errno_name(int code) {
  const char* name = strerrorname_np(code);
  return name != nullptr ? std::string(name) : std::to_string(code);
}

Error::Error(Details details) {
  std::string text = describe(details);
  state_ = std::make_shared<const State>(State{std::move(details), std::move(text)});
}

const char* Error::what() const noexcept { return state_->text.c_str(); }
const std::string& Error::operation() const noexcept { return state_->details.operation; }
const std::string& Error::path() const noexcept { return state_->details.path; }
std::optional<std::uint64_t> Error::offset() const noexcept { return state_->details.offset; }
std::optional<std::uint64_t> Error::length() const noexcept { return state_->details.length; }
int Error::code() const noexcept { return state_->details.code; }
const char* Error::system_text() const noexcept { return words_for(state_->details); }
const std::string& Error::hint() const noexcept { return state_->details.hint; }

}  // namespace tensorferry
