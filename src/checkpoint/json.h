// Reads and writes the JSON of checkpoints. The reader judges as serde_json does, because the
// safetensors package reads its headers with that: it refuses and accepts the same texts, to the
// last digit of a number. No I/O, no recursion, and no memory beyond the strings it returns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tensorferry::checkpoint {

// Walks over one JSON text from its start to its end. The first problem stops it for good: from
// then on every call returns false and failure() says what was wrong. The text must outlive it.
//   for (json.enter_object(); json.next_member(key);) ... read or skip exactly one value ...
class JsonReader {
 public:
  enum class Kind : std::uint8_t {
    object,
    array,
    string,
    number,
    word
  };  // word: true, false, null

  // Deeper nesting is refused.
  static constexpr std::size_t depth_max = 127;

  // Stops at once if the text is not UTF-8.
  explicit JsonReader(std::string_view text);

  // What the next value begins like; it may still turn out to be broken.
  [[nodiscard]] Kind peek();

  bool enter_object();
  bool enter_array();
  // Steps to the next value of the object or array that was entered last. False at its end, which
  // leaves it.
  bool next_member(std::string& key);
  bool next_element();

  bool read_string(std::string& value);
  bool read_unsigned(std::uint64_t& value);  // a number of digits alone, within 64 bits
  bool read_null();
  // Steps over any value.
  bool skip();
  // True if nothing but white space follows.
  bool finish();

  // Stops here, or at an offset: for problems that the caller finds.
  void fail(std::string why);
  void fail_at(std::size_t offset, std::string why);
  [[nodiscard]] bool ok() const noexcept { return failure_.empty(); }
  [[nodiscard]] const std::string& failure() const noexcept { return failure_; }
  // Where the key that was read last begins.
  [[nodiscard]] std::size_t key_offset() const noexcept { return key_offset_; }
  // Where the next character is read, or where the problem is.
  [[nodiscard]] std::size_t offset() const noexcept { return offset_; }

 private:
  struct Number {
    bool is_unsigned = false;
    std::uint64_t digits = 0;
  };

  [[nodiscard]] int next_character() const noexcept;  // -1 at the end
  void skip_space() noexcept;
  bool take(char wanted);
  bool enter(char open, char close);
  bool step(char close);
  bool take_word(std::string_view word);
  bool read_number(Number& number);
  bool take_exponent(std::int64_t& exponent);
  bool read_escape(std::string& value);
  bool read_code_point(std::string& value);
  bool read_hex(std::uint32_t& unit);

  std::string_view text_;
  std::size_t offset_ = 0;
  std::size_t key_offset_ = 0;
  std::size_t depth_ = 0;
  bool first_ = false;  // nothing was read yet in the object or array that was entered last
  std::array<char, depth_max + 1> closing_{};
  std::string failure_;
};

// Appends a text, which must be UTF-8, as a JSON string: the bytes that serde_json writes.
void append_json_string(std::string& json, std::string_view text);

[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

// A name from a file, for a message: in quotes, on one line, shortened if it is long.
[[nodiscard]] std::string shown(std::string_view name);

}  // namespace tensorferry::checkpoint
