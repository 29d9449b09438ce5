"""What the tests of the Python package share."""

import pytest
import tensorferry
from handle_fixtures import engine, handle, path

__all__ = ["engine", "handle", "one_thread", "path", "space"]

# The files that take longest, first: a process that comes to one of them late would end alone.
LONGEST = ["deepspeed", "lifetime", "package", "examples", "optim_ranks", "optim_faults"]


def pytest_collection_modifyitems(items):
    first = {f"test_{name}.py": rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.name, len(first)))


@pytest.fixture
def space(tmp_path, engine):
    with tensorferry.SwapSpace(tmp_path, buffer_bytes=4 << 20, engine=engine) as space:
        yield space


@pytest.fixture
def one_thread():
    """torch computes in one thread: the same sums in the same order on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
