"""The order of all tests, and the server of those that start Python with torch."""

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The files that take longest, first: a process that comes to one of them late would end alone.
LONGEST = [
    "python/test_dcp_faults.py",
    "house/test_documents.py",
    "command/test_report.py",
    "python/test_lifetime.py",
    "python/test_deepspeed.py",
    "python/test_larger_than_memory.py",
    "command/test_checkpoint.py",
    "python/test_torch_headers.py",
    "python/test_checkpoint_faults.py",
    "house/test_portability.py",
    "house/test_install.py",
    "command/test_tune.py",
    "python/test_offload_bytes.py",
    "python/test_package.py",
    "python/test_quantized_moments.py",
    "python/test_closing.py",
    "python/test_offload.py",
    "python/test_optim_memory.py",
    "python/test_transformers.py",
    "house/test_site.py",
    "python/test_safetensors_enabled.py",
    "python/test_examples.py",
    "python/test_optim_ranks.py",
    "python/test_optim_faults.py",
    "command/test_sweep.py",
    "house/test_rooms.py",
]


def pytest_collection_modifyitems(items):
    first = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get("/".join(item.path.parts[-2:]), len(first)))


def pytest_collection_finish():
    """Takes all that was imported out of what the garbage collector looks at: a collection takes a
    millisecond then, instead of a fifth of a second."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def warm_server():
    """The server of tests/shared/warm_python.py, for all processes of this pytest."""
    program = Path(__file__).parent / "shared/warm_python.py"
    with tempfile.TemporaryDirectory(prefix="tensorferry-warm-") as place:
        path = os.path.join(place, "socket")
        command = Path(place, "python3")
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {program} "$@"\n')
        command.chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, program, "--serve", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        server.stdout.readline()
        os.environ["TENSORFERRY_WARM_PYTHON"] = path
        yield
        del os.environ["TENSORFERRY_WARM_PYTHON"]
        server.stdin.close()
        server.wait()
        server.stdout.close()


# Now, because other conftest.py and modules of tests ask for it when they are imported. The workers
# of xdist inherit it.
SERVERS = contextlib.ExitStack()
if "TENSORFERRY_WARM_PYTHON" not in os.environ:
    SERVERS.enter_context(warm_server())


def pytest_unconfigure():
    SERVERS.close()
