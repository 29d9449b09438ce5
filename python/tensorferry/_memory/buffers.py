"""The swap space of this run and rank, and how to let go of its buffers."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from .._core import SwapSpace

NvmePath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]  # one directory or several


@contextlib.contextmanager
def letting_go() -> Iterator[None]:
    """Removes the buffers from the frames of an exception: its handler may wait for them."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def open_space(nvme_path: NvmePath, buffer_bytes: int, **handle_options: Any) -> SwapSpace:
    """Opens a swap space in a directory of this run and rank."""
    environment = os.environ
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run in ("", "none") and "MASTER_PORT" in environment:
        run = f"{environment.get('MASTER_ADDR', '')}-{environment['MASTER_PORT']}"
    rank = environment.get("RANK", "0")
    return SwapSpace(
        nvme_path,
        buffer_bytes=buffer_bytes,
        run=run,
        rank=int(rank) if rank.isdecimal() else 0,
        **handle_options,
    )
