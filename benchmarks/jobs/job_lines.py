"""Serves the jobs of compare.py in a process: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(make: Callable[[], Any]) -> None:
    """Calls the methods of `make()` that standard input names, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints to standard output
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
        except Exception as error:  # goes to the caller
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
