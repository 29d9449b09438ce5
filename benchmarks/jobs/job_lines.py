"""Jobs for a process that compare.py keeps: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(make: Callable[[], Any]) -> None:
    """Runs the jobs that standard input names on what `make` returns, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed's builder and its functions print
    try:
        jobs = make()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        raise
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = getattr(jobs, job.pop("kind"))(**job)
        except Exception as error:  # said to the one who asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
