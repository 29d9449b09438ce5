"""Reads files of torch.save: torch unpickles, and gets its storages from here.

torch.load is given an object that looks like the file. When torch reads a storage from it, nothing
is read; when torch asks where to put that storage (torch.serialization.register_package), it gets
one that the drive has filled. So rebuilding finds the bytes in place, whatever it does with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from .._core import File
from .._progress import Progress, ProgressReport
from .storage_stream import StorageStream
from .torch_layout import NotOurs, TorchLayout
from .zip_archive import LOCAL_HEADER_BYTES

# Where a storage goes: called with the storage, on the CPU, and where it was saved from.
Placing: TypeAlias = Callable[[torch.UntypedStorage, str], "torch.UntypedStorage | None"]
MapLocation: TypeAlias = "str | torch.device | dict[str, str] | Placing | None"

_CPU = torch.device("cpu")
# torch asks in rising order, and two packages cannot have the same number.
_PRIORITY = -7919


def load_torch_file(
    path: str, map_location: MapLocation, verify: bool, progress: Progress, **torch_options: Any
) -> Any:
    """Does what torch.load does. Raises NotOurs for a file that torch itself has to load."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        layout = TorchLayout(descriptor, path)
        verify = verify and layout.has_crcs
        if verify:
            layout.check_records()
        if not layout.known:
            raise NotOurs("torch.save has not written it")
        total = sum(place.size for place in layout.places)
        report = ProgressReport(progress, "load", total)
        with File.borrow(descriptor) as file:
            with StorageStream(file, path, layout.places, verify, report) as stream:
                loading = _Loading(layout, stream)
                if callable(map_location):
                    map_location = loading.asking(map_location)
                with loading:
                    loaded = torch.load(
                        loading, map_location=map_location, mmap=False, **torch_options
                    )
        report.update(total)
        return loaded
    finally:
        os.close(descriptor)


class _Loading:
    """The file, as torch reads it during one load. Inside `with` storages come from the stream."""

    def __init__(self, layout: TorchLayout, stream: StorageStream) -> None:
        self._layout = layout
        self._stream = stream
        self._at = 0
        self._by_offset = {place.offset: number for number, place in enumerate(layout.places)}
        self._by_header = {place.header_offset: place for place in layout.places}
        self._wanted: int | None = None  # the storage that torch has just read
        self._outer: _Loading | None = None

    def __enter__(self) -> _Loading:
        _register()
        self._outer, _active.loading = _active.loading, self
        return self

    def __exit__(self, *args: object) -> None:
        _active.loading = self._outer

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._layout.bytes}[whence]
        self._at = start + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        data = self._layout.read(self._at, self._layout.bytes if count < 0 else count)
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        raise NotImplementedError("a zip archive has no lines")

    def readinto(self, memory: memoryview) -> int:
        count = len(memory)
        number = self._by_offset.get(self._at)
        place = self._by_header.get(self._at)
        if number is not None and count == self._layout.places[number].size:
            self._wanted = number
        elif place is not None and count == LOCAL_HEADER_BYTES:
            memory[:] = place.header()
        else:
            data = self._layout.read(self._at, count)
            count = len(data)
            memory[:count] = data
        self._at += count
        return count

    def restore(self, location: str) -> torch.UntypedStorage | None:
        """Returns the storage that torch has just read, where the location says; None leaves it to
        torch."""
        number = self._wanted
        if number is None:
            return None
        self._wanted = None
        if location == "meta":
            return None
        device = _device_of(location)
        storage = self._stream.get(number, device or _CPU)
        self._stream.forget(number)
        # What was read ahead may be where the storages before it were wanted.
        if device is not None:
            return storage if storage.device == device else storage.to(device=device)
        return torch.serialization.default_restore_location(storage.cpu(), location)

    def asking(self, map_location: Placing) -> Placing:
        """Wraps a function of the user, which gets each storage with its bytes on the CPU."""

        def place(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
            if self._wanted is None:
                return map_location(storage, location)
            result = map_location(self._stream.get(self._wanted, _CPU), location)
            if result is not None:
                self._stream.forget(self._wanted)
                self._wanted = None
            return result  # if None, torch asks restore() next

        return place


class _Active(threading.local):
    loading: _Loading | None = None


_active = _Active()
_registered = threading.Lock()


def _register() -> None:
    """Has torch ask here first where a storage goes; once in a process."""
    if _registered.acquire(blocking=False):
        torch.serialization.register_package(_PRIORITY, lambda storage: None, _restore)


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    return None if _active.loading is None else _active.loading.restore(location)


def _device_of(location: str) -> torch.device | None:
    """Returns the device of a location if a drive can fill its memory."""
    if location == "cpu":
        return _CPU
    if location.startswith("cuda") and torch.cuda.is_available():
        device = torch.device(location)
        index = torch.cuda.current_device() if device.index is None else device.index
        if index < torch.cuda.device_count():
            return torch.device("cuda", index)
    return None
