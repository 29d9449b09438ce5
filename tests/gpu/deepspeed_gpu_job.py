"""A ZeRO-3 training on one GPU, as a DeepSpeed user writes it. Prints losses to the last bit.

python deepspeed_gpu_job.py CONFIG.json
"""

import gc
import json
import sys

import deepspeed
import tensorferry
import torch


def main():
    with open(sys.argv[1]) as file:
        config = json.load(file)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    deepspeed.init_distributed("nccl")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024),
            torch.nn.GELU(), torch.nn.Linear(1024, 16),
        )  # fmt: skip
    parameters = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    generator = torch.Generator().manual_seed(1234)
    for step in range(6):
        batch = torch.randn(8, 256, generator=generator).to("cuda", torch.bfloat16)
        loss = engine(batch).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        print("loss", step, loss.item().hex(), flush=True)
    handles = [o for o in gc.get_objects() if isinstance(o, tensorferry.aio_handle)]
    moved = {key: sum(h.stats()[key] for h in handles) for key in ("read_bytes", "written_bytes")}
    print("moved", json.dumps(moved), flush=True)
    torch.distributed.destroy_process_group()


main()
