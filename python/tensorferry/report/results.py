"""Reads results files and checks that they have the shape that the page needs."""

import json
import os
from pathlib import Path
from typing import Any

from . import trace
from .page import Json, number

FORMAT = "tensorferry-results"
VERSION = 1


class NonEmpty(list[Any]):
    """The shape of a list that has a member at least."""

    def __init__(self, member: Any) -> None:
        super().__init__([member])


# The shapes that the page needs. A shape is a type; REAL, a finite number; MEASURE, a number or
# null; a set of words; a list with the shape of its members; a tuple with the shape of each member;
# or a dictionary, whose names that end in ? may be missing.
REAL, MEASURE = object(), object()
SUMMARY = {
    "mean": MEASURE,
    "median": MEASURE,
    "ci95?": (MEASURE, MEASURE),
    "p50": MEASURE,
    "p90": MEASURE,
    "p99": MEASURE,
}
SETTING = {"engine": str, "block_bytes": REAL, "queue_depth": REAL, "workers": REAL}
ALL: Json = {
    "complete": bool,
    "machine": dict,
    "places": [dict],
    "settings": dict,
    "arguments?": list,
}
SHAPES = {
    "bench": ALL
    | {
        "series": [
            {
                "direction": {"read", "write"},
                "bytes": REAL,
                "seconds": [MEASURE],
                "started_seconds?": [MEASURE],
                "latency_seconds": SUMMARY,
                "bandwidth_mb_per_second": SUMMARY,
            }
        ]
    },
    "sweep": ALL
    | {
        "points": [
            {
                "direction": {"read", "write"},
                "block_bytes": REAL,
                "queue_depth": REAL,
                "workers": REAL,
                "overlap": {"overlap", "sequential"},
                "status": {"ok", "failed"},
                "seconds?": [MEASURE],
                "gb_per_second?": MEASURE,
            }
        ]
    },
    "tune": ALL | {"rounds": [{"candidates": [SETTING]}], "best?": SETTING, "default?": SETTING},
    "plan": ALL
    | {
        "settings": {"task": {"parameters": REAL, "dtype": str}},
        "choices": NonEmpty(
            {
                "name": str,
                "limit": str,
                "step_seconds": REAL,
                "pass_seconds": REAL,
                "gpu_bytes": REAL,
                "memory_bytes": REAL,
                "drive_bytes": REAL,
                "sub_groups": REAL,
                "tokens_per_second": REAL,
                "drive_days?": MEASURE,
                "places": [
                    {"what": str, "gpu_bytes": REAL, "memory_bytes": REAL, "drive_bytes": REAL}
                ],
                "step": [{"read": (REAL, REAL), "compute": (REAL, REAL), "write": (REAL, REAL)}],
            }
        ),
        "by_drives": [{"drives": REAL, "seconds?": MEASURE, "drive_days?": MEASURE}],
    },
}


class Unusable(Exception):
    """No page can be made from a file. The text names the file, the reason, and what to do."""

    __module__ = "tensorferry.report"  # where users find it


def load(path: str | os.PathLike[str]) -> Json:
    """Returns the results in a file. Raises Unusable."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    try:
        results = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(
            f"{path}: not JSON; give a file that `tensorferry bench`, `sweep`, `tune` or "
            "`plan` wrote with --json"
        ) from error
    if isinstance(results, list):
        found = trace.results_of(path, results)
        if isinstance(found, str):
            raise Unusable(f"{path}: {found}; give a trace of training, or results")
        return found
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise Unusable(
            f"{path}: not results of tensorferry; give a file that `tensorferry bench`, "
            "`sweep`, `tune` or `plan` wrote with --json"
        )
    version = results.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise Unusable(
            f"{path}: results of version {version!r}, but this program reads version {VERSION}; "
            "update tensorferry"
        )
    command = results.get("command")
    if not isinstance(command, str) or command not in SHAPES:
        raise Unusable(f"{path}: results of an unknown command, {command!r}; update tensorferry")
    problem = _misfit(results, SHAPES[command], "")
    if problem:
        raise Unusable(f"{path}: {problem}; measure again, or see docs/results.md")
    return results


def _misfit(value: Any, shape: Any, where: str) -> str | None:
    """Says why a value does not have a shape. Returns None if it does."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is not an object"
        for name, member in shape.items():
            plain = name.rstrip("?")
            at = f"{where}.{plain}".lstrip(".")
            if plain not in value or (name != plain and value[plain] is None):
                if name == plain:
                    return f"{at} is missing"
                continue
            problem = _misfit(value[plain], member, at)
            if problem:
                return problem
        return None
    if isinstance(shape, (list, tuple)):
        if not isinstance(value, list):
            return f"{where} is not a list"
        if isinstance(shape, tuple) and len(value) != len(shape):
            return f"{where} must have {len(shape)} members"
        if isinstance(shape, NonEmpty) and not value:
            return f"{where} is empty"
        checks = (_misfit(member, shape[0], f"{where}[{at}]") for at, member in enumerate(value))
        return next((problem for problem in checks if problem), None)
    if isinstance(shape, set):
        fits, kind = isinstance(value, str) and value in shape, " or ".join(sorted(shape))
    elif shape is REAL:
        fits, kind = number(value) is not None, "a number"
    elif shape is MEASURE:
        fits = value is None or isinstance(value, (int, float)) and not isinstance(value, bool)
        kind = "a number"
    else:
        names = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}
        fits, kind = isinstance(value, shape), names[shape]
    return None if fits else f"{where} is not {kind}"
