"""Measures the costs that a plan is made of and writes them as JSON."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from .costs import copy_costs, drive_costs, pass_costs, process_bytes, step_costs

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(arguments: list[str]) -> int:
    """Runs the program. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tensorferry.plan", description=__doc__)
    parser.add_argument("directory", help="a directory on the drive")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", default="-", help="the file to write; -: standard output")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("tensorferry plan: torch finds no GPU here", file=sys.stderr)
        return 1
    device = torch.device(options.device)
    dtype = _DTYPES[options.dtype]
    speeds, drive = drive_costs(options.directory)
    costs = drive | {"process_bytes": process_bytes()}
    costs |= step_costs(options.directory, device)
    flops, of_passes = pass_costs(options.directory, device, dtype, speeds["write"])
    costs |= of_passes
    if device.type == "cuda":
        costs |= copy_costs()
    text = json.dumps({"drive": speeds, "flops": flops, "costs": costs}, indent=1)
    if options.output == "-":
        print(text)
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 0
