#include "checkpoint/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace tensorferry::checkpoint {

namespace {

bool is_digit(int character) noexcept { return character >= '0' && character <= '9'; }

// Whether `digits` times ten to the `exponent` is more than a double holds. It rounds as serde_json
// does, which rounds twice.
bool out_of_range(std::uint64_t digits, std::int64_t exponent) {
  if (digits == 0 || exponent < 289) return false;
  if (exponent > 308) return true;
  const std::string text = "1e" + std::to_string(exponent);
  double power = 0;
  std::from_chars(text.data(), text.data() + text.size(), power);
  return std::isinf(static_cast<double>(digits) * power);
}

// Appends a digit if 64 bits hold the result.
bool append_digit(std::uint64_t& digits, int character) noexcept {
  const auto digit = static_cast<std::uint64_t>(character - '0');
  if (digits > (UINT64_MAX - digit) / 10) return false;
  digits = digits * 10 + digit;
  return true;
}

void append_utf8(std::string& text, std::uint32_t code) {
  const auto tail = [&text, code](unsigned shift) {
    text += static_cast<char>(0x80U | ((code >> shift) & 0x3FU));
  };
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xC0U | (code >> 6U));
    tail(0);
  } else if (code < 0x10000) {
    text += static_cast<char>(0xE0U | (code >> 12U));
    tail(6);
    tail(0);
  } else {
    text += static_cast<char>(0xF0U | (code >> 18U));
    tail(12);
    tail(6);
    tail(0);
  }
}

// The length of the character that starts here, or 0 if it is not valid.
std::size_t utf8_length(std::string_view text) noexcept {
  const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (length == 0 || lead > 0xF4 || text.size() < length) return 0;
  // The second byte excludes longer forms than needed, surrogates, and what is above U+10FFFF.
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < low || byte(1) > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
  }
  return length;
}

std::size_t valid_utf8_prefix(std::string_view text) noexcept {
  std::size_t offset = 0;
  while (offset < text.size()) {
    const std::size_t length = utf8_length(text.substr(offset));
    if (length == 0) break;
    offset += length;
  }
  return offset;
}

}  // namespace

JsonReader::JsonReader(std::string_view text) : text_(text) {
  const std::size_t valid = valid_utf8_prefix(text);
  if (valid != text.size()) fail_at(valid, "a byte that is not UTF-8");
}

void JsonReader::fail(std::string why) { fail_at(offset_, std::move(why)); }

void JsonReader::fail_at(std::size_t offset, std::string why) {
  if (!ok()) return;
  offset_ = offset;
  failure_ = std::move(why);
}

int JsonReader::next_character() const noexcept {
  return offset_ < text_.size() ? static_cast<unsigned char>(text_[offset_]) : -1;
}

void JsonReader::skip_space() noexcept {
  const std::size_t end = text_.find_first_not_of(" \t\r\n", offset_);
  offset_ = std::min(end, text_.size());
}

bool JsonReader::take(char wanted) {
  if (!ok()) return false;
  if (next_character() == wanted) {
    ++offset_;
    return true;
  }
  const bool ended = next_character() < 0;
  fail(std::string(ended ? "the text ends" : "another character") + " where '" + wanted +
       "' must be");
  return false;
}

JsonReader::Kind JsonReader::peek() {
  if (ok()) skip_space();
  switch (next_character()) {
    case '{':
      return Kind::object;
    case '[':
      return Kind::array;
    case '"':
      return Kind::string;
    case 't':
    case 'f':
    case 'n':
      return Kind::word;
    default:
      return Kind::number;
  }
}

bool JsonReader::enter(char open, char close) {
  if (ok()) skip_space();
  if (!take(open)) return false;
  if (depth_ == depth_max) {
    fail("nesting that is too deep");
    return false;
  }
  closing_[++depth_] = close;
  first_ = true;
  return true;
}

bool JsonReader::enter_object() { return enter('{', '}'); }
bool JsonReader::enter_array() { return enter('[', ']'); }

bool JsonReader::step(char close) {
  if (!ok()) return false;
  skip_space();
  if (next_character() == close) {
    ++offset_;
    --depth_;
    first_ = false;
    return false;
  }
  if (!first_ && !take(',')) return false;
  first_ = false;
  return true;
}

bool JsonReader::next_element() { return step(']'); }

bool JsonReader::next_member(std::string& key) {
  if (!step('}')) return false;
  skip_space();
  key_offset_ = offset_;
  if (!read_string(key)) return false;
  skip_space();
  return take(':');
}

bool JsonReader::read_string(std::string& value) {
  value.clear();
  if (ok()) skip_space();
  if (!take('"')) return false;
  while (true) {
    const std::size_t start = offset_;
    while (offset_ < text_.size() && text_[offset_] != '"' && text_[offset_] != '\\' &&
           static_cast<unsigned char>(text_[offset_]) >= 0x20) {
      ++offset_;
    }
    value.append(text_.substr(start, offset_ - start));
    switch (next_character()) {
      case '"':
        ++offset_;
        return true;
      case '\\':
        if (!read_escape(value)) return false;
        break;
      default:
        fail(next_character() < 0 ? "a string without an end" : "a control character in a string");
        return false;
    }
  }
}

bool JsonReader::read_escape(std::string& value) {
  static constexpr std::string_view names = "\"\\/bfnrt";
  static constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
  ++offset_;
  const int name = next_character();
  if (name == 'u') return read_code_point(value);
  const std::size_t index = name < 0 ? std::string_view::npos : names.find(static_cast<char>(name));
  if (index == std::string_view::npos) {
    fail("an unknown escape in a string");
    return false;
  }
  ++offset_;
  value += meanings[index];
  return true;
}

bool JsonReader::read_hex(std::uint32_t& unit) {
  if (next_character() != 'u' || text_.size() - offset_ < 5) {
    fail("half of a surrogate pair, or an escape that ends early");
    return false;
  }
  const char* start = text_.data() + offset_ + 1;
  const auto parsed = std::from_chars(start, start + 4, unit, 16);
  if (parsed.ptr != start + 4) {  // from_chars takes no sign for unsigned numbers
    fail("an escape that is not \\u and four hex digits");
    return false;
  }
  offset_ += 5;
  return true;
}

bool JsonReader::read_code_point(std::string& value) {
  std::uint32_t code = 0;
  if (!read_hex(code)) return false;
  if (code >= 0xD800 && code <= 0xDFFF) {
    std::uint32_t second = 0;
    if (code > 0xDBFF || next_character() != '\\') {
      fail("half of a surrogate pair");
      return false;
    }
    ++offset_;
    if (!read_hex(second)) return false;
    if (second < 0xDC00 || second > 0xDFFF) {
      fail("half of a surrogate pair");
      return false;
    }
    code = 0x10000 + ((code - 0xD800) << 10U) + (second - 0xDC00);
  }
  append_utf8(value, code);
  return true;
}

// Digits beyond 64 bits do not count: before the point they raise the exponent, after it they are
// dropped.
bool JsonReader::read_number(Number& number) {
  if (!ok()) return false;
  skip_space();
  const std::size_t start = offset_;
  const bool negative = next_character() == '-';
  if (negative) ++offset_;
  if (!is_digit(next_character())) {
    fail_at(start, "something that is no JSON value");
    return false;
  }
  std::uint64_t digits = 0;
  std::int64_t exponent = 0;
  const std::size_t integer = offset_;
  bool whole = !negative;
  for (; is_digit(next_character()); ++offset_) {
    if (exponent > 0 || !append_digit(digits, next_character())) ++exponent;
  }
  if (text_[integer] == '0' && offset_ - integer > 1) {
    fail_at(start, "a number that begins with 0");
    return false;
  }
  whole = whole && exponent == 0;
  if (next_character() == '.') {
    whole = false;
    ++offset_;
    const std::size_t fraction = offset_;
    bool full = false;
    for (; is_digit(next_character()); ++offset_) {
      full = full || !append_digit(digits, next_character());
      if (!full) --exponent;
    }
    if (offset_ == fraction) {
      fail("a number that ends with its point");
      return false;
    }
  }
  if (next_character() == 'e' || next_character() == 'E') {
    whole = false;
    if (!take_exponent(exponent)) return false;
  }
  if (out_of_range(digits, exponent)) {
    fail_at(start, "a number that is too large");
    return false;
  }
  number = {.is_unsigned = whole, .digits = digits};
  return true;
}

bool JsonReader::take_exponent(std::int64_t& exponent) {
  ++offset_;
  const bool negative = next_character() == '-';
  if (negative || next_character() == '+') ++offset_;
  if (!is_digit(next_character())) {
    fail("a number without digits in its exponent");
    return false;
  }
  std::int64_t written = 0;
  for (; is_digit(next_character()); ++offset_) {
    // Beyond any length of a text, and far from an overflow.
    written =
        std::min<std::int64_t>(written * 10 + (next_character() - '0'), std::int64_t{1} << 40);
  }
  exponent += negative ? -written : written;
  return true;
}

bool JsonReader::read_unsigned(std::uint64_t& value) {
  if (ok()) skip_space();
  const std::size_t start = offset_;
  Number number;
  if (peek() != Kind::number) {
    fail("another value where a number must be");
    return false;
  }
  if (!read_number(number)) return false;
  if (!number.is_unsigned) {
    fail_at(start, "a number that is not a whole one from 0 to 18446744073709551615");
    return false;
  }
  value = number.digits;
  return true;
}

bool JsonReader::take_word(std::string_view word) {
  if (ok()) skip_space();
  if (ok() && text_.substr(offset_).starts_with(word)) {
    offset_ += word.size();
    return true;
  }
  fail("something that is no JSON value");
  return false;
}

bool JsonReader::read_null() { return take_word("null"); }

bool JsonReader::skip() {
  const std::size_t floor = depth_;
  std::string ignored;
  Number number;
  do {
    switch (peek()) {
      case Kind::object:
        enter_object();
        break;
      case Kind::array:
        enter_array();
        break;
      case Kind::string:
        read_string(ignored);
        break;
      case Kind::number:
        read_number(number);
        break;
      case Kind::word:
        take_word(next_character() == 't' ? "true" : next_character() == 'f' ? "false" : "null");
        break;
    }
    while (ok() && depth_ > floor) {
      if (closing_[depth_] == '}' ? next_member(ignored) : next_element()) break;
    }
  } while (ok() && depth_ > floor);
  return ok();
}

bool JsonReader::finish() {
  if (ok()) skip_space();
  if (ok() && offset_ != text_.size()) fail("more text after the end");
  return ok();
}

void append_json_string(std::string& json, std::string_view text) {
  static constexpr std::string_view hex = "0123456789abcdef";
  static constexpr std::string_view meanings = "\"\\\b\f\n\r\t";
  static constexpr std::string_view names = "\"\\bfnrt";
  json += '"';
  for (const char character : text) {
    const auto code = static_cast<unsigned char>(character);
    if (code >= 0x20 && character != '"' && character != '\\') {
      json += character;
    } else if (const std::size_t index = meanings.find(character);
               index != std::string_view::npos) {
      json += '\\';
      json += names[index];
    } else {
      json += "\\u00";
      json += hex[code >> 4U];
      json += hex[code & 15U];
    }
  }
  json += '"';
}

bool is_utf8(std::string_view text) noexcept { return valid_utf8_prefix(text) == text.size(); }

std::string shown(std::string_view name) {
  constexpr std::size_t length_max = 200;
  const std::string_view start = name.substr(0, length_max);
  std::string text;
  // What the cut leaves of a character, and what is no UTF-8 at all, is left out.
  append_json_string(text, start.substr(0, valid_utf8_prefix(start)));
  if (start.size() < name.size()) text.insert(text.size() - 1, "...");
  return text;
}

}  // namespace tensorferry::checkpoint
