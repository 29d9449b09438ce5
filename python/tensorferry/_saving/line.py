"""The saves of a process that nobody waits for: one after the other, written by one thread.

The thread that saves cuts the new file into windows and copies what may change; the thread of the
line computes checksums, writes, syncs and renames. At the end of Python the line finishes its
saves, as a handle finishes its writes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from typing import Literal

from .._core import NewFile, PriorityScope
from .._notes import add_note
from .._progress import Progress
from .._shared_handle import shared_handle
from .._tracing import span
from .job import Job, NewContents
from .saving import Saving
from .stage import Copies, Stage, StagedWindow
from .windows import WINDOW_BYTES, WINDOWS, UnderWay, cut

_log = logging.getLogger("tensorferry")

WhenBusy = Literal["queue", "refuse"]

STAGE_BYTES = 1 << 30
# So many saves may wait for their turn. Who comes then waits for the first of them.
_WAITING_MAX = 8
# As the close_limit_seconds of a handle.
_EXIT_LIMIT_SECONDS = 30.0
_LOOK_SECONDS = 0.05


class _Line:
    def __init__(self) -> None:
        self._stage = Stage()
        # For what nobody can change: it is read when it is written. The thread that writes must not
        # wait for windows of the stage, which may all be behind it in the line.
        self._own_stage = Stage()
        self._staging = threading.Lock()  # one save at a time fills the stage, for the same reason
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()  # the first one is being written
        self._unseen: list[Saving] = []  # those that failed
        self._thread: threading.Thread | None = None
        self._finalized = False  # whether multiprocessing calls finish()

    def save(self, job: Job, stage_bytes: int, when_busy: WhenBusy) -> Saving:
        """Puts a save into the line, and returns when the caller may change its tensors."""
        if when_busy == "refuse":
            self._refuse_if_busy(job)
        with self._staging:
            self._enter(job, when_busy)
            copies = Copies()
            try:
                self._fill(job, stage_bytes // WINDOW_BYTES, copies)
            except BaseException:
                job.saving.cancel()
                job.end()
                copies.finish()
                if not self._withdraw(job):
                    self._wait_for_end(job.saving)
                raise
            finally:
                copies.finish()
                job.contents.staged()
            job.end()
        return job.saving

    def tell(self, what_now: str) -> None:
        """Raises what a save has failed with, if nobody knows."""
        with self._changed:
            unseen = [saving for saving in self._unseen if saving.failed_unseen]
            self._unseen = unseen[1:]
        error = unseen[0].tell() if unseen else None
        if error is not None:
            add_note(
                error, f"The save to {unseen[0].path} in the background raised this. {what_now}"
            )
            raise error

    def first(self) -> Saving | None:
        """The save that is being written."""
        with self._changed:
            return self._jobs[0].saving if self._jobs else None

    def free_stage(self) -> None:
        self._stage.free()
        self._own_stage.free()

    def stage_stats(self) -> dict[str, int]:
        return self._stage.stats()

    def finish(self) -> None:
        """At the end of Python: waits as long as something moves."""
        last, since = None, time.monotonic()
        try:
            while (saving := self.first()) is not None:
                now = (saving, saving.progress)
                if now != last:
                    last, since = now, time.monotonic()
                if time.monotonic() - since > _EXIT_LIMIT_SECONDS:
                    _log.error(
                        "gave up the save to %s: no byte has moved for %d s",
                        saving.path,
                        _EXIT_LIMIT_SECONDS,
                    )
                    break
                with contextlib.suppress(TimeoutError):
                    saving.wait_for_end(_LOOK_SECONDS)
        finally:  # Ctrl-C too
            self._give_up()
        self.tell("The program ends without it.")

    def _give_up(self) -> None:
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            job.saving.cancel()
        for job in jobs[:1]:
            with contextlib.suppress(TimeoutError):
                job.saving.wait_for_end(1.0)

    def _refuse_if_busy(self, job: Job) -> None:
        saving = self.first()
        if saving is not None:
            raise OSError(
                errno.EBUSY,
                f"a save to {saving.path} goes on: wait for it, or save with when_busy='queue'",
                job.saving.path,
            )

    def _enter(self, job: Job, when_busy: WhenBusy) -> None:
        if when_busy == "refuse":
            self._refuse_if_busy(job)
        while len(self._jobs) > _WAITING_MAX:
            if (first := self.first()) is not None:
                self._wait_for_end(first)
        self._finish_with_multiprocessing()
        with self._changed:
            self._jobs.append(job)
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="tensorferry-saving", daemon=True)
            try:
                thread.start()
            except BaseException:
                self._jobs.pop()
                raise
            self._thread = thread

    def _finish_with_multiprocessing(self) -> None:
        """A process that multiprocessing has forked ends without atexit."""
        process = sys.modules.get("multiprocessing.process")
        if self._finalized or process is None or process.parent_process() is None:
            return
        from multiprocessing.util import Finalize

        Finalize(None, self.finish, exitpriority=100)
        self._finalized = True

    def _withdraw(self, job: Job) -> bool:
        """Takes a cancelled save out of the line, if its turn has not come."""
        with self._changed:
            if job not in self._jobs or job is self._jobs[0]:
                return False
            self._jobs.remove(job)
        for window in job.close():
            self._release(window)
        job.saving.end(OSError(errno.ECANCELED, "the call that began it has failed"))
        return True

    def _fill(self, job: Job, most: int, copies: Copies) -> None:
        """Cuts the file into windows, and copies what may change."""
        self._stage.begin(most)
        left, told = job.contents.nbytes, False
        for pieces in cut(job.contents.parts()):
            window = StagedWindow(pieces, job.contents.stays)
            wanted = -(-left // WINDOW_BYTES)
            left -= window.end - window.begin
            if window.needs_memory:
                if not self._stage.try_give(window, most, wanted):
                    if not told:
                        told = True
                        _log.info(
                            "the save to %s waits until the drive has written what does not fit "
                            "into %d MiB of memory (stage_bytes): %d of %d MiB are left",
                            *(job.saving.path, most * WINDOW_BYTES >> 20),
                            *(left >> 20, job.contents.nbytes >> 20),
                        )
                    while not self._stage.wait_and_give(window, most, _LOOK_SECONDS):
                        self._look_after(job)
                try:
                    window.fill(copies)
                except BaseException:
                    copies.finish()
                    self._stage.take_back(window)
                    raise
            if not job.add(window):
                copies.finish()
                self._stage.take_back(window)
                job.saving.wait()  # raises what it has failed with
                return

    def _look_after(self, job: Job) -> None:
        """This thread waits for room: gives the writes before it the priority of the thread."""
        first = self.first()
        if first is not None:
            first.raise_for_waiter()
        if job.saving.done():
            job.saving.wait()

    def _wait_for_end(self, saving: Saving) -> None:
        with contextlib.suppress(TimeoutError):
            saving.wait_for_end(_EXIT_LIMIT_SECONDS)

    # The thread that writes.

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            error: BaseException | None = None
            try:
                with PriorityScope("background"), span("save in the background"), job.new:
                    self._write(job)
            except BaseException as raised:  # SystemExit too: the thread serves all saves
                error = raised
            self._end(job, error)
            del job, error

    def _end(self, job: Job, error: BaseException | None) -> None:
        with self._changed:
            self._jobs.popleft()
            job.saving.end(error)
            if job.saving.failed_unseen:
                self._unseen = [*self._unseen, job.saving][-_WAITING_MAX:]
        if job.saving.failed_unseen:
            # A handler of the log may raise.
            with contextlib.suppress(Exception):
                _log.error("the save to %s in the background has failed: %s", job.new.path, error)

    def _write(self, job: Job) -> None:
        contents, saving, file = job.contents, job.saving, job.new.file
        handle = shared_handle()
        held: deque[StagedWindow] = deque()  # the oldest first

        def finish_oldest() -> None:
            window = under_way.finish_oldest()
            held.popleft()
            self._release(window)
            saving.wrote(window.end)
            if window.end < contents.nbytes:
                job.report.update(window.end)

        try:
            with UnderWay[StagedWindow]() as under_way:
                saving.begin(under_way)
                job.new.reserve(contents.nbytes)
                while True:
                    window = None
                    if len(under_way) < WINDOWS:
                        window = job.next(wait=not under_way)
                    if window is not None:
                        held.append(window)
                        saving.check()
                        if window.memory is None:
                            self._own_stage.try_give(window, WINDOWS + 1, 1)
                        memory = window.complete(contents.passed)
                        under_way.add(handle.write(memory, file, window.begin), window)
                    elif under_way:
                        finish_oldest()  # a thread that stages may need its memory
                    else:
                        break
            contents.end(file)
            job.report.update(contents.nbytes)
            saving.commit(job.new)
        finally:
            for window in [*held, *job.close()]:
                self._release(window)

    def _release(self, window: StagedWindow) -> None:
        window.wait_for_copies()
        (self._stage if window.needs_memory else self._own_stage).take_back(window)


# Of this process. What a forked child has of its parent's line is left alone.
_line = _Line()
_of_parents: list[_Line] = []


def _forget() -> None:
    global _line
    _of_parents.append(_line)
    _line = _Line()


os.register_at_fork(after_in_child=_forget)
# It runs before the handles close: their functions were registered earlier.
atexit.register(lambda: _line.finish())


def save_in_background(
    contents: NewContents,
    progress: Progress,
    stage_bytes: int | None,
    when_busy: WhenBusy,
) -> Saving:
    """Stages the contents of a file and returns the save, which goes on. Call begin_save() before
    you make the contents."""
    new = NewFile(contents.path)
    try:
        job = Job(contents, new, progress)
        return _line.save(job, _checked(stage_bytes), when_busy)
    except BaseException:
        new.discard()
        raise


def begin_save(stage_bytes: int | None, when_busy: WhenBusy) -> None:
    """Checks the options of a save, and raises what an earlier one has failed with."""
    _checked(stage_bytes)
    if when_busy not in ("queue", "refuse"):
        raise ValueError(f"when_busy is {when_busy!r}; it must be 'queue' or 'refuse'")
    _line.tell("This call has saved nothing: call it again.")


def free_stage() -> None:
    """Frees the memory that saves in the background have left for the next one."""
    _line.free_stage()


def stage_stats() -> dict[str, int]:
    """How many bytes are locked for saves in the background, and how many of them are in use."""
    return _line.stage_stats()


def _checked(stage_bytes: int | None) -> int:
    if stage_bytes is None:
        return STAGE_BYTES
    if stage_bytes < WINDOW_BYTES:
        raise ValueError(f"stage_bytes is {stage_bytes}; it must be at least {WINDOW_BYTES}")
    return stage_bytes
