"""A run that takes a snapshot after each step, and goes on from the newest one. Prints each step
with its loss, and each snapshot when take() has returned.

python snapshot_job.py KIND SNAPSHOTS STEPS NVME...
"""

import os
import sys

import torch.distributed
from snapshotting import KINDS, Run, seed_all

kind, path, steps, *nvme = sys.argv[1:]
rank = int(os.environ.get("RANK", "0"))
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.set_num_threads(1)
seed_all(rank)
run = Run(nvme, **KINDS[kind])
run.resume(path)
print("begins", run.number, flush=True)
while run.number < int(steps):
    loss = run.step()
    print("step", run.number, loss.hex(), flush=True)
    run.take(path, keep=2)
    print("taken", run.number, flush=True)
run.close()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
