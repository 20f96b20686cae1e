"""The table of DeepSpeed runs: one row is one checkpoint that real DeepSpeed is asked to write.

Rows that cannot exist in DeepSpeed 0.19.8, with the evidence:

* MiCS: removed from the library. ``runtime/config.py`` refuses the key: "MiCS ZeRO-3 sharding has
  been removed; 'zero_optimization.mics_shard_size' is no longer [supported]"; there is neither
  ``deepspeed.zero.MiCS_Init`` nor ``runtime/zero/mics.py``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from tests.judges.device import IS_GPU

Config = dict[str, Any]

ADAMW: Config = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True},
}
WARMUP: Config = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
}
PRECISIONS: dict[str, Config] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}},
}
CLIENT_STATE = {"epoch": 3, "note": "x", "nested": {"a": [1, 2]}}


@dataclass(frozen=True)
class Case:
    """One run. ``slots`` are the names the optimizer gives its per-element state."""

    name: str
    world: int
    config: Config
    kind: str = "train"  # train, moe, moe_refused, trainer, accelerate
    # menagerie, menagerie_{tied,vector,wide,checkpointed,enclosed,repeated,headed}, llama,
    # llama_tied
    model: str = "menagerie"
    groups: str = "one"  # see deepspeed_models.param_groups
    experts: tuple[tuple[int, int], ...] = ()  # (how many, over how many ranks) of each layer
    client_optimizer: str | None = None  # sgd, adamw, counted: made by the caller, not the config
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    steps: int = 3
    zero_init: bool = False
    exclude_frozen: bool = False
    universal: bool = False
    sequence: int = 1  # ranks that share a sequence (Ulysses)
    overflow_at: int | None = None
    nvme: bool = False
    client_state: Config = field(default_factory=dict)


def ds_config(
    stage: int, precision: str, zero: Config | None = None, top: Config | None = None
) -> Config:
    """Return a plain config; small bucket sizes give three buckets even here.

    No clipping at stage 0 in fp32: DeepSpeed's ``clip_grad_norm_`` cannot scale a 0-d gradient
    ("output with shape [] doesn't match the broadcast shape [1]").
    """
    config: Config = {
        "optimizer": copy.deepcopy(ADAMW),
        "gradient_clipping": 0.0 if (stage, precision) == (0, "fp32") else 1.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 30_000,
            **(zero or {}),
        },
        **copy.deepcopy(PRECISIONS[precision]),
        **copy.deepcopy(top or {}),
    }
    if stage == 3:
        config["zero_optimization"].setdefault("stage3_prefetch_bucket_size", 30_000)
    return config


def _grid() -> list[Case]:
    """Return the cases of every stage in every precision at 2 ranks."""
    return [
        Case(f"z{stage}_{precision}", 2, ds_config(stage, precision))
        for stage in range(4)
        for precision in PRECISIONS
    ]


def _worlds() -> list[Case]:
    worlds = [
        (1, 1, "bf16"),
        (1, 3, "fp32"),
        (2, 1, "fp32"),
        (2, 3, "bf16"),
        (2, 4, "bf16"),
    ]
    worlds += [
        (3, 1, "bf16"),
        (3, 3, "fp32"),
        (3, 4, "bf16"),
        (0, 1, "bf16"),
        (1, 4, "fp16"),
    ]
    return [
        Case(f"z{s}_{p}_ws{w}", w, ds_config(s, p), model="menagerie_tied") for s, w, p in worlds
    ]


def _groups() -> list[Case]:
    rows = [
        (s, split, 4 if split == "tiny" else 2) for s in range(4) for split in ("decay", "tiny")
    ]
    rows.append((3, "empty", 2))  # engines of the stages 1 and 2 cannot be made with such a group
    return [
        Case(f"z{s}_groups_{split}", world, ds_config(s, "bf16"), groups=split)
        for s, split, world in rows
    ]


def _stage_1_2() -> list[Case]:
    accumulate_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    robin = {"round_robin_gradients": True}
    offload = {"offload_optimizer": {"device": "cpu"}}
    return [
        Case("bf16opt", 2, ds_config(1, "bf16", top=accumulate_fp32)),
        Case(
            "bf16opt_groups_ws4",
            4,
            ds_config(1, "bf16", top=accumulate_fp32),
            groups="tiny",
        ),
        Case("z2_bf16_accum_fp32", 2, ds_config(2, "bf16", top=accumulate_fp32)),
        Case("z1_round_robin", 2, ds_config(1, "bf16", robin)),
        Case("z2_round_robin", 2, ds_config(2, "bf16", robin)),
        Case("z2_round_robin_groups_ws4", 4, ds_config(2, "fp32", robin), groups="decay"),
        Case("z1_enclosed", 2, ds_config(1, "fp32"), model="menagerie_enclosed"),
        Case("z1_alignment", 2, ds_config(1, "fp32", {"parameter_alignment": True})),
        Case("z2_alignment", 2, ds_config(2, "bf16", {"parameter_alignment": True})),
        Case(
            "z2_alignment_round_robin_ws3",
            3,
            ds_config(2, "bf16", {"parameter_alignment": True, **robin}),
            groups="decay",
        ),
        Case("z1_elastic", 2, ds_config(1, "bf16", {"elastic_checkpoint": True})),
        Case(
            "z2_elastic",
            2,
            ds_config(2, "fp32", {"elastic_checkpoint": True}),
            groups="decay",
        ),
        Case("z1_offload_cpu", 2, ds_config(1, "bf16", offload)),
        Case("z2_offload_cpu", 2, ds_config(2, "fp16", offload)),
    ]


def _stage_3() -> list[Case]:
    cpu = {"device": "cpu"}
    both = {"offload_optimizer": cpu, "offload_param": cpu}
    return [
        Case("z3_subgroups", 2, ds_config(3, "bf16", {"sub_group_size": 3000})),
        Case(
            "z3_subgroups_groups",
            2,
            ds_config(3, "fp32", {"sub_group_size": 3000}),
            groups="tiny",
        ),
        Case("z3_offload_optimizer", 2, ds_config(3, "bf16", {"offload_optimizer": cpu})),
        Case("z3_offload_both", 2, ds_config(3, "bf16", both)),
        Case("z3_hpz_ws4", 4, ds_config(3, "bf16", {"zero_hpz_partition_size": 2})),
        Case("z3_hpz_ws2", 2, ds_config(3, "bf16", {"zero_hpz_partition_size": 2})),
        Case("z3_zero_init", 2, ds_config(3, "bf16"), zero_init=True),
        Case(
            "z3_zero_init_tied_ws4",
            4,
            ds_config(3, "fp32"),
            model="menagerie_tied",
            zero_init=True,
        ),
        Case("z3_enclosed", 2, ds_config(3, "bf16"), model="menagerie_enclosed"),
        Case("z3_repeated", 2, ds_config(3, "bf16"), model="menagerie_repeated"),
        Case("z3_ulysses_ws4", 4, ds_config(3, "bf16"), sequence=2),
        Case(
            "z3_persist_none",
            2,
            ds_config(3, "bf16", {"stage3_param_persistence_threshold": 0}),
        ),
    ]


def _nvme() -> list[Case]:
    """Return the cases that offload to disk.

    The worker fills in the swap folder, or reports the cases as missing without DeepSpeed's aio op.
    DeepSpeed swaps only sub-groups of 1 MiB and more (MIN_AIO_BYTES), which needs a wider model;
    with the small one, everything stays in memory.
    """
    optimizer = {"offload_optimizer": {"device": "nvme"}, "sub_group_size": 300_000}
    both = {**optimizer, "offload_param": {"device": "nvme"}}
    return [
        Case("z3_nvme_unswapped", 2, ds_config(3, "bf16", optimizer), nvme=True),
        Case(
            "z3_nvme_optimizer",
            2,
            ds_config(3, "bf16", optimizer),
            model="menagerie_wide",
            nvme=True,
        ),
        Case("z3_nvme_both", 2, ds_config(3, "bf16", both), model="menagerie_wide", nvme=True),
    ]


def _train_state() -> list[Case]:
    """Return cases of schedulers, accumulation, scalers, client state and other optimizers."""
    full = {"scheduler": WARMUP, "gradient_accumulation_steps": 2}
    sgd = {
        "optimizer": None,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    adagrad = {"optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}}
    amsgrad = {"optimizer": {"type": "AdamW", "params": {**ADAMW["params"], "amsgrad": True}}}
    untested = {"zero_allow_untested_optimizer": True}
    non_zip = {"checkpoint": {"checkpoint_serialization": False}}
    static = {"fp16": {"enabled": True, "loss_scale": 128}}
    momentum = ("momentum_buffer",)
    kept: Config = {"client_state": CLIENT_STATE}
    return [
        Case("z1_full", 2, ds_config(1, "bf16", top=full), groups="decay", **kept),
        Case("z3_full", 2, ds_config(3, "bf16", top=full), groups="decay", **kept),
        Case("z0_full", 2, ds_config(0, "fp32", top=full), groups="decay", **kept),
        Case("z0_fp16_overflow", 2, ds_config(0, "fp16"), steps=4, overflow_at=1),
        Case(
            "z2_fp16_overflow",
            2,
            ds_config(2, "fp16", top=full),
            steps=4,
            overflow_at=1,
            **kept,
        ),
        Case(
            "z3_fp16_overflow",
            2,
            ds_config(3, "fp16", top=full),
            steps=4,
            overflow_at=1,
        ),
        Case("z2_fp16_static", 2, ds_config(2, "fp16", top=static)),
        *(
            Case(
                f"z{s}_sgd",
                2,
                ds_config(s, "bf16", top=sgd),
                client_optimizer="sgd",
                slots=momentum,
            )
            for s in range(4)
        ),
        Case(
            "z1_adagrad",
            2,
            ds_config(1, "bf16", top={**adagrad, **untested}),
            slots=("sum",),
        ),
        Case(
            "z2_amsgrad",
            2,
            ds_config(2, "bf16", top=amsgrad),
            slots=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        ),
        *(
            Case(f"z{s}_exclude_frozen", 2, ds_config(s, "bf16"), exclude_frozen=True)
            for s in (1, 2, 3)
        ),
        *(Case(f"z{s}_non_zip", 2, ds_config(s, "bf16", top=non_zip)) for s in range(4)),
    ]


def _hugging_face() -> list[Case]:
    """Return the cases of pure transformers models: transformers must load the merged directory."""
    return [
        Case("hf_z2_tied", 2, ds_config(2, "bf16"), model="llama_tied"),
        Case("hf_z2", 2, ds_config(2, "bf16"), model="llama"),
        Case("hf_z3_tied", 2, ds_config(3, "bf16"), model="llama_tied"),
        Case("hf_z3", 2, ds_config(3, "bf16"), model="llama", zero_init=True),
        Case("hf_z1_fp32_tied", 2, ds_config(1, "fp32"), model="llama_tied"),
        Case("hf_z0_tied", 1, ds_config(0, "bf16"), model="llama_tied"),
    ]


def _user_configs() -> list[Case]:
    """Return cases of users' configs; Trainer and accelerate fill in their ``auto`` values."""
    zero2_bf16 = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": False,
            "reduce_bucket_size": 5e5,
            "sub_group_size": 5e5,
        },
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
    }
    auto_fp16 = {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
                "adam_w_mode": True,
            },
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    stage2 = {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    }
    stage3 = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    }
    zero2 = {**auto_fp16, "zero_optimization": stage2}
    zero3 = {**auto_fp16, "zero_optimization": stage3}
    return [
        Case("user_zero2_bf16", 2, zero2_bf16, client_optimizer="adamw", groups="decay"),
        Case("trainer_zero2_fp16", 2, zero2, kind="trainer", model="llama_tied"),
        Case("trainer_zero3_offload_fp16", 2, zero3, kind="trainer", model="llama"),
        Case("accelerate_zero2_bf16", 2, zero2_bf16, kind="accelerate", model="llama"),
        Case(
            "accelerate_zero3_bf16",
            2,
            ds_config(3, "bf16"),
            kind="accelerate",
            model="llama_tied",
        ),
    ]


def _experts() -> list[Case]:
    """Return the cases of experts in files of their own, whose numbers may differ by layer.

    Without ZeRO reshard refuses such a run: no file states how many experts each layer has.
    """
    data_first = {"use_data_before_expert_parallelism": True}
    accumulate_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    robin = {"round_robin_gradients": True}
    alike, sizes = ((4, 2), (2, 2)), ((4, 4), (4, 2), (2, 1))
    rows = [
        Case("moe_z0", 2, ds_config(0, "fp32"), experts=alike),
        Case("moe_z0_bf16_ws4", 4, ds_config(0, "bf16"), experts=alike),
        Case("moe_z1_ws4", 4, ds_config(1, "fp32"), experts=alike),
        Case("moe_z1_sizes", 4, ds_config(1, "bf16"), experts=sizes, groups="decay"),
        Case("moe_z1_ep1", 2, ds_config(1, "fp32"), experts=((4, 1), (2, 1))),
        Case("moe_z2", 2, ds_config(2, "bf16"), experts=alike),
        Case("moe_z2_turns", 4, ds_config(2, "bf16", robin, top=data_first), experts=alike),
        Case("moe_bf16opt", 4, ds_config(1, "bf16", top=accumulate_fp32), experts=alike),
    ]
    refused = Case("moe_z0_sizes", 4, ds_config(0, "fp32"), kind="moe_refused", experts=sizes)
    return [*(replace(row, kind="moe") for row in rows), refused]


def _differently_named() -> list[Case]:
    """Return the cases whose names differ in ``state_dict`` and ``named_parameters``."""
    wrapped = [
        Case(f"z{stage}_checkpointed", 2, ds_config(stage, "bf16"), model="menagerie_checkpointed")
        for stage in (2, 3)
    ]
    return wrapped + [
        Case(f"z{stage}_headed", 2, ds_config(stage, "bf16"), model="menagerie_headed")
        for stage in (0, 1, 3)
    ]


def _universal() -> list[Case]:
    """Return cases that DeepSpeed's own ds_to_universal also converts, into ``universal``.

    Stages 1 and 2 lack the 0-d parameter, on which the converter fails ("RuntimeError:
    zero-dimensional tensor (at position 0) cannot be concatenated").
    """
    rows = [
        Case("universal_z1", 2, ds_config(1, "bf16"), model="menagerie_vector", groups="decay"),
        Case(
            "universal_z2",
            2,
            ds_config(2, "fp32", top={"optimizer": None, "zero_allow_untested_optimizer": True}),
            model="menagerie_vector",
            client_optimizer="counted",
        ),
        Case("universal_z3", 2, ds_config(3, "bf16")),
        Case(
            "universal_bf16opt",
            2,
            ds_config(1, "bf16", top={"data_types": {"grad_accum_dtype": "fp32"}}),
            model="menagerie_vector",
        ),
    ]
    return [replace(row, universal=True) for row in rows]


def _fused() -> list[Case]:
    """Return cases of FusedAdam and CPUAdam, which are compiled, for machines with a GPU."""
    fused = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}}
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    rows = [(stage, precision) for stage in (1, 2, 3) for precision in ("bf16", "fp16")]
    return [
        *(Case(f"z{s}_{p}_fused", 2, ds_config(s, p, top=fused), groups="decay") for s, p in rows),
        *(Case(f"z{s}_bf16_fused_ws1", 1, ds_config(s, "bf16", top=fused)) for s in (1, 2, 3)),
        *(Case(f"z{s}_cpu_adam", 2, ds_config(s, "bf16", offload, top=fused)) for s in (2, 3)),
    ]


CASES: dict[str, Case] = {
    case.name: case
    for rows in (
        _grid(),
        _worlds(),
        _groups(),
        _stage_1_2(),
        _stage_3(),
        _nvme(),
        _train_state(),
        _hugging_face(),
        _user_configs(),
        _experts(),
        _differently_named(),
        _universal(),
        _fused() if IS_GPU else (),
    )
    for case in rows
}
