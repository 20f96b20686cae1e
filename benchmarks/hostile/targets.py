"""List the targets of the fuzzer: each reader, with a checkpoint of its framework or one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.hostile.seeds import Seed, kept, made

_PICKLED = (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True)
class Target:
    """One reader.

    Args:
        name: what it is called on the command line.
        checkpoint: of the seeds, the one that is damaged; "" for files by themselves.
        ends: how the names of the files end that are; all files if there are none.
        given: where below it a user's path points.
    """

    name: str
    checkpoint: str
    ends: tuple[str, ...] = ()
    given: str = "."

    def files(self, seed: Seed) -> list[str]:
        """List the files of the checkpoint that are damaged."""
        return [file for file in seed.files if file.endswith(self.ends or "")]


ALONE = (
    Target("pickle", "", _PICKLED),
    Target("torch_file", "", _PICKLED),
    Target("safetensors", "", (".safetensors",)),
    Target("index", "", (".index.json",)),
)
_DEEPSPEED = (
    Target("zero1", "z1_full/run"),
    Target("zero2", "z2_round_robin_groups_ws4/run"),
    Target("zero3", "examples/llama-zero3-4ranks"),
    Target("zero3_frozen", "z3_subgroups_groups/run"),
    Target("zero3_swap", "z3_offload_both/run"),
    Target("zero0", "z0_full/run"),
    Target("bf16_optimizer", "bf16opt_groups_ws4/run"),
    Target("universal", "universal_z3/universal"),
    Target("universal_z1", "universal_z1/universal"),
    Target("experts", "moe_z2/run"),
    Target("experts_zero0", "moe_z0/run"),
    Target("pipeline", "parallel/pp2dp2/run"),
    Target("tensor_parallel", "parallel/mpu2_z1/run"),
    Target("autotp", "parallel/autotp2_uneven/run"),
    Target("bloom", "tests/data/bloom/tp2pp2/run"),
    Target("gpt_neox", "tests/data/gpt_neox/tp2pp0/run"),
    Target("megatron_deepspeed", "tests/data/megatron_deepspeed/tp2pp2dp2/run"),
)
_TORCH = (
    Target("dcp", "torch/dcp_odd_tensors/ckpt", (".metadata",)),
    Target("dcp_items", "torch/dcp_objects/ckpt"),
    Target("dcp_hf", "torch/hf_storage_sharded/ckpt"),
    Target("state_dict", "torch/plain_groups/ckpt"),
    Target("legacy_file", "torch/plain_legacy/ckpt"),
    Target("pytorch_directory", "torch/fsdp1_full_optim_rekeyed_groups/ckpt"),
    Target("fsdp1_flat", "libraries/acc_fsdp1_local_flat/ckpt"),
    Target("fsdp1_orig", "torch/fsdp1_local_optim_sharded_ws4/ckpt"),
    Target("sharded_tensor", "torch/fsdp1_sharded_shardedtensor/ckpt"),
    Target("dtensor", "torch/fsdp2_ranks_tp/ckpt"),
    Target("dtensor_groups", "torch/fsdp2_ranks_named_groups_ws4/ckpt"),
)
_MEGATRON = (
    Target("megatron", "tests/data/megatron/llama_tp2pp2/ckpt"),
    Target("megatron_distopt", "megatron/mixtral_distopt_ep2dp4/torch"),
    Target("megatron_buckets", "megatron/llama_buckets_dp2/torch"),
    Target("torch_dist", "tests/data/megatron/llama_buckets_dp2/torch_dist"),
    Target("torch_dist_moe", "megatron/mixtral_distopt_ep2dp4/torch_dist_fully_reshardable"),
)
_OTHERS = (
    Target("meta", "tests/data/meta/llama_mp2"),
    Target("nanotron", "plugins/nanotron/tests/data/zero_tp2pp2dp2/ckpt"),
    Target("nanotron_plain", "plugins/nanotron/tests/data/llama_pp2/ckpt"),
    Target("colossalai", "tests/data/colossalai/pipeline/ckpt"),
    Target("colossalai_plain", "tests/data/colossalai/plain/ckpt"),
    Target("fairscale", "tests/data/fairscale/fairscale_flat/ckpt"),
    Target("fairscale_oss", "tests/data/fairscale/fairscale_oss/ckpt"),
    Target("torchtitan", "tests/data/torchtitan/titan_sample/ckpt"),
    Target("verl", "tests/data/verl/verl_sample/ckpt"),
    Target("huggingface", "libraries/peft_lora/ckpt"),
    Target("accelerate", "libraries/acc_fsdp1_sharded_ranks/ckpt"),
    Target("hf_trainer", "libraries/trainer_ddp/ckpt"),
    Target("lightning", "libraries/lit_fsdp_full/ckpt"),
    Target("lightning_fsdp", "libraries/lit_fsdp_sharded/ckpt", given="last.ckpt"),
)
TARGETS = (*ALONE, *_DEEPSPEED, *_TORCH, *_MEGATRON, *_OTHERS)


def seeds(checkpoints: Path | None) -> list[Seed]:
    """Return the checkpoints in the repository, and those that judges made."""
    return [*kept(), *(made(checkpoints) if checkpoints else [])]


def seed_of(target: Target, found: Sequence[Seed]) -> Seed | None:
    """Return the checkpoint of a target, if it exists."""
    held = next((seed for seed in found if seed.name == target.checkpoint), None)
    return replace(held, given=target.given) if held else None


def inputs(target: Target, found: Sequence[Seed], most: int = 60) -> list[bytes]:
    """Return the smallest files, with which a target of single files begins."""
    paths = {seed.place / file for seed in found for file in target.files(seed)}
    return [path.read_bytes() for path in sorted(paths, key=lambda p: (p.stat().st_size, p))[:most]]
