"""Facts about the machine, to print beside a figure, and how busy other processes keep it."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path


def text_of(path: Path | str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def field(path: str, name: str) -> str:
    """The value of `name: value` in a file of /proc."""
    for line in text_of(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def may_lock(nbytes: int) -> bool:
    """Whether a process may lock this much memory, as fio does for its fixed buffers."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    huge_pages = 4 << 20  # at both ends of the buffers
    return os.geteuid() == 0 or limit == resource.RLIM_INFINITY or nbytes + huge_pages <= limit


def available_memory_bytes() -> int:
    """Memory that a process can get without swapping, the page cache included."""
    return int(field("/proc/meminfo", "MemAvailable").split()[0]) * 1024


def mount_of(folder: Path) -> tuple[str, str]:
    """Type and options of the file system that holds a folder."""
    best, found = "", ("unknown", "")
    for line in text_of("/proc/self/mounts").splitlines():
        _, point, kind, options = line.split()[:4]
        inside = folder == Path(point) or Path(point) in folder.parents
        if inside and len(point) >= len(best):
            best, found = point, (kind, options)
    return found


def queue_of(folder: Path) -> Path | None:
    """The sysfs folder with the limits of the block device under a folder."""
    device = os.stat(folder).st_dev
    entry = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return next(
        (place / "queue" for place in (entry, entry.parent) if (place / "queue").is_dir()), None
    )


def facts(folder: Path) -> dict[str, str]:
    """Facts that a reader needs to judge a figure measured in `folder`."""
    kind, options = mount_of(folder.resolve())
    found = {
        "processor": field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "file system": f"{kind} ({options})",
        "huge pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
    }
    queue = queue_of(folder)
    if queue:
        limits = ("scheduler", "max_sectors_kb", "max_segments", "nr_requests", "rotational")
        found["device"] = queue.parent.name
        found["device limits"] = ", ".join(f"{name} {text_of(queue / name)}" for name in limits)
    return found


class Bystanders:
    """How many cores other processes and kernel threads use during a measurement."""

    def __init__(self) -> None:
        self.ticks_per_second = os.sysconf("SC_CLK_TCK")
        self.begin()

    def begin(self) -> None:
        self.begin_seconds = time.monotonic()
        self.begin_busy = self._busy_seconds() - self._own_seconds()

    def cores(self) -> float:
        elapsed = time.monotonic() - self.begin_seconds
        busy = self._busy_seconds() - self._own_seconds() - self.begin_busy
        return max(busy, 0.0) / max(elapsed, 0.01)

    def _busy_seconds(self) -> float:
        user, nice, system, _, _, irq, softirq = (
            int(word) for word in text_of("/proc/stat").split()[1:8]
        )
        return (user + nice + system + irq + softirq) / self.ticks_per_second

    def _own_seconds(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        ended = sum(one.ru_utime + one.ru_stime for one in used)
        alive = 0
        for child in text_of(f"/proc/self/task/{os.getpid()}/children").split():
            words = text_of(f"/proc/{child}/stat").rpartition(")")[2].split()
            alive += int(words[11]) + int(words[12]) if len(words) > 12 else 0
        return ended + alive / self.ticks_per_second
