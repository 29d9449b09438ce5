"""What torch.distributed needs to know in each process of a training."""

import os
import socket
import subprocess


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environments(ranks, **more):
    """The environment of each rank, with `more` variables in it."""
    port = free_port()
    return [
        os.environ
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        | more
        for rank in range(ranks)
    ]


def outputs_of_ranks(command, ranks, seconds_max=240):
    """Starts the command once for each rank. Returns what each has printed."""
    processes = [
        subprocess.Popen(
            [*map(str, command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in rank_environments(ranks, GLOO_SOCKET_IFNAME="lo")
    ]
    outputs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=seconds_max)
            assert process.returncode == 0, err
            outputs.append(out)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return outputs
