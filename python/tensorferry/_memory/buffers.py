"""The swap space of this run and rank, and letting go of its buffers."""

import contextlib
import os
import traceback

from .._core import SwapSpace


@contextlib.contextmanager
def letting_go():
    """Takes the buffers out of the frames of an exception: who handles it may wait for them."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def open_space(nvme_path, buffer_bytes, **handle_options):
    """A swap space in a directory of this run and rank."""
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
