"""Write sharded checkpoints of one FSDP 2 model on CPU (gloo), in the forms that peers merge.

    torchrun --nproc-per-node 8 benchmarks/make_dcp.py DIR --dtype bfloat16 --forms dcp hf verl

``DIR/accelerate/pytorch_model_fsdp_0`` is the output of ``dcp.save``, in Accelerate's directory
structure. ``DIR/hf`` has the shards of ``HuggingFaceStorageWriter``, ``DIR/verl`` the rank files of
verl. The parameters are the same in all. The default model has the shape of TinyLlama: 1.1
billion parameters.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """Build the model as FSDP 2 shards it; a rank only allocates its own part."""
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=4,
        vocab_size=args.vocab,
        tie_word_embeddings=False,
        dtype=args.dtype,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, 0.02)
    return model


def save_dcp(model: LlamaForCausalLM, directory: Path) -> None:
    place = directory / "accelerate" / "pytorch_model_fsdp_0"
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=place)


def save_hf(model: LlamaForCausalLM, directory: Path) -> None:
    state: dict[str, Any] = get_model_state_dict(model)
    place = str(directory / "hf")
    writer = dcp.HuggingFaceStorageWriter(place, dict.fromkeys(state, 1), save_distributed=True)
    dcp.save(state, storage_writer=writer)


def save_verl(model: LlamaForCausalLM, directory: Path) -> None:
    """Save the model as FSDPCheckpointManager does."""
    place = directory / "verl"
    place.mkdir(parents=True, exist_ok=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    state = get_model_state_dict(model)
    torch.save(state, place / f"model_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(place / "huggingface")
        (place / "fsdp_config.json").write_text(
            json.dumps({"FSDP_version": 2, "world_size": world})
        )


FORMS: dict[str, Callable[[LlamaForCausalLM, Path], None]] = {
    "dcp": save_dcp,
    "hf": save_hf,
    "verl": save_verl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = build(args)
    for form in args.forms:
        FORMS[form](model, args.directory)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
