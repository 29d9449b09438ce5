"""Snapshots of runs of transformers' Trainer."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from .. import snapshot
from .._core import make_safetensors_header
from ..snapshot.random_states import random_states, set_random_states

_STATE = "trainer_state.json"


class SnapshotCallback(TrainerCallback):  # type: ignore[misc]  # mypy knows nothing of it
    """Takes a snapshot every so many steps of a Trainer, and goes on from the newest one:

    snapshots = SnapshotCallback("snapshots", every=100, keep=2)
    trainer = Trainer(model, arguments, optimizers=(optimizer, None), callbacks=[snapshots], ...)
    trainer.train(resume_from_checkpoint=snapshots.checkpoint())

    A snapshot has the model, the optimizer, the scheduler, the states of random number generators
    and the Trainer's own state, with its place in the data. `path` and `keep` are those of
    snapshot.take(). The Trainer's own checkpoints are not needed: save_strategy="no".
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int, keep: int | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}: it must be at least 1")
        self._path = Path(path)
        self._every = every
        self._keep = keep
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._name: str | None = None  # of the snapshot to resume from
        self._random: dict[str, Any] | None = None  # what comes back when the data are in place

    def checkpoint(self) -> str | None:
        """Returns a folder for train(resume_from_checkpoint=...), or None if there is no snapshot.

        The folder has the Trainer's state, from which it finds its place in the data, and no
        weights: the Trainer warns of missing keys, and the callback then brings them.
        """
        before = random_states()
        resumed = snapshot.resume(self._path)
        set_random_states(before)
        if resumed is None:
            return None
        self._name = resumed.snapshot.name
        self._folder = tempfile.TemporaryDirectory(prefix="tensorferry-trainer-")
        header, _ = make_safetensors_header([], metadata={"format": "pt"})
        Path(self._folder.name, "model.safetensors").write_bytes(header)
        Path(self._folder.name, _STATE).write_text(resumed.extra["trainer_state"])
        return self._folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._name is None:
            return
        snapshot.resume(self._path, **_held(given), name=self._name)
        self._name = None
        self._random = random_states()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # The Trainer draws random numbers for the data of an epoch: after that in the middle of
        # one, before that at its beginning.
        if self._random is not None and float(state.epoch or 0).is_integer():
            self._set_random()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._random is not None:
            self._set_random()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % self._every == 0:
            extra = {"trainer_state": _json_of(state)}
            snapshot.take(self._path, **_held(given), extra=extra, keep=self._keep)

    def _set_random(self) -> None:
        assert self._random is not None
        set_random_states(self._random)
        self._random = None


def _held(given: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer hands to callbacks, out of what accelerate wraps it in."""
    optimizer, scheduler = given["optimizer"], given["lr_scheduler"]
    return {
        "model": _inner(given["model"]),
        "optimizer": getattr(optimizer, "optimizer", optimizer),
        "scheduler": getattr(scheduler, "scheduler", scheduler),
    }


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def _json_of(state: Any) -> str:
    with tempfile.TemporaryDirectory(prefix="tensorferry-trainer-") as folder:
        path = os.path.join(folder, _STATE)
        state.save_to_json(path)
        with open(path) as file:
            return json.dumps(json.load(file))
