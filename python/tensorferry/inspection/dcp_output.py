"""Writes a folder of torch.distributed.checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ..dcp import Writer
from ..dcp.data_file import LateTensor
from ..dcp.writer import Priority
from .gathering import source_of
from .tensors import Checkpoint, Tensor
from .torch_output import LateBytes, stand_ins
from .windows import Stream


def write_dcp_folder(
    checkpoint: Checkpoint,
    path: str,
    passed: Callable[[int], object],
    priority: Priority | None = None,
) -> None:
    """Replaces the checkpoint in the folder, which is made if it is missing.

    `passed` is called with how many bytes have been written since. `priority` is that of Writer.
    """
    done = 0

    def report(now: int, total: int) -> None:
        nonlocal done
        passed(now - done)
        done = now

    missing = _missing_folders(path)
    planner = _Planner(checkpoint.tensors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is one process
            torch.distributed.checkpoint.save(
                stand_ins(checkpoint.tensors),
                storage_writer=Writer(path, progress=report, priority=priority),
                planner=planner,
                no_dist=True,
            )
    except BaseException as error:
        for folder in missing:
            try:
                os.rmdir(folder)
            except OSError:
                break  # it was not made, or others use it
        raise _cause(error) from None
    finally:
        planner.close()


def _missing_folders(path: str) -> list[str]:
    """The folders that a save makes, the innermost first."""
    found, folder = [], os.path.abspath(path)
    while not os.path.exists(folder):
        found.append(folder)
        folder = os.path.dirname(folder)
    return found


def _cause(error: BaseException) -> BaseException:
    """What happened, without torch's words around it."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        found = first[0] if isinstance(first, tuple) else first
        if isinstance(found, BaseException):
            return found
    return error


class _Planner(DefaultSavePlanner):  # type: ignore[misc]  # mypy knows nothing of torch
    """Plans with stand-ins, and gives the writer tensors whose bytes come when they are written."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._stream: Stream | None = None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        names = [item.index.fqn for item in plan.items]
        self._stream = Stream(source_of(self._tensors[name]) for name in names)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        assert self._stream is not None
        return LateTensor(found.dtype, found.shape, LateBytes(self._stream, found.nbytes))

    def close(self) -> None:
        """Ends the reads that are under way."""
        if self._stream is not None:
            self._stream.close()
