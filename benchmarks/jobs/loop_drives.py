"""Drives of a run's own: ext4 on loop devices over memory, some of them throttled. Needs root.

Only this thread and the processes that it starts see the mounts, and the kernel frees a loop device
with its mount, so a killed run leaves none. The throttles are those of cgroup v1 (blkio). They hold
for the processes that are started within `throttled()`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.jobs.job import JobFailed, NotHere
from benchmarks.jobs.machine import text_of

CLONE_NEWNS = 0x00020000
PROGRAMS = ("mkfs.ext4", "mount", "umount")
BUSY_SECONDS_MAX = 5


def command(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise JobFailed(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def enter_own_mounts() -> None:
    """A new mount namespace for this thread: its mounts end with its processes."""
    if os.geteuid() != 0:
        raise NotHere("loop devices need root")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise NotHere(f"loop devices need {', '.join(missing)}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NotHere(f"this process cannot enter a new mount namespace: {why}")
    command("mount", "--make-rprivate", "/")


def blkio_folder() -> Path:
    """The folder of this process in the blkio controller of cgroup v1."""
    for mounted in text_of("/proc/self/mounts").splitlines():
        _, point, kind, options = mounted.split()[:4]
        if kind == "cgroup" and "blkio" in options.split(","):
            break
    else:
        raise NotHere("throttled drives need the blkio controller of cgroup v1")
    for line in text_of("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return Path(point + path.rstrip("/"))
    raise NotHere("this process is in no blkio cgroup")


class Throttles:
    """A cgroup of its own, whose processes are slow on some devices."""

    def __init__(self) -> None:
        self.parent = blkio_folder()
        self.folder = self.parent / f"tensorferry-{os.getpid()}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise NotHere(f"{self.folder} cannot be made: {error.strerror}") from error

    def limit(self, device: str, bytes_per_second: int) -> None:
        """`device` as major:minor; both directions."""
        for direction in ("read", "write"):
            file = self.folder / f"blkio.throttle.{direction}_bps_device"
            try:
                file.write_text(f"{device} {bytes_per_second}")
            except OSError as error:
                raise NotHere(f"{file}: {error.strerror}") from error

    def enter(self) -> None:
        (self.folder / "tasks").write_text("0")  # this thread

    def leave(self) -> None:
        (self.parent / "tasks").write_text("0")

    def remove(self) -> None:
        with suppress(OSError):  # a process that has not ended: the cgroup stays and does nothing
            self.folder.rmdir()


class LoopDrives:
    """Makes drives below a folder. remove() removes all of them; the folder stays."""

    def __init__(self, folder: Path) -> None:
        self.points: list[Path] = []
        self.throttles: Throttles | None = None
        enter_own_mounts()
        self.memory = folder / "memory"
        self.memory.mkdir(parents=True)
        self.mount("-t", "tmpfs", "tmpfs", self.memory)

    def mount(self, *words: object) -> None:
        try:
            command("mount", *words)
        except JobFailed as error:
            raise NotHere(str(error)) from error
        self.points.append(Path(str(words[-1])))

    def add(self, name: str, size: int, bytes_per_second: int = 0) -> Path:
        """A drive that holds `size` bytes, throttled unless its speed is 0. Returns where it is
        mounted."""
        image = self.memory / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(size + size // 8 + (32 << 20))  # of the file system itself
        command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        point = self.memory.parent / name
        point.mkdir()
        self.mount("-o", "loop", image, point)
        if bytes_per_second:
            self.throttles = self.throttles or Throttles()
            device = os.stat(point).st_dev
            self.throttles.limit(f"{os.major(device)}:{os.minor(device)}", bytes_per_second)
        return point

    @contextmanager
    def throttled(self) -> Iterator[None]:
        """Processes that this thread starts meanwhile are throttled."""
        if self.throttles is None:
            yield
            return
        self.throttles.enter()
        try:
            yield
        finally:
            self.throttles.leave()

    def remove(self) -> None:
        """Removes the drives that exist; may be called after a failure and again."""
        while self.points:
            unmount(self.points[-1])
            self.points.pop().rmdir()
        if self.throttles:
            self.throttles.remove()
            self.throttles = None


def unmount(point: Path) -> None:
    """A process that has just ended may hold the mount for a moment."""
    end = time.monotonic() + BUSY_SECONDS_MAX
    while True:
        try:
            return command("umount", point)
        except JobFailed:
            if time.monotonic() > end:
                return command("umount", "--lazy", point)
            time.sleep(0.05)
