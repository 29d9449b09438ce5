"""The program `tensorferry snapshot`: reads arguments and prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import Unusable, drop, export, verify
from .folder import Snapshot, look

_FAILED, _USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out one of the commands and returns the exit status; errors are a line on stderr."""
    arguments = _parser().parse_args(argv)
    command = f"tensorferry snapshot {arguments.command}"
    try:
        answer, text = _run(arguments)
        print(json.dumps(answer, indent=2) if arguments.json else text, flush=True)
        return 0
    except Unusable as problem:
        print(f"{command}: {problem}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
    except ModuleNotFoundError as error:
        hint = f"{error.name} is missing: install it with `{sys.executable} -m pip install torch`"
        print(f"{command}: {hint}", file=sys.stderr)
    except OSError as error:
        print(f"{command}: {error}", file=sys.stderr)
    return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorferry snapshot")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("list", ["path"]),
        ("verify", ["path"]),
        ("export", ["path", "target"]),
        ("drop", ["path", "name"]),
    ):
        command = commands.add_parser(name)
        command.add_argument("--json", action="store_true")
        if "name" not in words and name != "list":
            command.add_argument("--name")
        if name == "export":
            command.add_argument("--rank", type=int, default=0)
            command.add_argument("--format", choices=("torch", "safetensors", "dcp"))
        for word in words:
            command.add_argument(word)
    return parser


def _run(arguments: argparse.Namespace) -> tuple[Any, str]:
    """(the answer for --json, the same as text)"""
    path = arguments.path
    if arguments.command == "list":
        if not Path(path).is_dir():
            raise Unusable(f"{path} is not a folder of snapshots")
        found, problems = look(Path(path).absolute())
        damaged = [str(problem) for problem in problems.values()]
        answer = {"snapshots": [asdict(one) for one in found], "damaged": damaged}
        return answer, "\n".join([_table(found), *damaged])
    if arguments.command == "verify":
        counts = verify(path, arguments.name)
        text = f"sound: {counts['tensors']} tensors on the drives, {counts['bytes']} bytes"
        if counts["without_checksum"]:
            text += f"; {counts['without_checksum']} of them have no checksum and were only read"
        return counts, text
    if arguments.command == "export":
        counts = export(
            path,
            arguments.target,
            arguments.name,
            rank=arguments.rank,
            format=arguments.format,
        )
        text = f"wrote {counts['tensors']} tensors, {counts['bytes']} bytes, to {arguments.target}"
        return counts, text
    drop(path, arguments.name)
    return {"dropped": arguments.name}, f"dropped {arguments.name}"


def _table(found: list[Snapshot]) -> str:
    if not found:
        return "no snapshots"
    rows = [("name", "created", "ranks", "bytes on the drives", "bytes beside")]
    rows += [
        (one.name, one.created, str(one.ranks), str(one.stored_bytes), str(one.memory_bytes))
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )
