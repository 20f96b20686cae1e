"""Save and load as megatron/training/checkpointing.py does (Megatron-LM core_v0.16.1).

The package holds ``megatron.core`` without ``megatron.training``: what its ``save_checkpoint``,
``generate_state_dict`` and ``load_checkpoint`` do around Megatron-core's own state dicts is here.
"""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend

from tests.judges.megatron_cases import FAMILIES, MULTIPLE, SEQUENCE, SHARDING, Case
from tests.judges.megatron_data import SAMPLES, choose_micro_batch
from tests.judges.megatron_models import COMMON, DTYPES, SEED
from tests.judges.megatron_run import DECAY, LR, Run
from tests.support.megatron.core import TRACKER, find_rank_directory, load_legacy


def save(run: Run, place: Path, form: str, *, no_save_optim: bool = False) -> None:
    """Do what ``save_checkpoint`` does; every rank must call it."""
    args = namespace(run.case, "torch" if form == "torch" else "torch_dist")
    args.consumed_train_samples = run.step * SAMPLES
    args.no_save_optim = no_save_optim or None
    base = place / f"iter_{run.step:07d}"
    base.mkdir(parents=True, exist_ok=True)
    if form == "torch":
        _save_legacy(run, args, base)
    else:
        _save_dist(run, args, base, form)
    dist.barrier()
    if dist.get_rank() == 0:
        (place / TRACKER).write_text(str(run.step))
    dist.barrier()


@torch.no_grad()
def load(run: Run, place: Path, form: str) -> None:
    """Do what ``load_checkpoint`` does, strictly; every rank must call it.

    Without gradients, as Megatron-core 0.16.1 copies into views of parameters when a distributed
    optimizer of a float32 model is loaded, which autograd refuses.
    """
    base = place / f"iter_{int((place / TRACKER).read_text()):07d}"
    state = load_legacy(base) if form == "torch" else _load_dist(run, base)
    for i, chunk in enumerate(run.chunks):
        chunk.load_state_dict(state["model" if len(run.chunks) == 1 else f"model{i}"], strict=True)
    run.optimizer.load_state_dict(state["optimizer"])
    if form == "torch" and run.case.distributed:
        run.optimizer.load_parameter_state(str(find_rank_directory(base) / "distrib_optim.pt"))
    run.scheduler.load_state_dict(state["opt_param_scheduler"])
    run.step = state["iteration"]
    if run.case.rng:
        _set_random(state["rng_state"][0])


def _save_legacy(run: Run, args: Namespace, base: Path) -> None:
    place = find_rank_directory(base)
    place.mkdir(exist_ok=True)
    if run.case.distributed and not args.no_save_optim:
        run.optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    # Before core_v0.18.0 only ranks of the second kind: fewer files if TP exceeds EP x ETP.
    if mpu.get_data_parallel_rank() == 0 or mpu.get_expert_data_parallel_rank() == 0:
        torch.save(_state(run, args, None), place / "model_optim_rng.pt")


def _save_dist(run: Run, args: Namespace, base: Path, form: str) -> None:
    """Save with ``--ckpt-fully-parallel-save``, which is the default."""
    metadata = _metadata(run, SHARDING[form])
    strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1)
    if form != "torch_dist_gather_scatter":
        data_parallel = mpu.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(strategy, data_parallel)
    kept = {k: v for k, v in metadata.items() if k != "dp_cp_group"}
    state = _state(run, args, metadata)
    dist_checkpointing.save(state, str(base), strategy, content_metadata=kept)


def _load_dist(run: Run, base: Path) -> dict[str, Any]:
    common = dist_checkpointing.load_common_state_dict(str(base))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    wanted = _state(run, None, metadata, is_loading=True)
    strategy = get_default_load_sharded_strategy(str(base))
    return dist_checkpointing.load(wanted, str(base), strategy)


def _metadata(run: Run, sharding: str) -> dict[str, Any]:
    """Return what ``_build_sharded_state_dict_metadata`` returns."""
    told = {"distrib_optim_sharding_type": sharding} if run.case.distributed else {}
    if told and sharding == "fully_reshardable":
        told["distrib_optim_fully_reshardable_mem_efficient"] = False
    return told | {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _state(
    run: Run, args: Namespace | None, metadata: dict[str, Any] | None, *, is_loading: bool = False
) -> dict[str, Any]:
    """Return what ``generate_state_dict`` does: sharded with ``metadata``, else this rank's own."""
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": run.step}
    for i, model in enumerate(run.models()):
        key = "model" if len(run.chunks) == 1 else f"model{i}"
        state[key] = (
            model.state_dict_for_save_checkpoint()
            if metadata is None
            else model.sharded_state_dict(metadata=metadata)
        )
    if args is None or not args.no_save_optim:
        state["optimizer"] = (
            run.optimizer.state_dict()
            if metadata is None
            else run.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        )
        state["opt_param_scheduler"] = run.scheduler.state_dict()
    if not is_loading or run.case.rng:
        state["rng_state"] = random_states(sharded=metadata is not None)
    state["num_floating_point_operations_so_far"] = 0
    return state


def _set_random(state: dict[str, Any]) -> None:
    """Restore the random states, as ``load_checkpoint`` does without ``--no-load-rng``."""
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])  # noqa: NPY002 - the state that Megatron saves
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    if not state["rng_tracker_states"]:
        raise KeyError("rng_tracker_states")
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def random_states(*, sharded: bool = False) -> Any:
    """Return what ``get_rng_state`` returns."""
    found = [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the state that Megatron saves
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
    ]
    if not sharded:
        return found
    sizes = (mpu.get_pipeline_model_parallel_world_size(),)
    sizes += (mpu.get_tensor_model_parallel_world_size(),)
    ranks = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    replica = mpu.get_data_parallel_rank(with_context_parallel=True)
    if mpu.get_expert_model_parallel_world_size() > 1:
        sizes += (mpu.get_data_parallel_world_size(with_context_parallel=True),)
        return ShardedObject("rng_state", found, sizes, (*ranks, replica), replica_id=0)
    return ShardedObject("rng_state", found, sizes, ranks, replica_id=replica)


def namespace(case: Case, ckpt_format: str) -> Namespace:
    """Return what ``parse_args`` and ``validate_args`` make of these settings."""
    family, grid = COMMON | FAMILIES[case.family], case.grid
    heads, experts = family["num_attention_heads"], family.get("num_moe_experts")
    queries, layers = family["num_query_groups"], family["num_layers"]
    return Namespace(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp,
        num_layers_per_virtual_pipeline_stage=layers // grid.pp // grid.vpp if grid.vpp else None,
        num_virtual_stages_per_pipeline_rank=None,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp or grid.tp,
        context_parallel_size=1,
        sequence_parallel=grid.sp,
        data_parallel_size=grid.dp,
        world_size=grid.world,
        transformer_pipeline_model_parallel_size=grid.pp,
        decoder_first_pipeline_num_layers=grid.first,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=grid.layout,
        num_layers=layers,
        encoder_num_layers=layers,
        mtp_num_layers=family.get("mtp_num_layers"),
        hidden_size=family["hidden_size"],
        ffn_hidden_size=family["ffn_hidden_size"],
        num_attention_heads=heads,
        kv_channels=family.get("kv_channels", family["hidden_size"] // heads),
        group_query_attention=queries != heads,
        num_query_groups=queries if queries != heads else 1,
        multi_latent_attention="latent" in family,
        swiglu=family["gated_linear_unit"],
        squared_relu=False,
        normalization=family["normalization"],
        layernorm_epsilon=1e-5,
        layernorm_zero_centered_gamma=False,
        add_bias_linear=family["add_bias_linear"],
        add_qkv_bias=family.get("add_qkv_bias", False),
        qk_layernorm=family.get("qk_layernorm", False),
        apply_query_key_layer_scaling=False,
        position_embedding_type=family["position_embedding_type"],
        add_position_embedding=True,
        max_position_embeddings=SEQUENCE,
        seq_length=SEQUENCE,
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=False,
        untie_embeddings_and_output_weights=not family["tied"],
        vocab_size=case.vocabulary,
        padded_vocab_size=case.padded_vocabulary,
        make_vocab_size_divisible_by=MULTIPLE,
        tokenizer_type="NullTokenizer",
        num_experts=experts,
        moe_layer_freq=family.get("moe_layer_freq", 1),
        moe_router_topk=family.get("moe_router_topk", 2),
        moe_ffn_hidden_size=family.get("moe_ffn_hidden_size", family["ffn_hidden_size"])
        if experts
        else None,
        moe_shared_expert_intermediate_size=family.get("moe_shared_expert_intermediate_size"),
        moe_latent_size=family.get("moe_latent_size"),
        moe_grouped_gemm=family.get("moe_grouped_gemm", False),
        moe_use_legacy_grouped_gemm=family.get("moe_use_legacy_grouped_gemm", False),
        moe_token_dispatcher_type="allgather",
        transformer_impl="transformer_engine" if family.get("fused") else "local",
        attention_backend=AttnBackend.unfused,
        model_type=ModelType.encoder_or_decoder,
        params_dtype=DTYPES[case.precision],
        fp16=case.precision == "fp16",
        bf16=case.precision == "bf16",
        accumulate_allreduce_grads_in_fp32=case.reduces_in_fp32,
        grad_reduce_in_bf16=case.reduce_in_bf16,
        use_distributed_optimizer=case.distributed,
        use_precision_aware_optimizer=case.precision_aware,
        main_params_dtype=DTYPES["fp32"],
        exp_avg_dtype=DTYPES["fp32"],
        exp_avg_sq_dtype=DTYPES["fp32"],
        overlap_grad_reduce=case.bucket is not None,
        ddp_bucket_size=case.bucket,
        optimizer="adam",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        lr=LR,
        min_lr=0.0,
        lr_decay_style="linear",
        weight_decay=DECAY,
        clip_grad=1.0,
        seed=SEED,
        micro_batch_size=choose_micro_batch(case),
        global_batch_size=SAMPLES,
        use_cpu_initialization=True,
        distributed_backend="gloo",
        ckpt_format=ckpt_format,
        use_dist_ckpt=ckpt_format == "torch_dist",
        ckpt_fully_parallel_save=True,
        no_save_optim=None,
        no_save_rng=None,
        **family.get("yarn", {}),
        **family.get("latent", {}),
    )
