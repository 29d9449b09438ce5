"""The fixtures of tests that move bytes with a Handle. A conftest.py imports them."""

import pytest
import tensorferry

ENGINES = ["io_uring", "libaio", "threads"]


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def handle(engine):
    with tensorferry.Handle(engine) as handle:
        yield handle


@pytest.fixture
def path(tmp_path):
    """A path without a file."""
    return str(tmp_path / "data.bin")
