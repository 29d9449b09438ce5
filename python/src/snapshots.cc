// Snapshots of a swap space: as lists and tuples, which Python writes to a file as it likes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.h"
#include "closable.h"
#include "gil_release.h"

namespace tensorferry::python {

namespace {

using PySwapSpace = ClosableOf<SwapSpace>;
using Extents = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;
using Tensors =
    std::vector<std::tuple<std::string, std::uint64_t, Extents, std::optional<std::uint64_t>>>;

nb::tuple snapshot(PySwapSpace& self, const std::string& name, const std::vector<std::string>& keys,
                   const std::vector<std::string>& replaced) {
  const SwapSnapshot taken =
      self.with([&](SwapSpace& space) { return space.snapshot(name, keys, replaced); });
  nb::list files;
  for (const std::string& file : taken.files) files.append(path_text(file));
  Tensors tensors;
  for (const SwapSnapshot::Tensor& tensor : taken.tensors) {
    Extents extents;
    for (const auto& [file, offset, bytes] : tensor.extents) {
      extents.emplace_back(file, offset, bytes);
    }
    tensors.emplace_back(tensor.key, tensor.bytes, std::move(extents), tensor.checksum);
  }
  return nb::make_tuple(files, tensors);
}

void attach(PySwapSpace& self, nb::handle files, const Tensors& tensors) {
  SwapSnapshot given;
  for (const nb::handle file : nb::iter(files)) given.files.push_back(to_path(file));
  given.name = given.files.empty() ? "" : given.files.front();
  for (const auto& [key, size, list, checksum] : tensors) {
    SwapSnapshot::Tensor tensor{key, size, {}, checksum};
    for (const auto& [file, offset, bytes] : list) tensor.extents.push_back({file, offset, bytes});
    given.tensors.push_back(std::move(tensor));
  }
  self.with([&](SwapSpace& space) { space.attach(given); });
}

bool trim(nb::handle path, const std::vector<std::tuple<std::uint64_t, std::uint64_t>>& kept,
          std::uint64_t names) {
  const std::string file = to_path(path);
  std::vector<SwapSnapshot::Extent> extents;
  for (const auto& [offset, bytes] : kept) extents.push_back({0, offset, bytes});
  const GilRelease released;
  return trim_snapshot_file(file, extents, names);
}

}  // namespace

void bind_snapshots(nb::module_& module, nb::class_<PySwapSpace>& space) {
  space
      .def("snapshot", &snapshot, nb::arg("name"), nb::arg("keys"),
           nb::arg("replaced") = std::vector<std::string>(),
           nb::sig("def snapshot(self, name: str, keys: Sequence[str], replaced: Sequence[str] = "
                   "...) -> tuple[list[str], list[tuple[str, int, list[tuple[int, int, int]], int "
                   "| None]]]"),
           "Keeps the tensors of these keys as they are now, without a copy, also when the process "
           "has ended.\n\nReturns (files, tensors), what attach() takes: a tensor is (key, bytes, "
           "[(number of the file, offset, bytes), ...], checksum). All bytes are durable then. "
           "Makes room first, so that the tensors can be put again; what the snapshots `replaced` "
           "keep counts as free. Raises OSError (ENOSPC) if the drives have less; nothing has "
           "changed then. tensorferry.snapshot makes whole snapshots of this.")
      .def(
          "drop_snapshot",
          [](PySwapSpace& self, const std::string& name) {
            return self.with([&](SwapSpace& opened) { return opened.drop_snapshot(name); });
          },
          nb::arg("name"),
          "Lets the space use again what only this snapshot keeps. Removes no file. Returns False "
          "if this space has taken no snapshot of that name.")
      .def(
          "snapshots",
          [](PySwapSpace& self) {
            return self.with([](SwapSpace& opened) { return opened.snapshots(); });
          },
          "Returns the names of the snapshots that keep tensors of this space.")
      .def("attach", &attach, nb::arg("files"), nb::arg("tensors"),
           nb::sig("def attach(self, files: Iterable[_Path], tensors: Sequence[tuple[str, int, "
                   "list[tuple[int, int, int]], int | None]]) -> None"),
           "Takes over the tensors of a snapshot under their keys, without reading them. The files "
           "are never written to. The first read of a whole tensor compares its checksum and "
           "raises OSError (EBADMSG) if that is wrong.");
  module.def("trim_snapshot_file", &trim, nb::arg("path"), nb::arg("kept"), nb::arg("names"),
             nb::sig("def trim_snapshot_file(path: _Path, kept: Sequence[tuple[int, int]], names: "
                     "int) -> bool"),
             "Frees the space of a file of snapshots that no (offset, bytes) of `kept` covers. "
             "Returns False, and changes nothing, if a living SwapSpace may write to the file or "
             "if it has not exactly `names` names.");
}

}  // namespace tensorferry::python
