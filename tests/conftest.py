"""The order of all tests."""

import gc

# The files that take longest, first: a process that comes to one of them late would end alone.
LONGEST = [
    "python/test_deepspeed.py",
    "house/test_documents.py",
    "command/test_report.py",
    "python/test_lifetime.py",
    "python/test_package.py",
    "python/test_dcp_faults.py",
    "command/test_checkpoint.py",
    "house/test_install.py",
    "command/test_tune.py",
    "python/test_checkpoint_faults.py",
    "python/test_optim_ranks.py",
    "house/test_portability.py",
    "python/test_examples.py",
    "python/test_optim_faults.py",
]


def pytest_collection_modifyitems(items):
    first = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get("/".join(item.path.parts[-2:]), len(first)))


def pytest_collection_finish():
    """Takes all that was imported out of what the garbage collector looks at: a collection takes a
    millisecond then, instead of a fifth of a second."""
    gc.collect()
    gc.freeze()
