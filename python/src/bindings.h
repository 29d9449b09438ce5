// What the files of this room share. Each bind_*() adds its classes and functions to the module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "tensorferry/tensorferry.h"

namespace tensorferry::python {

namespace nb = nanobind;

void bind_errors(nb::module_& module);
void bind_files(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_operations(nb::module_& module);
void bind_handle(nb::module_& module);
void bind_swap(nb::module_& module);

// An Error for an argument that cannot be honoured; Python gets a tensorferry.InvalidArgument.
[[nodiscard]] Error invalid(const char* operation, std::string hint);

// Text that may hold the bytes of a path: as Python names files, and as it can be printed.
[[nodiscard]] nb::str path_text(const std::string& path);
[[nodiscard]] nb::str shown(const std::string& text);

// The same failure as a Python exception object, to be looked at rather than raised.
[[nodiscard]] nb::object as_exception(const Error& error);

// A Python number as a count of bytes or an offset. Throws invalid() when it is negative or huge.
[[nodiscard]] std::uint64_t to_bytes(nb::handle number, const char* name,
                                     const char* operation = "transfer");

// The settings that everything with a Handle in it has. None: what suits the device.
[[nodiscard]] HandleOptions handle_options(const std::string& engine, nb::handle block_bytes,
                                           nb::handle queue_depth, nb::handle workers,
                                           const std::string& submit, bool overlap);

// What a user may name a file by: a path (str, bytes, os.PathLike), a File, or a descriptor.
[[nodiscard]] File to_file(nb::handle file, Access access);

// A path as the system wants it. Throws TypeError, or ValueError for a NUL character.
[[nodiscard]] std::string to_path(nb::handle path);

}  // namespace tensorferry::python
