"""The packages that a user may choose instead, each in its own environment below build/peers.

An environment is set up once, from PyPI. Those with torch start as hard links to the first one, so
they need no further download and no further gigabyte. The report leaves out a peer that cannot be
set up or cannot do the smallest job here, and says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs.job import ROOT
from benchmarks.jobs.progress import Progress

HOME = ROOT / "build" / "peers"
TORCH = ("torch==2.13.0", "numpy>=2,<3")  # as in scripts/requirements-test.txt


class PeerMissing(Exception):
    """The peer cannot be set up here; the text says why."""


@dataclass(frozen=True)
class Peer:
    name: str
    packages: tuple[str, ...]
    with_torch: bool = True
    options: tuple[str, ...] = ()  # of pip
    env: dict[str, str] = field(default_factory=dict)


PEERS = [
    Peer("torch", TORCH, with_torch=False),
    Peer("NumPy", ("numpy==2.4.6",), with_torch=False),
    Peer("safetensors", ("safetensors==0.8.0",)),
    Peer("transformers", ("transformers==5.23.0", "accelerate==1.15.0")),
    Peer("fastsafetensors", ("fastsafetensors==0.5.0",)),
    Peer("runai-model-streamer", ("runai-model-streamer==0.17.0",)),
    Peer(
        "tensornvme",
        ("tensornvme==0.1.0",),
        options=("--no-build-isolation", "--no-deps"),
        env={
            # Its setup.py writes to ~/.bashrc and looks for liburing.a here.
            "HOME": str(HOME / "home"),
            "LIBRARY_PATH": f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
        },
    ),
    Peer(
        # Without its dependencies: gigabytes of CUDA that host memory does not need.
        "kvikio",
        (
            "kvikio-cu12==26.10.0",
            "libkvikio-cu12==26.10.0",
            "nvidia-cufile-cu12",
            "cuda-pathfinder",
            "rapids-logger",
            "numpy==2.4.6",
            "packaging",
        ),
        with_torch=False,
        options=("--no-deps",),
    ),
    Peer("DeepSpeed", ("deepspeed==0.19.8",), options=("--no-build-isolation",)),
]


class Peers:
    """The environments. `missing` has the peers that cannot be set up, with the reason."""

    def __init__(self, say: Progress) -> None:
        self.say = say
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def python(self, name: str) -> Path:
        """The Python of a peer's environment, which it sets up if needed. Raises PeerMissing."""
        peer = next(peer for peer in PEERS if peer.name == name)
        folder = HOME / name
        python = folder / "bin" / "python"
        if name in self.missing:
            raise PeerMissing(self.missing[name])
        recipe = f"{sys.version_info[:2]} {peer!r}"
        done = folder / "recipe.txt"
        if not done.exists() or done.read_text() != recipe:
            self.say.step(f"setting up {name}")
            try:
                self.make(peer, folder, python)
            except (PeerMissing, OSError) as error:
                self.missing[name] = str(error)
                raise PeerMissing(str(error)) from error
            done.write_text(recipe)
        if name not in self.versions:
            self.versions[name] = self.version(peer, python)
        return python

    def make(self, peer: Peer, folder: Path, python: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.call([sys.executable, "-m", "venv", str(folder)])
        if peer.with_torch:
            base = self.python("torch").parents[1]
            link_packages(base, folder)
        build_tools = ["setuptools", "wheel", "packaging", "ninja", "psutil", "py-cpuinfo"]
        if "--no-build-isolation" in peer.options:
            self.pip(python, build_tools, {})
        if "HOME" in peer.env:
            Path(peer.env["HOME"]).mkdir(parents=True, exist_ok=True)
        self.pip(python, [*peer.options, *peer.packages], peer.env)

    def pip(self, python: Path, arguments: list[str], env: dict[str, str]) -> None:
        quiet = ["--disable-pip-version-check", "--quiet"]
        self.call([str(python), "-m", "pip", "install", *quiet, *arguments], env)

    def call(self, command: list[str], env: dict[str, str] | None = None) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | (env or {}), check=False
        )
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise PeerMissing((said or done.stderr.splitlines() or ["pip gave no reason"])[-1])

    def version(self, peer: Peer, python: Path) -> str:
        package = peer.packages[0].partition("==")[0]
        code = f"from importlib.metadata import version; print(version({package!r}))"
        command = [str(python), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()


def link_packages(base: Path, folder: Path) -> None:
    """Links the packages of one environment into another. pip replaces files and never rewrites
    them, so the first environment does not change."""
    place = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    shutil.copytree(
        base / place,
        folder / place,
        copy_function=os.link,
        dirs_exist_ok=True,
        symlinks=True,
        ignore=lambda at, names: {
            name
            for name in names
            if name.startswith(("pip", "setuptools", "_distutils", "distutils", "pkg_resources"))
            and Path(at) == base / place
        },
    )
