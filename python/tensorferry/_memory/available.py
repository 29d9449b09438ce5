"""How much memory this process may still take."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What "auto" takes of the memory that is left.
AUTO_SHARE = 0.5

_MOUNT = pathlib.Path("/sys/fs/cgroup")
_V1_NO_LIMIT = 1 << 60  # version 1 writes a huge number where there is none


def available_bytes(
    proc: pathlib.Path = pathlib.Path("/proc"), mount: pathlib.Path = _MOUNT
) -> int:
    """Bytes that the system and the cgroups of this process have left, without swapping."""
    left = [_left_by_system(proc)]
    for line in _lines(proc / "self/cgroup"):
        number, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if number == "0":
            left += _left_by_cgroups(mount, relative, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left_by_cgroups(
                mount / "memory", relative, "memory.limit_in_bytes", "memory.usage_in_bytes"
            )
    return max(min(left), 0)


def auto_bytes(device: torch.device) -> int:
    """What "auto" takes of the memory of a device."""
    if device.type == "cpu":
        return int(available_bytes() * AUTO_SHARE * share_of_process())
    import torch

    return int(torch.cuda.mem_get_info(device)[0] * AUTO_SHARE)  # each rank has a GPU of its own


def share_of_process() -> float:
    """The share of the machine that is for this process: that of one of its ranks."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return 1 / max(int(ranks), 1) if ranks.isdecimal() else 1.0


def _left_by_system(proc: pathlib.Path) -> int:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0


def _left_by_cgroups(root: pathlib.Path, relative: str, limit: str, usage: str) -> list[int]:
    """What a group and those above it have left, each that has a limit."""
    group = root / relative
    left = []
    while True:
        most = _number(group / limit)
        used = _number(group / usage)
        if most is not None and used is not None and most < _V1_NO_LIMIT:
            left.append(most - used + _reclaimable(group / "memory.stat"))
        if group == root or root not in group.parents:
            return left
        group = group.parent


def _reclaimable(stat: pathlib.Path) -> int:
    """Bytes of files that the kernel drops when memory gets short."""
    for line in _lines(stat):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: pathlib.Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # "max": none


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
