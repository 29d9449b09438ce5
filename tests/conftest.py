"""The order of all tests."""

# The files that take longest, first: a process that comes to one of them late would end alone.
LONGEST = [
    "python/test_deepspeed.py",
    "house/test_documents.py",
    "house/test_portability.py",
    "python/test_lifetime.py",
    "python/test_package.py",
    "house/test_install.py",
    "python/test_examples.py",
    "python/test_optim_ranks.py",
    "python/test_optim_faults.py",
]


def pytest_collection_modifyitems(items):
    first = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get("/".join(item.path.parts[-2:]), len(first)))
