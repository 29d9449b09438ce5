"""The program `tensorferry checkpoint`: reads arguments and prints."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .tensors import Unusable
from .text import shown

_FAILED, _USAGE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out one of the commands and returns the exit status; errors are a line on stderr."""
    arguments = _parser().parse_args(argv)
    command = f"tensorferry checkpoint {arguments.command}"
    try:
        status, answer = _run(arguments)
        return (
            status if _say(json.dumps(answer, indent=2) if arguments.json else answer) else _FAILED
        )
    except Unusable as problem:
        print(f"{command}: {shown(str(problem))}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
    except MemoryError:
        print(f"{command}: not enough memory", file=sys.stderr)
    except ModuleNotFoundError as error:
        hint = f"{error.name} is missing: install it with `{sys.executable} -m pip install torch`"
        print(f"{command}: {hint}", file=sys.stderr)
    except OSError as error:
        print(f"{command}: {_error_text(error)}", file=sys.stderr)
    return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorferry checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, paths in (
        ("inspect", {"paths": "+"}),
        ("verify", {"paths": "+"}),
        ("convert", {"source": None, "target": None}),
        ("compare", {"before": None, "after": None}),
    ):
        command = commands.add_parser(name)
        command.add_argument("--json", action="store_true")
        for path, count in paths.items():
            command.add_argument(path, nargs=count)
        if name == "convert":
            command.add_argument("--to", choices=("safetensors", "torch", "dcp"))
            command.add_argument("--without-objects", action="store_true")
    return parser


def _run(arguments: argparse.Namespace) -> tuple[int, Any]:
    # Each command is imported when it is wanted: what a person waits for first is the start.
    if arguments.command == "inspect":
        from .inspecting import inspect

        return inspect(arguments.paths, arguments.json)
    if arguments.command == "verify":
        from .verifying import verify

        return verify(arguments.paths, arguments.json)
    if arguments.command == "compare":
        from .comparing import compare

        return compare(arguments.before, arguments.after, arguments.json)
    from .converting import convert

    return convert(
        arguments.source,
        arguments.target,
        arguments.to,
        without_objects=arguments.without_objects,
        as_json=arguments.json,
    )


def _say(text: str) -> bool:
    """Prints the answer, in UTF-8 as all commands do. Returns whether all of it was written."""
    try:
        sys.stdout.buffer.write((text + "\n").encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
        print("tensorferry: could not write all of the output", file=sys.stderr)
        return False


def _error_text(error: OSError) -> str:
    path = error.filename or getattr(error, "path", None)
    path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None
    hint = getattr(error, "hint", None) or error.strerror or str(error)
    offset = getattr(error, "offset", None)
    where = f"offset {offset}: " if offset is not None and error.errno == errno.EBADMSG else ""
    return shown(f"{path}: {where}{hint}" if path else hint)
