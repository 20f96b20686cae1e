"""Change the number of ranks with DCP alone: load into a live FSDP 2 model, and save.

torchrun --nproc-per-node 6 benchmarks/dcp_again.py SOURCE OUTPUT config.json
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def main(source: str, output: str, config: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_json_file(config)).to(torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optim": state}
    dcp.load(held, checkpoint_id=source)
    dcp.save(held, checkpoint_id=output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
