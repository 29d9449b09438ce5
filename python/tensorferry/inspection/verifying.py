"""`tensorferry checkpoint verify`: are the bytes those that were saved?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._core import crc32, safetensors_checksum
from .opening import open_checkpoint
from .safetensors_files import CHUNK_BYTES
from .tensors import Check, Checkpoint
from .text import Bar, plural, shown, size_text
from .windows import Source, Window, windows


class Damage(NamedTuple):
    """What is not as it was saved."""

    path: str
    name: str | None  # of the tensor; None for what is around tensors
    offset: int | None
    bytes: int | None
    problem: str


class Verdict(NamedTuple):
    checkpoint: Checkpoint | None  # None if it cannot be opened
    path: str
    damages: list[Damage]
    read_bytes: int
    checked_bytes: int  # that have a checksum
    seconds: float


def verify(paths: Sequence[str], as_json: bool) -> tuple[int, Any]:
    """Returns the exit status, and what to print: a text, or an object for JSON."""
    # First all are opened: something that is not a checkpoint is found before hours of reading.
    opened = [_opened(path) for path in paths]
    verdicts = [_verify(path, one) for path, one in zip(paths, opened)]
    status = 1 if any(verdict.damages for verdict in verdicts) else 0
    if as_json:
        return status, {"checkpoints": [_described(verdict) for verdict in verdicts]}
    return status, "\n".join(_text(verdict) for verdict in verdicts)


def _opened(path: str) -> Checkpoint | Damage:
    try:
        return open_checkpoint(path)
    except OSError as error:
        return damage_of(error, path)


def _verify(path: str, checkpoint: Checkpoint | Damage) -> Verdict:
    if isinstance(checkpoint, Damage):
        return Verdict(None, path, [checkpoint], 0, 0, 0.0)
    begin = time.monotonic()
    damages: list[Damage] = []
    read = checked = 0
    try:
        checks = list(checkpoint.checks())
        with Bar("Verifying", sum(check.place.bytes for check in checks)) as bar:
            for check, damage, count in _judged(checks):
                read += count
                checked += count if check.has_checksum else 0
                bar.add(count)
                if damage is not None:
                    damages.append(damage)
    except OSError as error:
        damages.append(damage_of(error, path))
    return Verdict(checkpoint, path, damages, read, checked, time.monotonic() - begin)


def damage_of(error: OSError, path: str) -> Damage:
    """What an error of reading says."""
    problem = getattr(error, "hint", None) or error.strerror or str(error)
    named = error.filename or getattr(error, "path", None) or path
    name = named if isinstance(named, str) else str(named)
    return Damage(name, None, getattr(error, "offset", None), None, problem)


def _judged(checks: Iterable[Check]) -> Iterator[tuple[Check, Damage | None, int]]:
    """Reads all bytes; yields how many have been read of a check, and what is wrong with them."""
    crc = 0
    wrong = False  # one damage for each check is enough
    for window in windows(Source(check, check.place.bytes, [check.place]) for check in checks):
        check: Check = window.owner
        if window.begin == 0:
            crc, wrong = 0, False
        damage = None
        if check.crc32 is not None:
            crc = crc32(window.memory, crc)
            if window.last and crc != check.crc32:
                damage = _damage(check, check.place.offset, check.place.bytes)
        elif check.xxh3 and not wrong:
            damage = _wrong_chunk(check, window)
            wrong = damage is not None
        yield check, damage, len(window.memory)


def _wrong_chunk(check: Check, window: Window) -> Damage | None:
    number = window.begin // CHUNK_BYTES
    if safetensors_checksum(window.memory) == check.xxh3[number]:
        return None
    return _damage(check, check.place.offset + window.begin, len(window.memory))


def _damage(check: Check, offset: int, count: int) -> Damage:
    problem = "the bytes are not those that were saved: their checksum is wrong"
    return Damage(check.place.path, check.name, offset, count, problem)


def _described(verdict: Verdict) -> dict[str, Any]:
    return {
        "path": verdict.path,
        "format": verdict.checkpoint.format if verdict.checkpoint else None,
        "sound": not verdict.damages,
        "read_bytes": verdict.read_bytes,
        "checked_bytes": verdict.checked_bytes,
        "seconds": verdict.seconds,
        "damages": [damage._asdict() for damage in verdict.damages],
    }


def _text(verdict: Verdict) -> str:
    path, checked = shown(verdict.path), size_text(verdict.checked_bytes)
    if verdict.damages:
        lines = [f"{path}: DAMAGED: {plural(len(verdict.damages), 'place')}"]
        lines += ["  " + _damage_text(damage) for damage in verdict.damages]
        return "\n".join([*lines, "  Use another copy of it."])
    speed = f"{verdict.read_bytes / max(verdict.seconds, 1e-9) / 1e9:.1f} GB/s"
    took = f"in {verdict.seconds:.1f} s, {speed}"
    without = verdict.read_bytes - verdict.checked_bytes
    if not verdict.checked_bytes and without:
        return (
            f"{path}: has no checksums: {size_text(without)} were read {took}, and nothing was "
            "compared"
        )
    text = f"{path}: sound: {checked} match their checksums, read {took}"
    return text + (f"; {size_text(without)} have no checksum and were only read" if without else "")


def _damage_text(damage: Damage) -> str:
    where = shown(damage.path)
    if damage.name is not None:
        where = f"{shown(damage.name)}: {where}"
    if damage.offset is not None:
        where += f", offset {damage.offset}"
    if damage.bytes is not None:
        where += f", length {damage.bytes}"
    return f"{where}: {shown(damage.problem)}"
