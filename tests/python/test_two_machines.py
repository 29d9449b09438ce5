"""Two machines, which are network namespaces with a drive each: what torchrun starts on both trains
and goes on from the last snapshot after one of them is gone."""

import os
import signal
import time

import pytest
from drives import loop_mount
from elastic import losses_of, start_torchrun, two_hosts

pytest.importorskip("torch")

PORT = 29400
# With a store that outlives a round, torch 2.13 puts the address of rank 0 into the first round
# alone: an agent that comes later waits for it until its time is up.
A_STORE_FOR_EACH_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
REFERENCE = ["--standalone", "--nproc-per-node", "2"]


def options_of(host, hosts):
    return [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={hosts[0].address}:{PORT}",
        "--rdzv-id=two-machines",
        f"--rdzv-conf=is_host={int(host is hosts[0])},join_timeout=90,keep_alive_interval=1",
        f"--local-addr={host.address}",
    ]


def wait_for(path, seconds=90):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.1)


def end_all(processes):
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_machine_that_is_killed_comes_back_and_the_losses_are_the_same(tmp_path):
    for name in ("expected", "trained", "one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "expected" / "drive").mkdir()
    alone = start_torchrun(
        REFERENCE, tmp_path / "expected", tmp_path / "expected" / "drive", log=tmp_path / "log"
    )
    assert alone.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    processes = []
    with (
        two_hosts() as hosts,
        loop_mount(tmp_path / "one", size="256M") as one,
        loop_mount(tmp_path / "two", size="256M") as two,
    ):
        drives = [one, two]

        def start(number):
            host = hosts[number]
            process = start_torchrun(
                options_of(host, hosts),
                tmp_path / "trained",
                drives[number],
                "wait",
                log=tmp_path / f"log-{number}",
                **host.environment,
                **A_STORE_FOR_EACH_ROUND,
            )
            processes.append(process)
            return process

        try:
            first, second = start(0), start(1)
            wait_for(tmp_path / "trained" / "fault")  # rank 1 stands still in step 5
            hosts[1].kill()
            assert second.wait(timeout=30) == -signal.SIGKILL
            third = start(1)
            logs = [tmp_path / f"log-{number}" for number in (0, 1)]
            said = [third.wait(timeout=150), first.wait(timeout=150)]
            assert said == [0, 0], "\n".join(log.read_text() for log in logs)
        finally:
            end_all(processes)
        left = [os.listdir(drive / f"tensorferry-swap-{os.geteuid()}") for drive in drives]
    for rank in (0, 1):
        expected = losses_of(tmp_path / "expected", rank)
        assert sorted(expected) == list(range(8))
        assert losses_of(tmp_path / "trained", rank) == expected
    lines = (tmp_path / "trained" / "losses-1").read_text().splitlines()
    steps = [int(line.split()[0]) for line in lines]
    assert steps == [*range(5), *range(4, 8)]  # from the snapshot on
    assert left == [[], []]  # also of what was killed
