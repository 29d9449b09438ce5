"""What torch asks of writers and readers alike: which folder a checkpoint is in."""

from __future__ import annotations

import os

from torch.distributed.checkpoint.filesystem import FileSystem


class CheckpointFolder:
    """The folder of a Writer or a Reader. torch calls it checkpoint_id."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = os.fspath(path)

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this can be a folder of a checkpoint."""
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def _move_to(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Goes to another folder, if one is given."""
        if checkpoint_id:
            self._path = os.fspath(checkpoint_id)
