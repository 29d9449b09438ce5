"""How the command shows things: tables, sizes and a bar, as the other commands do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_INTERVAL_SECONDS = 0.1
_CELLS_MIN, _CELLS_MAX = 4, 40


def size_text(count: float) -> str:
    """ "3.5 MiB": at least two digits, and no fraction of a byte."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    digits = 1 if unit and count < 100 and round(count, 1) != int(count) else 0
    return f"{count:.{digits}f} {_UNITS[unit]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def shown(text: str) -> str:
    """A name without characters that would move the cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Aligned columns; those whose titles are words of `right` end where the others begin."""
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    rightly = [title in right.split() for title in titles]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, rightly)
        )
        return "  ".join(padded).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(titles), rule, *map(line, rows)])


class Bar:
    """A bar on stderr if that is a terminal; else nothing. Leaving `with` ends its line.

    Verifying:  45%|█████████      | 1.8 GiB/4 GiB [00:01<00:02, 1.2 GB/s]
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._visible = sys.stderr.isatty()
        self._begin = self._drawn = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        if self._visible and time.monotonic() - self._drawn >= _INTERVAL_SECONDS:
            self._draw()

    def __enter__(self) -> Bar:
        if self._visible:
            self._draw()
        return self

    def __exit__(self, *args: object) -> None:
        if self._visible:
            self._draw()
            print(file=sys.stderr)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        elapsed = max(self._drawn - self._begin, 1e-9)
        left = _clock(elapsed / share - elapsed) if share else "?"
        head = f"{self._title}: {share:4.0%}|"
        amounts = f"{size_text(self._done)}/{size_text(self._total)}"
        rate = f"{self._done / elapsed / 1e9:.1f} GB/s"
        tail = f"| {amounts} [{_clock(elapsed)}<{left}, {rate}]"
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        room = columns - len(head) - len(tail) - 1
        line = f"{self._title}: {share:4.0%}"[: columns - 1]
        if room >= _CELLS_MIN:
            line = head + _cells(share, min(room, _CELLS_MAX)) + tail
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    whole = int(min(seconds, 359_999))
    clock = f"{whole // 60 % 60:02}:{whole % 60:02}"
    return clock if whole < 3600 else f"{whole // 3600}:{clock}"


def _cells(share: float, cells: int) -> str:
    """Eighths of a cell, so that the bar moves smoothly."""
    full, eighths = divmod(int(share * cells * 8), 8)
    return ("█" * full + _EIGHTHS[eighths]).ljust(cells)
