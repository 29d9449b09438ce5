// A list that is mostly of one element, which then costs no allocation. Elements stay where they
// are, except when a second one is added to a list for which nothing was reserved.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace tensorferry {

template <class T>
class OneOrMany {
 public:
  // For a list that is going to have `count` elements.
  void reserve(std::size_t count) {
    if (count > 1 && empty()) many_.reserve(count);
  }
  T& push_back(const T& element) { return emplace_back(element); }
  T& push_back(T&& element) { return emplace_back(std::move(element)); }
  template <class... Arguments>
  T& emplace_back(Arguments&&... arguments) {
    if (!one_ && many_.capacity() == 0) return one_.emplace(std::forward<Arguments>(arguments)...);
    if (one_) {
      many_.push_back(std::move(*one_));
      one_.reset();
    }
    return many_.emplace_back(std::forward<Arguments>(arguments)...);
  }
  // Destroys the elements and gives back all memory.
  void clear() noexcept {
    one_.reset();
    if (many_.capacity() > 0) std::vector<T>().swap(many_);
  }

  [[nodiscard]] std::size_t size() const noexcept { return one_ ? 1 : many_.size(); }
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  [[nodiscard]] T* data() noexcept { return one_ ? &*one_ : many_.data(); }
  [[nodiscard]] const T* data() const noexcept { return one_ ? &*one_ : many_.data(); }
  [[nodiscard]] T* begin() noexcept { return data(); }
  [[nodiscard]] T* end() noexcept { return data() + size(); }
  [[nodiscard]] const T* begin() const noexcept { return data(); }
  [[nodiscard]] const T* end() const noexcept { return data() + size(); }
  [[nodiscard]] T& operator[](std::size_t index) noexcept { return data()[index]; }
  [[nodiscard]] const T& operator[](std::size_t index) const noexcept { return data()[index]; }
  [[nodiscard]] T& front() noexcept { return data()[0]; }
  [[nodiscard]] const T& front() const noexcept { return data()[0]; }
  [[nodiscard]] T& back() noexcept { return data()[size() - 1]; }
  [[nodiscard]] const T& back() const noexcept { return data()[size() - 1]; }

 private:
  std::optional<T> one_;
  std::vector<T> many_;
};

}  // namespace tensorferry
