"""Reads of weights from the drive. A read fails if the last write of the weight has failed."""

from __future__ import annotations

import copy

import torch

from .._core import Operation


class OlderValues(RuntimeError):
    """The drive has values from before a write that failed."""


class NeverBegun:
    """Stands for a write that could not begin."""

    def __init__(self, error: BaseException) -> None:
        # Without its frames.
        self._error = copy.copy(error) if isinstance(error, OSError) else OlderValues(repr(error))

    def wait(self) -> None:
        raise copy.copy(self._error)


class Reading:
    """A read of a part of a weight. It fails if the last write of that part has failed."""

    def __init__(
        self, size: torch.Size, operation: Operation, put: Operation | NeverBegun | None
    ) -> None:
        """`size` is the size of the weight, `put` the last write of the part."""
        self.operation = operation
        self._size = size
        self._put = put

    def done(self) -> bool:
        return self.operation.done()

    def cancel(self) -> None:
        self.operation.cancel()

    def wait(self) -> None:
        # A part that is still being written comes from the memory of the write, and no bytes move:
        # it is right, even if the write fails.
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
