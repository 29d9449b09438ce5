"""What `tensorferry report` does: arguments in, a file out."""

import argparse
import os
import secrets
import stat
import sys
from pathlib import Path

from .document import make_page
from .page import plural
from .results import Unusable, load


def _write(path, text):
    """Readers of the file see the old page or the new one."""
    # A name that is no UTF-8 does not spoil the page.
    data = text.encode("utf-8", "replace")
    path = os.path.realpath(path)
    before = os.stat(path) if os.path.exists(path) else None
    if before and not stat.S_ISREG(before.st_mode):  # a pipe or a terminal cannot be replaced
        Path(path).write_bytes(data)
        return
    # Under a name that nobody can foresee, and in no file that is there.
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


def main(argv=None):
    """Makes the page; returns the exit status: 0, or 1 with a line on stderr."""
    parser = argparse.ArgumentParser(
        prog="tensorferry report",
        description="`tensorferry report`: results files in, one HTML page out.",
    )
    parser.add_argument("results", nargs="+", help="files that bench, sweep or tune wrote (--json)")
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
