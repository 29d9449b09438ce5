"""What the tests of the Python package share."""

import pytest
import tensorferry
from handle_fixtures import engine, handle, path

__all__ = ["engine", "handle", "one_thread", "path", "slow_drive", "space"]


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


@pytest.fixture
def slow_drive(monkeypatch):
    """No state arrives before somebody waits for it: all that a step may leave is left."""
    from tensorferry.optim.step import Step

    monkeypatch.setattr(Step, "is_next_loaded", lambda step: False)
