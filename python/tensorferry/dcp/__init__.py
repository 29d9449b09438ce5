"""torch.distributed.checkpoint at the speed of the drive, crash-safe and checked.

Give a Writer to torch's save() or async_save(), and a Reader to its load():

>>> import tensorferry.dcp, torch, torch.distributed.checkpoint as dcp
>>> model = torch.nn.Linear(64, 64)
>>> _ = dcp.save(model.state_dict(), storage_writer=tensorferry.dcp.Writer("checkpoint"))
>>> state = torch.nn.Linear(64, 64).state_dict()
>>> dcp.load(state, storage_reader=tensorferry.dcp.Reader("checkpoint"))
>>> torch.equal(state["weight"], model.weight)
True

torch's FileSystemReader reads what Writer writes, and Reader what torch's FileSystemWriter wrote.
"""

from .reader import Reader
from .stager import Stager
from .verification import verify
from .writer import Writer

__all__ = ["Reader", "Stager", "Writer", "verify"]
