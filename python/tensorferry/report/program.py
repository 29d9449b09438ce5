"""The program `tensorferry report`: reads arguments and writes a file."""

import argparse
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from .document import make_page
from .page import plural
from .results import Unusable, load


def _write(path: str, text: str) -> None:
    """Replaces the file at once: its readers see the old page or the new one."""
    # A file name that is not UTF-8 must not prevent the page.
    data = text.encode("utf-8", "replace")
    path = os.path.realpath(path)
    before = os.stat(path) if os.path.exists(path) else None
    if before and not stat.S_ISREG(before.st_mode):  # a pipe or a terminal cannot be replaced
        Path(path).write_bytes(data)
        return
    # Under a name that nobody can foresee, and never over an existing file.
    fresh = f"{path}.new-{secrets.token_hex(8)}"
    with open(fresh, "xb") as file:
        try:
            file.write(data)
            file.flush()
            if before:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            os.replace(fresh, path)
        except OSError:
            os.unlink(fresh)
            raise


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the page; returns the exit status: 0, or 1 with a line on stderr."""
    parser = argparse.ArgumentParser(
        prog="tensorferry report",
        description="`tensorferry report`: results files and traces in, one HTML page out.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        help="files that bench, sweep, tune or plan wrote (--json), or traces of training",
    )
    parser.add_argument("-o", "--output", default="report.html", help="the page to write")
    arguments = parser.parse_args(argv)
    try:
        runs = [(path, load(path)) for path in arguments.results]
        if any(
            os.path.exists(arguments.output) and os.path.samefile(path, arguments.output)
            for path in arguments.results
        ):
            raise Unusable(f"{arguments.output}: holds results; name another file with -o")
        _write(arguments.output, make_page(runs))
    except Unusable as error:
        print(f"tensorferry report: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"tensorferry report: {arguments.output}: {error.strerror}; name another place with -o",
            file=sys.stderr,
        )
        return 1
    print(f"Report: {arguments.output} ({plural(len(runs), 'run')})")
    return 0
