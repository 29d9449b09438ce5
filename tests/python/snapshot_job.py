"""What ranks do in the tests of snapshots: forked_ranks.py runs these functions."""

import os
import sys
from pathlib import Path

import tensorferry.snapshot
import torch.distributed as dist
from tensorferry.snapshot import folder

sys.path.append(str(Path(__file__).parents[1] / "shared"))
from forked_ranks import serve
from snapshotting import Run, assert_same_bits, seed_all


def new_run(place, seed=0):
    rank = dist.get_rank()
    nvme = Path(place, f"nvme-{rank}")
    nvme.mkdir(exist_ok=True)
    seed_all(seed + rank)
    return Run(nvme, weights=True, seed=seed + rank)


def failure_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except (OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def take(place, steps=1):
    run = new_run(place)
    for _ in range(steps):
        run.step()
        run.take(place + "/snapshots")
    run.close()


def resume(place):
    """What resume() fails with, and how far the run is."""
    run = new_run(place)
    failure = failure_of(run.resume, place + "/snapshots")
    run.close()
    return failure, run.number


def same_bits(place):
    run = new_run(place)
    run.step()
    run.take(place + "/snapshots", keep=1)
    expected = run.bits()
    run.step()
    run.take(place + "/snapshots")
    run.close()
    other = new_run(place, seed=7)
    assert other.resume(place + "/snapshots", name="snapshot-00000001").snapshot.ranks == 2
    assert_same_bits(other.bits(), expected)
    other.close()


def fails_on(place, owner, name, failing):
    """One rank fails in a take(): all hear of it, nothing is left, and the next one succeeds."""
    rank = dist.get_rank()
    path = Path(place, "snapshots")
    run = new_run(place)
    run.step()
    run.take(path)
    owner = {"folder": folder, "space": tensorferry.SwapSpace}[owner]
    real = getattr(owner, name)

    def fail(*_):
        raise OSError(28, "needed 1 bytes, free 0")

    if rank == failing:
        setattr(owner, name, fail)
    told = failure_of(run.take, path, keep=1)
    setattr(owner, name, real)
    dist.barrier()
    assert "free 0" in told, told
    assert (f"rank {failing}" in told) == (rank != failing), told
    assert [one.number for one in tensorferry.snapshot.find(path)] == [1]
    assert len(os.listdir(path)) == 1, os.listdir(path)
    dist.barrier()
    run.step()
    run.take(path, keep=1)
    assert len(tensorferry.snapshot.find(path)) == 1
    run.take(path, keep=1)
    links = list(Path(place).glob(f"nvme-{rank}/tensorferry-snapshots-*/*"))
    assert len(links) == 2, links
    assert run.optimizer.stats()["snapshots"] == 1
    tensorferry.snapshot.verify(path)
    dist.barrier()
    run.close()


def commit_fails(place):
    """Only the first rank knows whether a commit took place: the others free nothing."""
    path = Path(place, "snapshots")
    run = new_run(place)
    run.step()
    write = folder.write_json

    def write_and_fail(where, content):
        write(where, content)
        if where.name == folder.COMMIT:
            raise OSError(5, "sync")

    folder.write_json = write_and_fail
    assert "sync" in failure_of(run.take, path)
    folder.write_json = write
    dist.barrier()
    assert tensorferry.snapshot.find(path) == []
    pinned = run.optimizer.stats()["snapshots"]
    assert pinned == (0 if dist.get_rank() == 0 else 1), pinned
    run.step()
    run.take(path)
    assert run.optimizer.stats()["snapshots"] == 1
    assert len(os.listdir(path)) == 1
    tensorferry.snapshot.verify(path)
    dist.barrier()
    run.close()


if __name__ == "__main__":
    serve(globals())
