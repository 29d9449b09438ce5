"""Progress of a long measurement."""

from __future__ import annotations

import sys
import time


class Progress:
    """Rewrites one line on a terminal; prints a line per change elsewhere."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.last = ""

    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K[{self.seconds():4.0f} s] {text}"[:120])
            sys.stderr.flush()

    def step(self, text: str) -> None:
        if sys.stderr.isatty():
            self(text)
        else:
            print(f"[{self.seconds():4.0f} s] {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
