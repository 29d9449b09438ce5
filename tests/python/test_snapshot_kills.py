"""Runs that take snapshots, killed at random moments, or without power: what was acknowledged
resumes, with the bits of a run that nobody killed. On one drive, on two, and with two ranks."""

import pytest

torch = pytest.importorskip("torch")

from loop_mount import loop_mount
from programs import FOLDERS, check_python, runs
from warm_python import WARM_PYTHON

# Forks one process for each rank and round: the imports take longer than what they do.
KILLER = """
import fcntl, os, random, select, signal, struct, sys, tempfile, time
sys.path[:0] = sys.argv[1].split(os.pathsep)
import torch, torch.distributed as dist
torch.set_num_threads(1)  # OpenMP does not survive a fork
import tensorferry.snapshot
from snapshotting import Run, seed_all

place, drives, ranks, rounds = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
point = sys.argv[6]  # of a file system that loses its power, or ""
SHUTDOWN, JOURNAL_FLUSHED, JOURNAL_LOST = 0x8004587D, 1, 2  # of ext4
rng = random.Random(drives * 10 + ranks)
STEPS = 12 * rounds  # more than a round can take

def run(rank, folder, store, out, steps):
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank,
                                world_size=ranks)
    paths = [f"{folder}/drive{number}" for number in range(drives)]
    for path in paths:
        os.makedirs(path, exist_ok=True)
    seed_all(rank)
    one = Run(paths, seed=rank)
    one.resume(folder + "/snapshots")
    os.write(out, b"begin %d\\n" % one.number)
    for _ in range(steps):
        loss = one.step()
        os.write(out, f"step {one.number} {loss.hex()}\\n".encode())
        if one.number % 2 == 0:
            one.take(folder + "/snapshots", keep=2)
            os.write(out, b"taken %d\\n" % one.number)

def start(folder, steps):
    store = tempfile.mktemp(dir=place)
    children = []
    for rank in range(ranks):
        inner, outer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run(rank, folder, store, outer, steps)
            except BaseException as error:  # also where the other rank has been killed
                os.write(outer, f"error {error!r}\\n".encode())
            os._exit(0)
        os.close(outer)
        children.append((child, inner))
    return children

def told(inner):
    text = b""
    while part := os.read(inner, 1 << 16):
        text += part
    os.close(inner)
    lines = text.decode().splitlines(keepends=True)
    return [line.split() for line in lines if line.endswith("\\n")]

def losses(lines):
    return {int(line[1]): line[2] for line in lines if line[0] == "step"}

whole = []
for child, inner in start(place + "/whole", STEPS):
    whole.append(losses(told(inner)))
    os.waitpid(child, 0)
assert all(len(found) == STEPS for found in whole), [len(found) for found in whole]

def cut_power(how):
    root = os.open(point, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.ioctl(root, SHUTDOWN, struct.pack("I", how))
    os.close(root)

folder, acknowledged, again = (point or place) + "/cut", 0, 0
os.makedirs(folder)
if point:
    from loop_mount import mount_anew
    os.sync()
for number in range(rounds):
    children = start(folder, STEPS)
    for _, inner in children:
        select.select([inner], [], [], 60)  # it has begun
    for _ in range(6000):  # on a busy machine the first one takes long
        if acknowledged or tensorferry.snapshot.find(folder + "/snapshots"):
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.15))
    if point:
        cut_power(JOURNAL_FLUSHED if number % 3 == 0 else JOURNAL_LOST)
    for child, _ in rng.sample(children, ranks):
        os.kill(child, signal.SIGKILL)
        time.sleep(rng.choice([0, 0, 0.02]))
    for child, _ in children:
        os.waitpid(child, 0)
    if point:
        mount_anew(place + "/ext4.img", point)
    before = acknowledged
    for rank, (_, inner) in enumerate(children):
        lines = told(inner)
        if lines and lines[0][0] == "begin":
            begin = int(lines[0][1])
            again += begin > 0
            # A snapshot may be there that nobody has heard of.
            assert begin >= before, (begin, before)
            assert begin % 2 == 0, begin
        found = losses(lines)
        for number, loss in found.items():
            assert whole[rank][number] == loss, (rank, number)
        taken = [int(line[1]) for line in lines if line[0] == "taken"]
        acknowledged = max([acknowledged, *taken])
    assert acknowledged < STEPS - 1
assert acknowledged > 0 and again > 0, "no snapshot was resumed from"
for one in tensorferry.snapshot.find(folder + "/snapshots"):
    tensorferry.snapshot.verify(folder + "/snapshots", one.name)
"""


@pytest.mark.parametrize(
    ("drives", "ranks", "rounds"), [(1, 1, 8), (2, 1, 6), (1, 2, 6)], ids=["1", "2", "2 ranks"]
)
def test_a_kill_at_any_moment_leaves_what_was_acknowledged(tmp_path, drives, ranks, rounds):
    program = KILLER
    check_python(
        program, FOLDERS, tmp_path, drives, ranks, runs(rounds), "", python=WARM_PYTHON, timeout=580
    )


def test_a_power_cut_under_two_ranks_leaves_what_was_acknowledged(tmp_path):
    with loop_mount(tmp_path, size="96M") as point:
        check_python(
            KILLER, FOLDERS, tmp_path, 1, 2, runs(6), point, python=WARM_PYTHON, timeout=580
        )
