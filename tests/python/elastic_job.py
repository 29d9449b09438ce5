"""A rank of a training that torchrun starts: model, gradients and states on NVMe, a snapshot after
every second step. Writes a line for each step.

python elastic_job.py FOLDER DRIVE [FAULT], which comes once, on rank 1, in step 5:

end: its drive gives EIO from then on      full: its drive has no room for a snapshot, in step 1
kill: SIGKILL                              wait: it stands still until somebody kills it

With a fault of the drive rank 0 has another one: FOLDER.

NAMESPACE names a network namespace to be in, which has the interface and address of a host.
"""

import ctypes
import fcntl
import os
import signal
import struct
import sys
import time
from pathlib import Path

# Before torch looks at the network.
if "NAMESPACE" in os.environ:
    namespace = os.open(f"/run/netns/{os.environ['NAMESPACE']}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000) == 0, "setns"

import tensorferry.snapshot
import torch
import torch.distributed as dist
from configured_job import configuration
from sharded_models import batch, net
from torch.distributed.elastic.multiprocessing.errors import record

STEPS = 8
# Swap files grow by 16 MiB at least: with this model the first snapshot needs more than they have.
FULL = {"step": 1, "width": 384}
OTHER = {"step": 5, "width": 64}


def fail(fault, folder, drive):
    marker = folder / "fault"
    if marker.exists() or dist.get_rank() != 1:
        return
    marker.write_text(str(time.time()))
    if fault == "end":
        descriptor = os.open(drive, os.O_RDONLY)
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN
    elif fault == "full":
        with open(os.path.join(drive, "filler"), "wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                pass
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "wait":
        time.sleep(1000)


@record
def main():
    folder, drive, *fault = sys.argv[1:]
    folder = Path(folder)
    torch.set_num_threads(1)
    if fault in (["end"], ["full"]) and os.environ["RANK"] == "0":
        drive = str(folder)
    config = configuration(3, drive, weights=True)
    chosen = FULL if fault == ["full"] else OTHER
    limit = 15 * chosen["width"] ** 2  # a third of the weights of a rank and their states
    model, optimizer = tensorferry.initialize(
        net(width=chosen["width"], depth=4), config, max_cpu_bytes=limit
    )
    run = dict(model=model, optimizer=optimizer)
    resumed = tensorferry.snapshot.resume(folder / "snapshots", **run)
    begin = 0 if resumed is None else resumed.extra["step"]
    with open(folder / f"losses-{dist.get_rank()}", "a") as lines:
        for step in range(begin, STEPS):
            if step == chosen["step"] and fault:
                fail(fault[0], folder, drive)
            loss = model(batch(step)).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            print(step, loss.item().hex(), file=lines, flush=True)
            if step % 2 == 1:
                extra = {"step": step + 1}
                tensorferry.snapshot.take(folder / "snapshots", **run, extra=extra, keep=1)
    optimizer.close()
    optimizer.weights.close()
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 with gloo sometimes aborts at exit
