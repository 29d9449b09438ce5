"""torch's large tensors have huge pages if tensorferry.offload is imported before the first one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CODE = """
import resource, torch
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
import tensorferry.offload
before = faults()
tensor = torch.ones(16 << 20)
print(faults() - before)
"""


def page_faults(choice=None):
    """Of a new process that fills a tensor of 64 MiB. `choice` is the user's."""
    if not SETTING.exists() or "[madvise]" not in SETTING.read_text():
        pytest.skip("the kernel does not leave huge pages to programs")
    environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    if choice is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = choice
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_large_tensors_have_huge_pages():
    assert page_faults() < 8000


def test_the_choice_of_the_user_stays():
    assert page_faults("0") > 16000
