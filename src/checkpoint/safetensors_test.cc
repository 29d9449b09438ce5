// Safetensors files through the public API: what is saved is what is read, and damage is found.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/alignment.h"
#include "support/memory.h"
#include "support/outcome.h"
#include "support/pattern.h"
#include "support/temp_dir.h"
#include "support/thrown.h"
#include "tensorferry/checkpoint.h"

namespace tensorferry {
namespace {

using support::error_of;
using support::Memory;
using support::outcome_code;

struct Saved {
  std::string name;
  DType dtype;
  std::vector<std::uint64_t> shape;
  Memory memory;
};

class SafetensorsTest : public ::testing::Test {
 protected:
  void add(std::string name, DType dtype, std::vector<std::uint64_t> shape) {
    std::uint64_t bits = bits_of(dtype);
    for (const std::uint64_t size : shape) bits *= size;
    const auto seed = static_cast<std::uint32_t>(tensors.size() + 1);
    tensors.push_back({std::move(name), dtype, std::move(shape),
                       Memory::with_pattern(bits / 8, 0, seed, tensors.size() % 3)});
  }
  // Tensors of all kinds of sizes, also beyond a chunk of 16 MiB.
  void add_mixture() {
    add("large", DType::f32, {4 * MiB + 321});
    add("matrix", DType::bf16, {512, 700});
    add("odd", DType::u8, {123'457});
    add("scalar", DType::f64, {});
    add("empty", DType::i64, {0, 3});
    add("packed", DType::f4, {3, 8});
    add("name with \"quotes\" and \u00e9", DType::boolean, {17});
    for (int i = 0; i < 40; ++i) {
      add("small." + std::to_string(i), DType::i16, {static_cast<std::uint64_t>(i) * 997 + 1});
    }
  }
  void save(const SafetensorsOptions& options = {}) {
    std::vector<TensorWrite> writes;
    for (const Saved& tensor : tensors) {
      writes.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.memory.bytes()});
    }
    save_safetensors(handle, path, writes, options);
  }
  // Reads all tensors; returns what is wrong with them, or "".
  std::string fault_after_load(Verify verify) {
    const Safetensors file = Safetensors::open(path);
    std::vector<Memory> memories;
    std::vector<TensorRead> reads;
    for (const Saved& tensor : tensors) {
      memories.emplace_back(tensor.memory.bytes().size(), 1);
      reads.push_back({tensor.name, memories.back().bytes()});
    }
    file.read(handle, reads, verify).wait();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!std::ranges::equal(memories[i].bytes(), tensors[i].memory.bytes())) {
        return tensors[i].name + " differs";
      }
    }
    return "";
  }
  void flip(std::uint64_t offset) const {
    auto bytes = support::read_whole_file(path);
    bytes[offset] ^= std::byte{4};
    support::write_whole_file(path, bytes);
  }

  support::TempDir dir;
  const std::string path = dir.file("model.safetensors");
  Handle handle;
  std::vector<Saved> tensors;
};

TEST_F(SafetensorsTest, what_is_saved_is_what_is_read) {
  add_mixture();
  for (const bool checksums : {true, false}) {
    for (const std::size_t alignment : {8UL, 4096UL}) {
      save({.metadata = {{{"format", "pt"}}}, .checksums = checksums, .alignment = alignment});
      const Safetensors file = Safetensors::open(path);
      ASSERT_EQ(file.tensors().size(), tensors.size());
      EXPECT_EQ(file.tensors().front().offset % alignment, 0U);
      EXPECT_EQ(file.has_checksums(), checksums);
      EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
      for (const Saved& tensor : tensors) {
        const TensorInfo* found = file.find(tensor.name);
        ASSERT_NE(found, nullptr) << tensor.name;
        EXPECT_EQ(found->dtype, tensor.dtype);
        EXPECT_EQ(found->shape, tensor.shape);
        EXPECT_EQ(found->bytes, tensor.memory.bytes().size());
      }
      EXPECT_EQ(fault_after_load(Verify::no), "");
      EXPECT_EQ(fault_after_load(Verify::if_present), "");
      if (checksums) {
        EXPECT_EQ(fault_after_load(Verify::required), "");
      } else {
        EXPECT_EQ(error_of([&] { fault_after_load(Verify::required); }).code(), ENODATA);
      }
    }
  }
}

TEST_F(SafetensorsTest, tensors_side_by_side_in_memory_are_read_and_verified_as_alone) {
  add_mixture();
  save();
  const Safetensors file = Safetensors::open(path);
  const std::uint64_t begin = file.tensors().front().offset;
  const TensorInfo& last = file.tensors().back();
  const Memory memory(last.offset + last.bytes - begin, 1);
  std::vector<TensorRead> reads;
  for (const TensorInfo& tensor : file.tensors()) {
    reads.push_back({tensor.name, memory.bytes().subspan(tensor.offset - begin, tensor.bytes)});
  }
  const auto requests = handle.stats().requests;
  file.read(handle, reads, Verify::required).wait();
  EXPECT_LT(handle.stats().requests - requests, tensors.size()) << "they are one part";
  for (const Saved& tensor : tensors) {
    const TensorInfo& info = *file.find(tensor.name);
    EXPECT_TRUE(std::ranges::equal(memory.bytes().subspan(info.offset - begin, info.bytes),
                                   tensor.memory.bytes()))
        << tensor.name;
  }
  const TensorInfo& damaged = *file.find("small.7");
  flip(damaged.offset);
  const Error error = error_of([&] { file.read(handle, reads, Verify::required).wait(); });
  EXPECT_EQ(error.code(), EBADMSG);
  EXPECT_NE(error.hint().find("'small.7'"), std::string::npos) << error.hint();
}

TEST_F(SafetensorsTest, no_tensors_and_no_metadata_are_fine) {
  save({.checksums = false});
  EXPECT_EQ(Safetensors::open(path).metadata(), std::nullopt);
  EXPECT_EQ(fault_after_load(Verify::required), "");
  save();
  EXPECT_EQ(fault_after_load(Verify::required), "");
}

TEST_F(SafetensorsTest, ranges_are_read_as_asked) {
  add("cube", DType::i32, {40, 50, 600});
  save();
  const Safetensors file = Safetensors::open(path);
  const auto* all = reinterpret_cast<const std::uint32_t*>(tensors[0].memory.bytes().data());
  std::mt19937 random(1);
  const auto range = [&](std::uint64_t size) -> IndexRange {
    const std::uint64_t begin = random() % size;
    return {begin, begin + 1 + random() % (size - begin)};
  };
  for (int round = 0; round < 50; ++round) {
    const std::vector<IndexRange> ranges{range(40), range(50), range(600)};
    std::vector<std::uint32_t> expected;
    for (std::uint64_t i = ranges[0].begin; i < ranges[0].end; ++i) {
      for (std::uint64_t j = ranges[1].begin; j < ranges[1].end; ++j) {
        const std::uint32_t* row = all + (i * 50 + j) * 600;
        expected.insert(expected.end(), row + ranges[2].begin, row + ranges[2].end);
      }
    }
    std::vector<std::uint32_t> found(expected.size());
    file.read(handle,
              std::vector<TensorRead>{{"cube", std::as_writable_bytes(std::span(found)), ranges}})
        .wait();
    ASSERT_EQ(found, expected) << round;
  }
}

TEST_F(SafetensorsTest, wrong_questions_are_refused) {
  add("t", DType::f32, {10, 10});
  save({.checksums = false});
  const Safetensors file = Safetensors::open(path);
  Memory memory(400);
  const auto code = [&](std::vector<TensorRead> reads, Verify verify = Verify::no) {
    const Error error = error_of([&] { (void)file.read(handle, reads, verify); });
    EXPECT_EQ(error.path(), path);
    EXPECT_NE(error.hint(), "");
    return error.code();
  };
  EXPECT_EQ(code({{"u", memory.bytes()}}), ENOENT);
  EXPECT_EQ(code({{"t", memory.bytes().first(399)}}), EINVAL);
  EXPECT_EQ(code({{"t", memory.bytes(), {{0, 9}}}}), EINVAL);
  EXPECT_EQ(code({{"t", memory.bytes(), {{11}}}}), EINVAL);
  EXPECT_EQ(code({{"t", memory.bytes()}}, Verify::required), ENODATA);
  EXPECT_EQ(code({{"t", memory.bytes()}, {"t", memory.bytes()}}, Verify::if_present), EINVAL);
  EXPECT_EQ(file.find("u"), nullptr);
}

TEST_F(SafetensorsTest, wrong_tensors_are_not_saved) {
  Memory memory(400);
  const auto code = [&](std::vector<TensorWrite> writes, SafetensorsOptions options = {}) {
    return error_of([&] { save_safetensors(handle, path, writes, options); }).code();
  };
  EXPECT_EQ(code({{"t", DType::f32, {99}, memory.bytes()}}), EINVAL);
  EXPECT_EQ(
      code({{"t", DType::f32, {100}, memory.bytes()}, {"t", DType::u8, {400}, memory.bytes()}}),
      EINVAL);
  EXPECT_EQ(code({{"\xff", DType::f32, {100}, memory.bytes()}}), EINVAL);
  EXPECT_EQ(code({}, {.metadata = {{{"tensorferry.xxh3", "mine"}}}}), EINVAL);
  EXPECT_EQ(code({}, {.alignment = 3}), EINVAL);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST_F(SafetensorsTest, every_flipped_bit_in_a_tensor_is_found_and_named) {
  add_mixture();
  save();
  const Safetensors file = Safetensors::open(path);
  const auto whole = support::read_whole_file(path);
  std::mt19937 random(2);
  for (const TensorInfo& tensor : file.tensors()) {
    if (tensor.bytes == 0) continue;
    for (const std::uint64_t at : {std::uint64_t{0}, tensor.bytes - 1, random() % tensor.bytes}) {
      auto bytes = whole;
      bytes[tensor.offset + at] ^= std::byte{1} << (random() % 8);
      support::write_whole_file(path, bytes);
      const Error error = error_of([&] { (void)fault_after_load(Verify::required); });
      EXPECT_EQ(error.code(), EBADMSG);
      EXPECT_EQ(error.path(), path);
      EXPECT_EQ(error.offset(), tensor.offset + at / (16 * MiB) * 16 * MiB);
      EXPECT_NE(error.hint().find(tensor.name), std::string::npos) << error.what();
    }
  }
}

TEST_F(SafetensorsTest, the_checksum_of_a_chunk_is_the_one_in_the_file) {
  add("large", DType::u8, {16 * MiB + 65'537});
  save();
  const auto bytes = tensors.front().memory.bytes();
  std::string digits;
  for (const auto chunk : {bytes.first(16 * MiB), bytes.subspan(16 * MiB)}) {
    std::array<char, 17> text{};
    std::snprintf(text.data(), text.size(), "%016llx",
                  static_cast<unsigned long long>(safetensors_checksum(chunk)));
    digits += text.data();
  }
  const auto whole = support::read_whole_file(path);
  const std::string head(reinterpret_cast<const char*>(whole.data()), 4096);
  EXPECT_NE(head.find(digits), std::string::npos) << digits << " in " << head;
}

TEST_F(SafetensorsTest, a_tensor_that_is_whole_is_read_beside_a_damaged_one) {
  add("a", DType::u8, {5000});
  add("b", DType::u8, {5000});
  save();
  const Safetensors file = Safetensors::open(path);
  flip(file.find("b")->offset + 4999);
  Memory memory(5000);
  file.read(handle, std::vector<TensorRead>{{"a", memory.bytes()}}, Verify::required).wait();
  EXPECT_EQ(outcome_code(file.read(handle, std::vector<TensorRead>{{"b", memory.bytes()}},
                                   Verify::required)),
            EBADMSG);
}

// As a program does that copies the metadata from one file to another.
TEST_F(SafetensorsTest, checksums_that_belong_to_other_tensors_do_not_keep_a_file_from_being_read) {
  add("a", DType::u8, {100});
  save();
  auto bytes = support::read_whole_file(path);
  const std::string before = R"({\"a\":\")";
  const std::string after = R"({\"b\":\")";
  const auto found = std::search(bytes.begin(), bytes.end(), before.begin(), before.end(),
                                 [](std::byte a, char b) { return std::to_integer<char>(a) == b; });
  ASSERT_NE(found, bytes.end());
  std::transform(after.begin(), after.end(), found, [](char c) { return std::byte(c); });
  support::write_whole_file(path, bytes);
  EXPECT_FALSE(Safetensors::open(path).has_checksums());
  EXPECT_NE(Safetensors::open(path).checksums_problem().find("\"b\""), std::string::npos);
  EXPECT_EQ(fault_after_load(Verify::if_present), "");
  const Error error = error_of([&] { fault_after_load(Verify::required); });
  EXPECT_EQ(error.code(), ENODATA);
  EXPECT_NE(error.hint().find("\"b\""), std::string::npos) << error.what();
}

TEST_F(SafetensorsTest, a_user_who_gives_up_finds_the_old_file) {
  add("first", DType::u8, {100});
  save();
  const auto before = support::read_whole_file(path);
  tensors.clear();
  add("second", DType::u8, {3 * MiB});
  EXPECT_EQ(error_of([&] {
              save({.progress = [](std::uint64_t, std::uint64_t) { return false; }});
            }).code(),
            ECANCELED);
  EXPECT_EQ(support::read_whole_file(path), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
  std::uint64_t last = 0;
  save({.progress = [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_LE(last, done);
    EXPECT_EQ(total, 3 * MiB);
    last = done;
    return true;
  }});
  EXPECT_EQ(last, 3 * MiB);
}

TEST_F(SafetensorsTest, a_file_that_breaks_a_rule_is_refused_with_its_path) {
  support::write_whole_file(path, support::pattern(1000, 0, 1));
  const Error error = error_of([&] { (void)Safetensors::open(path); });
  EXPECT_EQ(error.code(), EBADMSG);
  EXPECT_EQ(error.path(), path);
  EXPECT_EQ(error_of([&] { (void)Safetensors::open(dir.file("none")); }).code(), ENOENT);
}

TEST_F(SafetensorsTest, bytes_in_memory_say_the_same_as_the_file) {
  add_mixture();
  const SafetensorsOptions options{.metadata = {{{"a", "b"}}}, .checksums = false, .alignment = 8};
  save(options);
  const auto whole = support::read_whole_file(path);
  const SafetensorsContents contents = parse_safetensors(whole);
  const Safetensors file = Safetensors::open(path);
  EXPECT_EQ(contents.metadata, file.metadata());
  ASSERT_EQ(contents.tensors.size(), file.tensors().size());
  std::vector<TensorWrite> writes;
  for (const Saved& tensor : tensors) {
    writes.push_back({tensor.name, tensor.dtype, tensor.shape, {}});
  }
  const SafetensorsHeader header = make_safetensors_header(writes, options);
  EXPECT_EQ(std::memcmp(header.bytes.data(), whole.data(), header.bytes.size()), 0);
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    EXPECT_EQ(contents.tensors[i].name, file.tensors()[i].name);
    EXPECT_EQ(contents.tensors[i].offset, file.tensors()[i].offset);
    EXPECT_EQ(tensors[header.order[i]].name, file.tensors()[i].name);
  }
}

TEST_F(SafetensorsTest, checksums_of_pieces_make_the_header_of_a_save) {
  add_mixture();
  save();
  const auto whole = support::read_whole_file(path);
  std::vector<TensorWrite> writes;
  std::vector<std::vector<std::uint64_t>> pieces;
  std::vector<std::vector<std::uint64_t>> zeros;
  for (const Saved& tensor : tensors) {
    writes.push_back({tensor.name, tensor.dtype, tensor.shape, {}});
    pieces.push_back(checksums_of_pieces(tensor.memory.bytes()));
    zeros.emplace_back(pieces.back().size());
  }
  const SafetensorsHeader header = make_safetensors_header(writes, {}, pieces);
  EXPECT_EQ(std::memcmp(header.bytes.data(), whole.data(), header.bytes.size()), 0);
  EXPECT_EQ(make_safetensors_header(writes, {}, zeros).bytes.size(), header.bytes.size());
  pieces.back().pop_back();
  EXPECT_EQ(error_of([&] { (void)make_safetensors_header(writes, {}, pieces); }).code(), EINVAL);
  pieces.pop_back();
  EXPECT_EQ(error_of([&] { (void)make_safetensors_header(writes, {}, pieces); }).code(), EINVAL);
}

class SetTest : public SafetensorsTest {
 protected:
  void save_as(const std::string& name, std::vector<std::string> names,
               const SafetensorsOptions& options = {}) {
    tensors.clear();
    for (std::string& tensor : names) add(std::move(tensor), DType::f32, {100});
    std::vector<TensorWrite> writes;
    for (const Saved& tensor : tensors) {
      writes.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.memory.bytes()});
    }
    save_safetensors(handle, dir.file(name), writes, options);
  }
  void write_index(const std::string& json) {
    support::write_whole_file(index, std::as_bytes(std::span(json)));
  }
  const std::string index = dir.file("model.safetensors.index.json");
};

TEST_F(SetTest, is_one_list_of_tensors_over_all_files) {
  save_as("one.safetensors", {"a", "b"});
  save_as("two.safetensors", {"c"});
  write_index(R"({"metadata": {"total_size": 1200}, "weight_map": {"a": "one.safetensors",)"
              R"( "b": "one.safetensors", "c": "two.safetensors"}})");
  const Safetensors set = Safetensors::open(index);
  EXPECT_EQ(set.files().size(), 2U);
  ASSERT_EQ(set.tensors().size(), 3U);
  EXPECT_TRUE(set.has_checksums());
  EXPECT_EQ(set.metadata(), (std::map<std::string, std::string>{{"total_size", "1200"}}));
  std::vector<Memory> memories;
  std::vector<TensorRead> reads;
  for (const char* name : {"a", "b", "c"}) {
    memories.emplace_back(400);
    reads.push_back({name, memories.back().bytes()});
  }
  set.read(handle, reads, Verify::required).wait();
  EXPECT_TRUE(std::ranges::equal(memories[2].bytes(), tensors[0].memory.bytes()));
}

TEST_F(SetTest, says_which_tensors_have_no_checksum) {
  save_as("one.safetensors", {"a"});
  save_as("two.safetensors", {"c", "b"}, {.checksums = false});
  write_index(R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors",)"
              R"( "c": "two.safetensors"}})");
  const Safetensors set = Safetensors::open(index);
  EXPECT_FALSE(set.has_checksums());
  EXPECT_EQ(set.unchecked(), (std::vector<std::string_view>{"b", "c"}));
  EXPECT_EQ(set.checksums_problem(), "");
}

TEST_F(SetTest, an_index_that_does_not_agree_with_its_files_is_refused) {
  save_as("one.safetensors", {"a", "b"});
  save_as("two.safetensors", {"b", "c"});
  for (const char* map :
       {R"({"a": "one.safetensors"})",
        R"({"a": "one.safetensors", "b": "one.safetensors", "z": "one.safetensors"})",
        R"({"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})",
        R"({"a": "two.safetensors", "b": "one.safetensors"})"}) {
    write_index(std::string(R"({"weight_map": )") + map + "}");
    const Error error = error_of([&] { (void)Safetensors::open(index); });
    EXPECT_EQ(error.code(), EBADMSG) << error.what();
    EXPECT_EQ(error.path(), index);
  }
  write_index(R"({"weight_map": {"a": "missing.safetensors"}})");
  EXPECT_EQ(error_of([&] { (void)Safetensors::open(index); }).code(), ENOENT);
}

}  // namespace
}  // namespace tensorferry
