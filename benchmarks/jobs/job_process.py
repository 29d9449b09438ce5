"""A process in the environment of a peer to which compare.py gives jobs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs.job import ROOT, JobFailed, Sample
from benchmarks.jobs.peers import Peers

ANSWER_SECONDS_MAX = 900  # DeepSpeed builds its op before its first answer


class JobProcess:
    """A program of this folder that serves jobs (see job_lines.py). The first job sets up the
    environment, if it is missing, and starts the program."""

    def __init__(self, program: str, side: str, peers: Peers, peer: str, *arguments: str) -> None:
        self.side = side
        self.python = partial(peers.python, peer)
        self.command = [str(Path(__file__).parent / program), side, *arguments]
        self.process: subprocess.Popen[str] | None = None
        self.complaints = tempfile.TemporaryFile("w+")

    def run(self, kind: str, **options: Any) -> Sample:
        return Sample(engine=self.side, **self.answer(kind, **options))

    def answer(self, kind: str, **options: Any) -> dict[str, Any]:
        if self.process is None:
            self.start()
        return self.ask(json.dumps({"kind": kind, **options}, default=str))

    def start(self) -> None:
        python = self.python()
        env = os.environ | {
            "PYTHONPATH": str(ROOT / "build" / "release" / "python"),
            # DeepSpeed builds it once, in five minutes.
            "TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "deepspeed_op"),
        }
        env.pop("TENSORFERRY_DEEPSPEED", None)
        # Tools such as ninja lie beside the Python.
        env["PATH"] = f"{python.parent}:{env.get('PATH', '')}"
        self.process = subprocess.Popen(
            [str(python), *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
            env=env,
        )
        self.ask(None)

    def ask(self, job: str | None) -> dict[str, Any]:
        assert self.process and self.process.stdin and self.process.stdout
        try:
            if job is not None:
                self.process.stdin.write(job + "\n")
                self.process.stdin.flush()
            # An answer is one line, so select() never misses a part of it in Python's buffer.
            answered = select.select([self.process.stdout], [], [], ANSWER_SECONDS_MAX)[0]
            line = self.process.stdout.readline() if answered else ""
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.kill()
            code = self.process.wait()
            self.process = None
            raise JobFailed(
                f"{self.side}: ended with {code}{self.last_complaint()}; "
                f"to run it by hand: {' '.join(self.command)}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JobFailed(f"{self.side}: {answer['error']}")
        return answer

    def last_complaint(self) -> str:
        self.complaints.seek(0)
        lines = [line.strip() for line in self.complaints if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def end(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
