// Declarations that the files of this room share. Each bind_*() adds classes and functions to the
// module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "tensorferry/tensorferry.h"

namespace tensorferry::python {

namespace nb = nanobind;

void bind_checksums(nb::module_& module);
void bind_masters(nb::module_& module);
void bind_moments(nb::module_& module);
void bind_errors(nb::module_& module);
void bind_files(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_operations(nb::module_& module);
void bind_priority(nb::module_& module);
void bind_handle(nb::module_& module);
void bind_swap(nb::module_& module);
void bind_checkpoint(nb::module_& module);

template <class Opened>
class ClosableOf;
void bind_snapshots(nb::module_& module, nb::class_<ClosableOf<SwapSpace>>& space);

// An Error for an invalid argument; Python gets a tensorferry.InvalidArgument.
[[nodiscard]] Error invalid(const char* operation, std::string hint);

// Text that may hold the bytes of a path: as Python names files, and as Python can print it.
[[nodiscard]] nb::str path_text(const std::string& path);
[[nodiscard]] nb::str shown(const std::string& text);

// The same failure as a Python exception object, without raising it.
[[nodiscard]] nb::object as_exception(const Error& error);

// A Python number as a count of bytes or an offset. Throws invalid() if it is negative or too
// large.
[[nodiscard]] std::uint64_t to_bytes(nb::handle number, const char* name,
                                     const char* operation = "transfer");

// A priority by name; None: the call names none.
[[nodiscard]] std::optional<Priority> to_priority(nb::handle priority);

// A Python number as bytes per second. Throws invalid() for 0.
[[nodiscard]] std::uint64_t to_rate(nb::handle rate, const char* operation);

// The settings of everything that has a Handle inside. None: chosen to suit the device.
[[nodiscard]] HandleOptions handle_options(const std::string& engine, nb::handle block_bytes,
                                           nb::handle queue_depth, nb::handle workers,
                                           const std::string& submit, bool overlap);

// Opens the file that a user names by a path (str, bytes, os.PathLike), a File, or a descriptor.
[[nodiscard]] File to_file(nb::handle file, Access access);

// The File of Python for an open file.
[[nodiscard]] nb::object python_file(const File& file);

// When a wait of `timeout` seconds that begins now must end; never for None. Throws invalid() for
// NaN.
[[nodiscard]] Operation::Clock::time_point deadline_after(std::optional<double> timeout);

// A path as the system takes it. Throws TypeError, or ValueError for a NUL character.
[[nodiscard]] std::string to_path(nb::handle path);

}  // namespace tensorferry::python
