"""The command, run as a person runs it: in a process of its own, in an empty directory."""

import signal
import subprocess

import pytest
from ferry_program import PROGRAM, WITH_PACKAGE


def hear_signals():
    """The parent may have ignored them: nohup does, and so does a shell for jobs in the
    background."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Command:
    """`ferry("bench", "--sizes", "4K")` runs it and returns what it said; `code=1` expects that
    exit status; other keywords go into its environment."""

    program = PROGRAM

    def __init__(self, place):
        self.place = place
        self.started = []
        self.env = WITH_PACKAGE | {"TENSORFERRY_PROFILES": str(place / "profiles")}

    def start(self, *arguments, **options):
        """Goes on beside the test, and not beyond it."""
        options.setdefault("cwd", self.place)
        running = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
            preexec_fn=hear_signals,
            **options,
        )
        self.started.append(running)
        return running

    def __call__(self, *arguments, code=0, timeout=240, cwd=None, **env):
        done = subprocess.run(
            [PROGRAM, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or self.place,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
        )
        said = f"tensorferry {' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == code, f"exit {done.returncode}\n{said}"
        return done


@pytest.fixture
def ferry(tmp_path):
    """The command, in a directory of its own."""
    if not PROGRAM.is_file():
        pytest.skip(f"no {PROGRAM}: run `make` first")
    place = tmp_path / "run"
    place.mkdir()
    command = Command(place)
    yield command
    for running in command.started:
        running.kill()
        running.wait()
