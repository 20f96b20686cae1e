"""Compare the forecasts of `reshard plan` with the memory that training takes on one GPU.

    python benchmarks/gpu_memory.py [NAME ...]     # names of MODELS; default: all

Each model takes three steps under DDP and FSDP 2 of one rank over nccl. A line of JSON states the
forecast and the peaks of ``torch.cuda.max_memory_allocated`` of the last backward pass and of the
last optimizer step, in bytes.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from reshard.sizing.families import count_config
from reshard.sizing.rank_share import take_share
from reshard.sizing.setup import Cluster, Training
from reshard.sizing.strategies import STRATEGIES, forecast_one
from tests.support.model_configs import GPT2_MEDIUM, LLAMA_1B

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
}
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 1152,
    "intermediate_size": 4608,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
OLMO2: dict[str, Any] = {**LLAMA_1B, "model_type": "olmo2", "num_hidden_layers": 8}


@dataclass(frozen=True)
class Run:
    """Define one measurement: a model, its batch and how it is trained."""

    config: dict[str, Any]
    seq_len: int
    micro_batch: int = 1
    checkpointing: bool = False
    precision: str = "bf16"


MODELS = {
    "llama_4096": Run(LLAMA_1B, 4096),
    "llama_2048x4": Run(LLAMA_1B, 2048, 4),
    "llama_4096_checkpointing": Run(LLAMA_1B, 4096, 2, checkpointing=True),
    "llama_fp32": Run(LLAMA_1B, 2048, precision="fp32"),
    "qwen3_4096": Run(QWEN3, 4096),
    "qwen3_checkpointing": Run(QWEN3, 4096, checkpointing=True),
    "gpt2_1024x4": Run(GPT2_MEDIUM, 1024, 4),
    "mixtral_4096": Run(MIXTRAL, 4096),
    "gemma2_2048": Run(GEMMA2, 2048),
    "olmo2_4096": Run(OLMO2, 4096),
}
STEPS = 3


def measure(run: Run, strategy: str, *, fused: bool) -> dict[str, int]:
    """Return the peaks of allocated bytes in the backward pass and in the optimizer step."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**run.config)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    narrow = torch.bfloat16 if run.precision == "bf16" else torch.float32
    if strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        block_names = set(model._no_split_modules)  # noqa: SLF001 - Accelerate reads it, too
        for module in list(model.modules()):
            if type(module).__name__ in block_names:
                fully_shard(module, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=fused)
    shape = (run.micro_batch, run.seq_len)
    tokens = torch.randint(0, config.vocab_size, shape, device="cuda")
    peaks = {}
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast(
            "cuda", dtype=narrow, enabled=strategy == "ddp" and narrow.itemsize < 4
        ):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        peaks["backward"] = _read_peak()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peaks["step"] = _read_peak()
        optimizer.zero_grad()
    peaks["reserved"] = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    peaks["outside_allocator"] = total - free - torch.cuda.memory_reserved()
    return peaks


def _read_peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def predict(run: Run, strategy: str) -> dict[str, int]:
    """Return the forecast of the same run without the margin."""
    training = Training(
        precision=run.precision,  # type: ignore[arg-type]
        seq_len=run.seq_len,
        micro_batch=run.micro_batch,
    )
    sizes = count_config(AutoConfig.for_model(**run.config).to_dict(), "config")
    chosen = next(each for each in STRATEGIES if each.name == strategy)
    row = forecast_one(chosen, sizes, take_share(sizes, training), Cluster(1, 80 * 10**9), training)
    activations = row.recomputed if run.checkpointing else row.activations
    parts = {
        "states": row.states,
        "gathered": row.gathered,
        "buckets": row.buckets,
        "activations": activations,
        "logits": row.logits,
        "step_copies": row.step,
    }
    backward = row.states + row.gathered + row.buckets + activations + row.logits
    return {"backward": backward, "step": row.states + row.step, **parts}


def main(names: list[str]) -> None:
    """Print a line for each model and strategy."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    for name in names or MODELS:
        for strategy, fused in (("ddp", False), ("fsdp", False), ("fsdp", True)):
            run, started = MODELS[name], time.monotonic()
            line: dict[str, Any] = {"model": name, "strategy": strategy, "fused": fused}
            job = partial(measure, run, strategy, fused=fused)
            try:
                line |= {"forecast": predict(run, strategy), "measured": job()}
            except torch.cuda.OutOfMemoryError as error:
                line["failed"] = str(error).splitlines()[0]
            line["seconds"] = round(time.monotonic() - started, 1)
            print(json.dumps(line), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
