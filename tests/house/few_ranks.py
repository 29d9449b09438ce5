"""`python few_ranks.py ARGUMENT...`: reads the options that a document writes as torchrun does, and
starts two ranks on this machine."""

import os
import sys

from torch.distributed import run

sys.path.append(os.path.join(os.path.dirname(__file__), "../shared"))
from warm_python import WARM_PYTHON

RANKS = ["--standalone", "--nproc-per-node", "2", "--no-python"]

if __name__ == "__main__":
    given = run.parse_args(sys.argv[1:])
    ranks = run.parse_min_max_nnodes(given.nnodes)[0] * int(given.nproc_per_node)
    assert ranks > 1, "a document about several ranks starts one"
    assert given.standalone or ":" in given.rdzv_endpoint, "nobody knows where the ranks meet"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run.main([*RANKS, *WARM_PYTHON, given.training_script, *given.training_script_args])
