"""Opens files of torch.save: finds the tensors, without torch and without making any object.

The pickle in the file is read by rules of its own. Tensors become descriptions; whatever else it
names becomes a mark that knows its name, and nothing that the file says is run.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..checkpoint.sealed import Sealed
from ..checkpoint.torch_layout import NotOurs, Place, TorchLayout, check_header, damaged
from ..checkpoint.zip_archive import LOCAL_HEADER_BYTES
from .dtypes import PAIRED, bits_of, kind_of_storage, kind_of_torch
from .tensors import (
    Check,
    Checkpoint,
    StoredBox,
    StoredObject,
    Stretch,
    Tensor,
    Unusable,
    dense,
    unpaired,
)

_DEPTH_MAX = 200
# A file of a few bytes could describe a tree without end.
_NODES_MAX = 100_000


def open_torch_file(path: str) -> Checkpoint:
    """Opens a file of torch.save."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        layout = TorchLayout(descriptor, path)
        data = layout.data("data.pkl")
        if not layout.known:
            raise NotOurs("a program other than torch has laid it out")
    except NotOurs as reason:
        raise Unusable(
            f"{path}: {reason}: load it with torch.load and save it with torch.save"
        ) from None
    finally:
        os.close(descriptor)
    root = _unpickled(path, data)
    if isinstance(root, _Foreign) or not isinstance(root, (dict, list, tuple, _Found)):
        raise Unusable(
            f"{path}: holds {_kind(root)}, and no tensors by name: load it with torch.load and "
            "save its state_dict()"
        )
    places = {place.name.rpartition("/")[2]: place for place in layout.places}
    tensors: list[Tensor] = []
    objects: list[StoredObject] = []
    names: dict[str, list[str]] = {}  # by storage
    for name, leaf in _leaves(path, root, len(data)):
        if isinstance(leaf, _Found):
            tensors.append(_tensor(path, name, leaf, places, layout.has_crcs))
            names.setdefault(leaf.storage.key, []).append(name)
        else:
            objects.append(StoredObject(name or "object", _kind(leaf)))
    _refuse_twins(path, [*(tensor.name for tensor in tensors), *(one.name for one in objects)])

    def checks() -> Iterator[Check]:
        return _checks(path, names)

    return Checkpoint(path, "torch", tensors, checks, objects)


def _checks(path: str, names: dict[str, list[str]]) -> Iterator[Check]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        layout = TorchLayout(descriptor, path)
        if layout.has_crcs:
            layout.check_records()
        for place in layout.places:
            users = names.get(place.name.rpartition("/")[2]) or [place.name]
            more = f" and {len(users) - 1} more of its storage" if len(users) > 1 else ""
            check_header(path, place, layout.read(place.header_offset, LOCAL_HEADER_BYTES))
            stretch = Stretch(path, place.offset, place.size)
            yield Check(users[0] + more, stretch, place.crc if layout.has_crcs else None)
    finally:
        os.close(descriptor)


class _Storage(NamedTuple):
    key: str
    bytes: int
    kind: str


class _Found(NamedTuple):
    """A strided tensor; offset, sizes and strides count elements."""

    storage: _Storage
    kind: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _Foreign:
    """Stands for an object of any class, and knows the name of the class alone."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, value: object) -> None:
        pass

    def extend(self, values: object) -> None:
        pass

    def add(self, value: object) -> None:
        pass


class _Dictionary(dict):  # type: ignore[type-arg]
    """An OrderedDict, or another dict with a state that does not matter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(arg for arg in args if isinstance(arg, (dict, list, tuple))))

    def __setstate__(self, state: object) -> None:
        pass


class _Kind(str):
    """The elements of a storage, or a dtype."""


def _natural(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _rebuilt(storage: Any, offset: Any, sizes: Any, strides: Any, kind: str) -> Any:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor has no storage")
    found = _Found(
        storage,
        kind,
        _natural(offset),
        tuple(map(_natural, sizes)),
        tuple(map(_natural, strides)),
    )
    if len(found.sizes) != len(found.strides):
        raise ValueError("the shape of a tensor is damaged")
    last = found.offset
    if 0 not in found.sizes:
        last += 1 + sum((n - 1) * step for n, step in zip(found.sizes, found.strides))
    item_bytes = 1 if kind == PAIRED else bits_of(kind) // 8
    if last * item_bytes > storage.bytes:
        raise ValueError("a tensor is larger than its storage")
    return found


def _rebuild_v2(storage: Any, offset: Any, sizes: Any, strides: Any, *more: Any) -> Any:
    if not isinstance(storage, _Storage) or len(more) > 2:  # with bits for conj() and the like
        return _foreign("torch", "Tensor of a rare kind")()
    return _rebuilt(storage, offset, sizes, strides, storage.kind)


def _rebuild_v3(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    grad: Any,
    hooks: Any,
    kind: Any,
    *more: Any,
) -> Any:
    if not isinstance(kind, _Kind) or not isinstance(storage, _Storage) or more:
        return _foreign("torch", "Tensor of a rare kind")()
    return _rebuilt(storage, offset, sizes, strides, str(kind))


def _first(value: Any, *more: Any) -> Any:
    return value


def _with_type(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    return rebuild(*arguments)


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


_CALLS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): Sealed(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Sealed(_rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): Sealed(_first),
    ("torch._utils", "_rebuild_parameter_with_state"): Sealed(_first),
    ("torch._tensor", "_rebuild_from_type_v2"): Sealed(_with_type),
    ("torch", "Size"): Sealed(_size),
    ("collections", "OrderedDict"): _Dictionary,
    ("collections", "defaultdict"): _Dictionary,
}


@functools.lru_cache(maxsize=1024)
def _foreign(module: str, name: str) -> Any:
    return type("Foreign", (_Foreign,), {"name": f"{module}.{name}"})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _CALLS.get((module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage"):
            kind = kind_of_storage(name) or kind_of_torch(name)
            if kind is not None:
                return _Kind(kind)
        return _foreign(module, name)

    def persistent_load(self, identity: Any) -> Any:
        what, kind, key, _, count = identity
        if what != "storage" or not isinstance(key, str):
            raise ValueError("it refers to something that is not a storage")
        if not isinstance(kind, _Kind):  # quantized
            return _foreign("torch", "Storage")()
        return _Storage(key, _natural(count) * bits_of(kind) // 8, str(kind))


def _unpickled(path: str, data: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its objects raise
        raise damaged(path, f"data.pkl cannot be read: {error}", 0) from None


def _leaves(path: str, root: Any, pickle_bytes: int) -> Iterator[tuple[str, Any]]:
    """All that is not a dict, list or tuple, by the keys that lead to it, joined by dots."""
    left = pickle_bytes + _NODES_MAX

    def visit(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal left
        left -= 1
        if left < 0 or depth > _DEPTH_MAX:
            raise damaged(path, "data.pkl describes a tree without end", 0)
        inner = depth + 1
        prefix = name + "." if name else ""
        if isinstance(value, dict):
            for key, item in value.items():
                yield from visit(item, f"{prefix}{_key(key)}", inner)
        elif isinstance(value, (list, tuple)) and not isinstance(value, _Found):
            if not _has_tensors(value):
                yield name, value  # betas of Adam: one object, as in a DCP folder
                return
            for number, item in enumerate(value):
                yield from visit(item, f"{prefix}{number}", inner)
        else:
            yield name, value

    return visit(root, "", 0)


def _has_tensors(values: Any) -> bool:
    """Whether a list has tensors, or dicts and lists that may have."""
    return any(isinstance(value, (_Found, dict, list, tuple)) for value in values)


def _key(key: object) -> str:
    return key if isinstance(key, str) else repr(key) if isinstance(key, int) else _kind(key)


def _kind(value: object) -> str:
    if isinstance(value, _Foreign):
        return value.name
    return "torch.dtype" if isinstance(value, _Kind) else type(value).__name__


def _tensor(
    path: str, name: str, found: _Found, places: dict[str, Place], has_crcs: bool
) -> Tensor:
    item_bytes = 1 if found.kind == PAIRED else bits_of(found.kind) // 8
    place = places.get(found.storage.key)
    shown = name or "tensor"
    if math.prod(found.sizes) == 0:
        return Tensor(shown, found.kind, found.sizes, (), None)
    if place is None or place.size != found.storage.bytes:
        raise damaged(path, f"the storage of {shown} is missing, or has another size", 0)
    sizes, strides = found.sizes, found.strides
    offset = place.offset + found.offset * item_bytes
    box = StoredBox(path, offset, (0,) * len(sizes), sizes, strides)
    if found.kind == PAIRED:
        if not dense(box) or not sizes:
            raise Unusable(f"{path}: {shown} has pairs of elements that do not follow each other")
        box = unpaired(box)
        sizes = box.sizes
    tensor = Tensor(shown, found.kind, sizes, (box,), None)
    whole = dense(box) and tensor.bytes == place.size
    return tensor._replace(checksum=f"crc32:{place.crc:08x}") if whole and has_crcs else tensor


def _refuse_twins(path: str, names: list[str]) -> None:
    counts = Counter(names)
    if len(counts) != len(names):
        twin = counts.most_common(1)[0][0]
        raise Unusable(f"{path}: two entries have the name {twin} when keys are joined by dots")
