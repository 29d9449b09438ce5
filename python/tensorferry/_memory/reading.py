"""Reads of weights from the drive, which fail where the last write has failed."""

from __future__ import annotations

import copy

import torch

from .._core import Operation


class OlderValues(RuntimeError):
    """The drive has values from before a write that failed."""


class NeverBegun:
    """Stands for a write that could not even begin."""

    def __init__(self, error: BaseException) -> None:
        # Without the frames that it comes from.
        self._error = copy.copy(error) if isinstance(error, OSError) else OlderValues(repr(error))

    def wait(self) -> None:
        raise copy.copy(self._error)


class Reading:
    """A read of what the last write has put. Where that has failed, so does this."""

    def __init__(
        self, size: torch.Size, operation: Operation, put: Operation | NeverBegun | None
    ) -> None:
        """`size` is that of the weight, `put` its last write."""
        self.operation = operation
        self._size = size
        self._put = put

    def done(self) -> bool:
        return self.operation.done()

    def cancel(self) -> None:
        self.operation.cancel()

    def wait(self) -> None:
        # What is on its way to the drive comes from the memory it is written from, and no bytes
        # move: it is right, whatever becomes of the write.
        if self.operation.wait() == 0 or self._put is None:
            return
        try:
            self._put.wait()
        except (OSError, OlderValues) as error:
            raise OlderValues(
                f"a weight of shape {tuple(self._size)} could not be written ({error}) and the "
                "drive has older values: load a checkpoint with load_state_dict() of the model and "
                "of the optimizer"
            ) from error
