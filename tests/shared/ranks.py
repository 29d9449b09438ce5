"""What torch.distributed needs to know in each process of a training."""

import os
import socket


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
