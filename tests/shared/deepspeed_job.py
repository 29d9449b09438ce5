"""A rank of a ZeRO-3 training, as a DeepSpeed user writes it. Prints losses to the last bit.

python deepspeed_job.py CONFIG.json [device=cpu|cuda] [steps=N] [skip=N] [save=DIR] [load=DIR]
"""

import json
import os
import sys

import deepspeed
import torch


def main():
    options = dict(word.split("=") for word in sys.argv[2:])
    with open(sys.argv[1]) as file:
        config = json.load(file)
    device = options.get("device", "cpu")
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.use_deterministic_algorithms(True, warn_only=True)
    deepspeed.init_distributed("gloo" if device == "cpu" else "nccl")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024),
            torch.nn.GELU(),
            torch.nn.Linear(1024, 1024),
            torch.nn.GELU(),
            torch.nn.Linear(1024, 16),
        )
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    if "load" in options:
        engine.load_checkpoint(options["load"])
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(1234 + rank)
    for step in range(int(options.get("steps", 10))):
        batch = torch.randn(8, 256, generator=generator, dtype=torch.bfloat16).to(device)
        if step < int(options.get("skip", 0)):
            continue
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        print("loss", step, loss.item().hex(), flush=True)
    if "save" in options:
        engine.save_checkpoint(options["save"])
    if os.environ.get("REPORT_HANDLES"):
        import gc

        import tensorferry

        handles = [o for o in gc.get_objects() if isinstance(o, tensorferry.aio_handle)]
        moved = {
            key: sum(h.stats()[key] for h in handles) for key in ("read_bytes", "written_bytes")
        }
        print("moved", json.dumps(moved), flush=True)
    deepspeed.comm.barrier()
    torch.distributed.destroy_process_group()


main()
