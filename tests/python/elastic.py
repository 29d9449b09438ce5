"""torchrun with programs that a server forks, and hosts that are network namespaces."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from warm_python import WARM_PYTHON

JOB = str(Path(__file__).with_name("elastic_job.py"))
AGENT = str(Path(__file__).with_name("elastic_agent.py"))


def start_torchrun(options, folder, *arguments, log, **environment):
    """Starts an agent of torchrun, with ranks that run the job. Returns its process."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | environment
    workers = [*WARM_PYTHON, JOB, str(folder), *map(str, arguments)]
    with open(log, "ab") as file:
        return subprocess.Popen(
            [*WARM_PYTHON, AGENT, *options, "--no-python", *workers],
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def losses_of(folder, rank):
    """What a rank has computed: step -> loss. A step that came twice gave the same both times."""
    seen = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        step, loss = line.split()
        assert seen.setdefault(int(step), loss) == loss, f"step {step} of rank {rank} differs"
    return seen


class Host:
    def __init__(self, name, interface, address):
        self.name, self.interface, self.address = name, interface, address

    @property
    def environment(self):
        return {"NAMESPACE": self.name, "GLOO_SOCKET_IFNAME": self.interface}

    def kill(self):
        """Kills all that runs on it."""
        for process in map(int, _ip("netns", "pids", self.name).stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@contextlib.contextmanager
def two_hosts():
    """Two network namespaces with a cable between them; skips where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip (Debian: iproute2)")
    number = os.getpid() % 100_000
    hosts = [Host(f"tf{n}-{number}", f"tf{n}-{number}", f"10.231.7.{n}") for n in (1, 2)]
    try:
        for host in hosts:
            done = _ip("netns", "add", host.name)
            if done.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
        first, second = hosts
        link = ("link", "add", first.interface, "netns", first.name)
        done = _ip(*link, "type", "veth", "peer", second.interface, "netns", second.name)
        if done.returncode != 0:
            pytest.skip(f"veth pairs cannot be made here: {done.stderr.strip()}")
        for host in hosts:
            inside = ("-n", host.name)
            for words in (
                ("addr", "add", f"{host.address}/24", "dev", host.interface),
                ("link", "set", host.interface, "up"),
                ("link", "set", "lo", "up"),
            ):
                assert _ip(*inside, *words).returncode == 0, words
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            _ip("netns", "delete", host.name)
