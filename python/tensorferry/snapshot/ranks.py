"""What the ranks of a run tell each other while they take a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed

T = TypeVar("T")


def _together() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def own_rank() -> int:
    return torch.distributed.get_rank() if _together() else 0


def rank_count() -> int:
    return torch.distributed.get_world_size() if _together() else 1


def from_first(value: T) -> T:
    """Returns what the first rank gives."""
    if not _together():
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def all_or_none(what: str) -> Iterator[None]:
    """Raises on every rank if what is inside has failed on one of them. Waits for all."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    if _together():
        texts: list[str | None] = [None] * rank_count()
        torch.distributed.all_gather_object(texts, None if failure is None else repr(failure))
        failed = [(rank, text) for rank, text in enumerate(texts) if text is not None]
        if failed and failure is None:
            rank, text = failed[0]
            raise RuntimeError(f"rank {rank} failed {what}: {text}")
    if failure is not None:
        raise failure


def gathered(value: T) -> list[T]:
    """Returns what each rank gives."""
    if not _together():
        return [value]
    values: list[T | None] = [None] * rank_count()
    torch.distributed.all_gather_object(values, value)
    return values  # type: ignore[return-value]
