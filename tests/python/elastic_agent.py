"""torchrun, in the network namespace that NAMESPACE names."""

import ctypes
import os

if "NAMESPACE" in os.environ:
    namespace = os.open(f"/run/netns/{os.environ['NAMESPACE']}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000) == 0, "setns"

from torch.distributed.run import main

if __name__ == "__main__":
    main()
