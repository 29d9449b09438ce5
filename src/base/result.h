// Result<T>: a value or an Error. Errors are values inside the library; the public API turns them
// into exceptions with or_throw().
#pragma once

#include <concepts>
#include <utility>
#include <variant>

#include "tensorferry/error.h"

namespace tensorferry {

struct Nothing {};

// Failure is another type only if its meaning is not known yet (CudaFailure).
template <class T, class Failure = Error>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT(*-explicit-*)
  Result(Failure error)                                                  // NOLINT(*-explicit-*)
      : state_(std::in_place_index<1>, std::move(error)) {}

  [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }

  // Only if ok().
  [[nodiscard]] T& value() noexcept { return *std::get_if<0>(&state_); }
  [[nodiscard]] const T& value() const noexcept { return *std::get_if<0>(&state_); }
  // Only if !ok().
  [[nodiscard]] const Failure& error() const noexcept { return *std::get_if<1>(&state_); }

  T or_throw() &&
    requires std::same_as<Failure, Error>
  {
    if (!ok()) throw Error(error());
    return std::move(value());
  }

 private:
  std::variant<T, Failure> state_;
};

using Status = Result<Nothing>;

}  // namespace tensorferry
