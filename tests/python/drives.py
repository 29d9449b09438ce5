"""Drives of a test's own: full ones, and ones that fail."""

import contextlib
import fcntl
import os
import struct
import subprocess
from contextlib import contextmanager

import pytest
from loop_mount import loop_mount, mount_anew, unmount

__all__ = [
    "FailingDrive",
    "failing_drive",
    "fill_up",
    "loop_mount",
    "memory_mount",
    "overbooked_drive",
    "power_cut_drive",
]


@contextmanager
def memory_mount(place, size):
    """A tmpfs of `size` bytes."""
    point = place / "tmpfs"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", point]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        yield point
    finally:
        unmount(point)


def _shut_down(point, way):
    descriptor = os.open(point, os.O_RDONLY)
    fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", way))  # EXT4_IOC_SHUTDOWN, in no header
    os.close(descriptor)


class FailingDrive:
    """An ext4 on a loop device that can lose its bytes, or end."""

    def __init__(self, point, image):
        self.point = point
        self._image = image
        self._bytes = os.path.getsize(image)

    def lose(self):
        """What was written behind the first 8 MiB cannot be read any more (EIO); what is written
        from now on can."""
        os.sync()  # what the file system itself has to write is written before
        os.truncate(self._image, 8 << 20)

    def end(self):
        """From now on everything gives EIO."""
        _shut_down(self.point, 2)

    def recover(self):
        os.truncate(self._image, max(self._bytes, os.path.getsize(self._image)))


@contextmanager
def failing_drive(place, size="256M"):
    with loop_mount(place, size=size) as point:
        drive = FailingDrive(point, place / "ext4.img")
        try:
            yield drive
        finally:
            drive.recover()


class PowerCutDrive:
    """An ext4 on a loop device whose power a test can cut."""

    def __init__(self, point, image):
        self.point = point
        self._image = image

    def cut(self, journal):
        """What the file system has not put into its journal is lost, and with "lost" also what
        has not left memory of the journal. Until again() everything gives EIO."""
        _shut_down(self.point, {"flushed": 1, "lost": 2}[journal])

    def again(self):
        """Mounts the file system anew, which replays its journal."""
        mount_anew(self._image, self.point)


@contextmanager
def power_cut_drive(place, size="64M"):
    with loop_mount(place, size=size) as point:
        yield PowerCutDrive(point, place / "ext4.img")


def fill_up(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 << 10))


@contextmanager
def overbooked_drive(place):
    """An ext4 with more room than there is behind it, and a function that takes what there is: from
    then on writes to new places fail, and what was written before can be read."""
    with memory_mount(place, "96M") as memory, loop_mount(memory, size="256M") as point:
        try:
            yield point, lambda: fill_up(memory / "filler")
        finally:
            (memory / "filler").unlink(missing_ok=True)
