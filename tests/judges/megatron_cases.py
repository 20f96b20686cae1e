"""The table of Megatron-core runs: one row is one training run and every form it is saved in.

Forms are directories beside each other, each with ``latest_checkpointed_iteration.txt``:

    torch                           a file a model-parallel rank (``--ckpt-format torch``)
    torch_dist                      ``dist_checkpointing``; the optimizer as Megatron saves it by
                                    default: dp_reshardable if distributed
    torch_dist_fully_reshardable    the other forms of a distributed optimizer
    torch_dist_gather_scatter
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STEPS = 3  # trained before the checkpoint is written
LATER = 2  # trained after it: what a run that goes on from it must repeat
SEQUENCE = 16
VOCABULARY = 96
MULTIPLE = 8  # --make-vocab-size-divisible-by
SHARDING = {
    "torch_dist": "dp_reshardable",
    "torch_dist_fully_reshardable": "fully_reshardable",
    "torch_dist_gather_scatter": "dp_zero_gather_scatter",
}
"""Form -> the distributed optimizer's ``distrib_optim_sharding_type``."""

LLAMA = {
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "tied": False,
}
GPT2: dict[str, Any] = {
    "num_query_groups": 4,
    "ffn_hidden_size": 64,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "tied": True,
}
YARN: dict[str, Any] = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
    "yarn_beta_fast": 1.5,
    "yarn_beta_slow": 0.2,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
LATENT: dict[str, Any] = LLAMA | {
    "num_query_groups": 4,
    "kv_channels": 12,  # v_head_dim, which DotProductAttention takes it for
    "qk_layernorm": True,
    "latent": {
        "q_lora_rank": 16,
        "kv_lora_rank": 20,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 12,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    },
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_mtp": LLAMA | {"mtp_num_layers": 1, "normalization": "LayerNorm"},
    "llama_fused": LLAMA | {"fused": True},
    "gpt2": GPT2,
    "gpt2_fused": GPT2 | {"fused": True},
    "qwen2": LLAMA | {"num_query_groups": 4, "num_attention_heads": 8, "add_qkv_bias": True},
    "qwen3": LLAMA | {"kv_channels": 16, "qk_layernorm": True, "tied": True},
    "llama_yarn": LLAMA | {"position_embedding_type": "yarn", "yarn": YARN},
    "llama_yarn_scaled": LLAMA
    | {
        "position_embedding_type": "yarn",
        "yarn": YARN
        | {
            "yarn_mscale": 0.7,
            "yarn_mscale_all_dim": 0.3,
            "yarn_correction_range_round_to_int": False,
        },
    },
    "latent": LATENT,
    "latent_fused": LATENT | {"fused": True},
    "latent_experts": LATENT | EXPERTS,
    "latent_experts_later": LATENT | EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
    "latent_experts_fused": LATENT | EXPERTS | {"fused": True},
    "mixtral": LLAMA | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01},
    "mixtral_bank": LLAMA
    | {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01, "bank": True},
    "mixtral_grouped": LLAMA
    | {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_grouped_gemm": True,
        "moe_use_legacy_grouped_gemm": True,
    },
    "qwen3_moe": LLAMA
    | {
        "kv_channels": 16,
        "qk_layernorm": True,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",  # transformers' own loss has no such part
        "moe_ffn_hidden_size": 24,
    },
    "moe_latent": LLAMA | EXPERTS | {"moe_latent_size": 16},
    "qwen_moe": LLAMA
    | {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_layer_freq": [0, 1, 1, 1],
    },
}
"""Name -> what differs from ``megatron_models.COMMON``; ``OF_GPT`` there are not config."""


@dataclass(frozen=True)
class Grid:
    """How a model lies over ranks.

    Attributes:
        vpp: model chunks a pipeline rank; None is the plain schedule.
        etp: the experts' tensor-parallel size; None is ``tp``.
        first: ``--decoder-first-pipeline-num-layers``.
        sp: sequence parallel.
        layout: ``--pipeline-model-parallel-layout``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    vpp: int | None = None
    etp: int | None = None
    first: int | None = None
    sp: bool = False
    layout: str | None = None

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        precision: of the model; bf16 and fp16 have fp32 main parameters.
        distributed: ``--use-distributed-optimizer``.
        reduce_in_bf16: ``--grad-reduce-in-bf16``.
        adam: ``fused`` has apex's and Transformer Engine's layout, ``torch`` is AdamW;
            ``precision_aware`` is Transformer Engine's with masters of its own, of which
            ``remainders`` stores the lower 16 bits.
        bucket: ``--ddp-bucket-size``, with ``--overlap-grad-reduce``; None is one bucket.
        vocabulary: before padding.
        forms: also written, see the module.
        start: where a loading run finds its checkpoint; None starts from a seed.
        form: which form that is.
        padded: the padded vocabulary; None is Megatron's rule for the grid.
        expert_part: expert parameters in an optimizer of their own, though experts are not
            parallel: Megatron cannot load a chain of two optimizers into one.
        one_bucket: shared embeddings have no bucket of their own.
        rng: random states are loaded; without, as with --no-load-rng.
        frozen: parts of the names of parameters that are not trained.
    """

    name: str
    family: str
    grid: Grid
    precision: str = "bf16"
    distributed: bool = False
    reduce_in_bf16: bool = False
    adam: str = "fused"
    bucket: int | None = None
    vocabulary: int = VOCABULARY
    forms: tuple[str, ...] = ("torch", "torch_dist")
    start: str | None = None
    form: str = "torch"
    padded: int | None = None
    expert_part: bool = False
    one_bucket: bool = False
    rng: bool = False
    frozen: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.grid.world

    @property
    def reduces_in_fp32(self) -> bool:
        """Return whether gradients are fp32, as ``validate_args`` of Megatron-LM decides."""
        return self.precision == "bf16" and not self.reduce_in_bf16

    @property
    def bucketed(self) -> bool:
        """Return whether a buffer of a distributed optimizer may have more than one bucket.

        Shared embeddings have one of their own (core/distributed/param_and_grad_buffer.py).
        """
        shared = FAMILIES[self.family]["tied"] and self.grid.pp > 1
        return self.distributed and not self.one_bucket and (self.bucket is not None or shared)

    @property
    def precision_aware(self) -> bool:
        """Return whether the run has --use-precision-aware-optimizer."""
        return self.adam in ("precision_aware", "remainders")

    @property
    def canonical(self) -> str:
        """Return the form that Megatron can load on any grid.

        Of remainders, Megatron-core 0.16.1 loads only the form for other numbers of data-parallel
        ranks: the others store them in float32, which Transformer Engine refuses.
        """
        if self.adam == "remainders":
            return "torch_dist"
        return "torch_dist_fully_reshardable" if self.distributed else "torch_dist"

    @property
    def padded_vocabulary(self) -> int:
        """Return the rows of the embedding: a multiple of ``MULTIPLE * tp`` (megatron/training)."""
        step = MULTIPLE * self.grid.tp
        return self.padded or -(-self.vocabulary // step) * step


SHARDED: dict[str, Any] = {
    "distributed": True,
    "forms": ("torch", "torch_dist", "torch_dist_fully_reshardable"),
}
EVERY = SHARDED | {"forms": (*SHARDED["forms"], "torch_dist_gather_scatter")}
BUCKETS = SHARDED | {"bucket": 6000}
_ROWS = [
    Case("llama", "llama", Grid(), "fp32", adam="torch"),
    Case("llama_tp2pp2", "llama", Grid(tp=2, pp=2), "fp32", adam="torch"),
    Case("llama_pp2vpp2", "llama", Grid(pp=2, vpp=2), "fp32"),
    Case("llama_tp2pp2vpp2", "llama", Grid(tp=2, pp=2, vpp=2)),
    Case("llama_uneven", "llama", Grid(pp=3, first=2)),
    Case("llama_vpp_layout", "llama", Grid(pp=2, vpp=2, layout="E|tt|t|tL"), "fp32"),
    Case("llama_mtp_pp4", "llama_mtp", Grid(pp=4, layout="Ett|t|tm|L"), "fp32"),
    Case("llama_mtp_distopt", "llama_mtp", Grid(pp=4, layout="Ett|t|tm|L"), **SHARDED),
    Case("llama_tp4", "llama", Grid(tp=4)),
    Case("llama_odd_tp2", "llama", Grid(tp=2), vocabulary=101),
    Case("llama_distopt_tp2dp2", "llama", Grid(tp=2, dp=2), **EVERY),
    Case("llama_frozen_tp2", "llama", Grid(tp=2), frozen=(".mlp.", "output_layer")),
    Case("llama_frozen_tp2dp2", "llama", Grid(tp=2, dp=2), **SHARDED, frozen=(".mlp.",)),
    # What is frozen has fewer elements than the gaps between the parameters in a buffer.
    Case(
        "latent_frozen_ep2dp2",
        "latent_experts",
        Grid(dp=2, ep=2),
        **SHARDED,
        vocabulary=8,
        frozen=("embedding",),
    ),
    Case(
        "latent_tp2pp2vpp2ep2_etp1",
        "latent_experts_later",
        Grid(tp=2, pp=2, vpp=2, ep=2, etp=1, sp=True),
    ),
    Case("llama_remainders_dp2", "llama", Grid(dp=2), **SHARDED, adam="remainders"),
    Case("llama_bf16_grads_dp2", "llama", Grid(dp=2), **SHARDED, reduce_in_bf16=True),
    Case("llama_fp16_distopt_dp2", "llama", Grid(dp=2), "fp16", **SHARDED),
    Case("llama_buckets_dp2", "llama", Grid(dp=2), **BUCKETS),
    Case("llama_fp32_distopt_pp2dp2", "llama", Grid(pp=2, dp=2), "fp32", **SHARDED),
    Case("llama_fp16_tp2", "llama", Grid(tp=2), "fp16"),
    Case("gpt2_tp2pp2", "gpt2", Grid(tp=2, pp=2)),
    Case("gpt2_tp2", "gpt2", Grid(tp=2), "fp32", vocabulary=90),
    Case("gpt2_buckets_pp2dp2", "gpt2", Grid(pp=2, dp=2), **BUCKETS),
    Case("gpt2_vpp_distopt", "gpt2", Grid(pp=2, vpp=2, dp=2), **BUCKETS),
    Case("llama_fused_tp2pp2", "llama_fused", Grid(tp=2, pp=2)),
    Case("gpt2_fused_distopt_tp2dp2", "gpt2_fused", Grid(tp=2, dp=2), **SHARDED),
    Case("qwen2_tp4_sp", "qwen2", Grid(tp=4, sp=True)),
    Case("qwen3_tp2pp2", "qwen3", Grid(tp=2, pp=2), "fp32"),
    Case("mixtral", "mixtral", Grid()),
    Case("mixtral_tp2_sp", "mixtral", Grid(tp=2, sp=True), "fp32"),
    Case("mixtral_ep2", "mixtral", Grid(dp=2, ep=2), "fp32"),
    Case("mixtral_tp2ep2_sp", "mixtral", Grid(tp=2, dp=2, ep=2, sp=True)),
    Case("mixtral_pp2ep2", "mixtral", Grid(pp=2, dp=2, ep=2)),
    Case("mixtral_tp2ep4_etp1", "mixtral", Grid(tp=2, dp=2, ep=4, etp=1, sp=True), "fp32"),
    Case("mixtral_distopt_tp4ep2_etp1", "mixtral", Grid(tp=4, ep=2, etp=1, sp=True), **SHARDED),
    Case("mixtral_distopt_ep2dp4", "mixtral", Grid(dp=4, ep=2), **SHARDED),
    Case("mixtral_grouped_ep2", "mixtral_grouped", Grid(dp=2, ep=2)),
    Case("mixtral_grouped_tp2", "mixtral_grouped", Grid(tp=2, sp=True)),
    Case("mixtral_grouped_frozen", "mixtral_grouped", Grid(), frozen=(".experts.",)),
    Case(
        "mixtral_grouped_distopt_ep2dp2",
        "mixtral_grouped",
        Grid(dp=2, ep=2),
        **EVERY,
        frozen=("self_attention",),
    ),
    Case("moe_latent_tp2ep2", "moe_latent", Grid(tp=2, dp=2, ep=2, sp=True), "fp32"),
    Case("qwen_moe_ep2", "qwen_moe", Grid(dp=2, ep=2)),
    Case("qwen3_moe_tp2ep2", "qwen3_moe", Grid(tp=2, dp=2, ep=2, sp=True), "fp32", adam="torch"),
]
CASES = {case.name: case for case in _ROWS}
