"""Programs in processes of their own, and how often to try."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

# Where a child finds what tests import, for its sys.path.
FOLDERS = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in ("python", "shared"))


def runs(ordinary):
    """How often a test of chances is repeated: ten times as often in `make soak`."""
    return ordinary * (10 if os.environ.get("TENSORFERRY_SOAK") else 1)


def let_others_in(folder):
    """Opens pytest's folders from this one up, which are for their owner alone. A pytest that a
    test starts closes the last of them again."""
    for each in [folder, *folder.parents]:
        if "pytest-of-" in str(each) and stat.S_IMODE(each.stat().st_mode) == 0o700:
            each.chmod(0o755)


def run_python(code, *args, timeout=120, python=(sys.executable,), **env):
    """Runs a program in a process of its own and returns what it was and what it said. One that
    imports torch anyway is quicker with WARM_PYTHON."""
    return subprocess.run(
        [*python, "-X", "faulthandler", "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | env,
        # The parent may have ignored Ctrl-C: a shell does that for jobs in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def check_python(code, *args, **options):
    """The same for a program that must succeed in silence; returns what it printed."""
    done = run_python(code, *args, **options)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout
