"""File systems of a test's own, on loop devices."""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

UNMOUNT_ATTEMPTS = 600
UNMOUNT_PAUSE_SECONDS = 0.05


def unmount(point):
    """Unmounts a file system. The kernel lets go of the files of a ring that has ended a moment
    later: until then the mount is busy."""
    for _ in range(UNMOUNT_ATTEMPTS):
        done = subprocess.run(["umount", point], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if "busy" not in done.stderr:
            break
        time.sleep(UNMOUNT_PAUSE_SECONDS)
    raise AssertionError(f"umount {point}: {done.stderr}")


def mount_anew(image, point):
    """Mounts an image once more, after its file system was shut down. While a process in a mount
    namespace of its own still has the old mount, the kernel would give us that one back."""
    unmount(point)
    for _ in range(UNMOUNT_ATTEMPTS):
        subprocess.run(["mount", "-o", "loop", image, point], check=True)
        try:
            os.close(os.open(point, os.O_TMPFILE | os.O_RDWR))
            return
        except OSError:
            unmount(point)
            time.sleep(UNMOUNT_PAUSE_SECONDS)
    raise AssertionError(f"{image}: another process keeps the file system that was shut down")


@contextmanager
def loop_mount(place, kind="ext4", size="4G", options="loop"):
    """Makes and mounts one below `place`; skips the test where that cannot be done."""
    if os.geteuid() != 0 or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs root and mkfs.{kind}")
    image, point = place / f"{kind}.img", place / kind
    subprocess.run(["truncate", "-s", size, image], check=True)
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
    point.mkdir()
    if subprocess.run(["mount", "-o", options, image, point], check=False).returncode != 0:
        pytest.skip(f"{kind} cannot be mounted here")
    try:
        yield point
    finally:
        unmount(point)
