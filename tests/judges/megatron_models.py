"""Tiny GPT models of Megatron-core with their data, on an initialized grid of ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP

from tests.judges.megatron_cases import FAMILIES, SEQUENCE
from tests.support.megatron import fused
from tests.support.megatron.core import LatentCore

if TYPE_CHECKING:
    from tests.judges.megatron_cases import Case, Grid

COMMON = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "moe_token_dispatcher_type": "allgather",
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEED = 1234
OF_GPT = ("position_embedding_type", "tied", "fused", "bank", "yarn", "latent")


def lay_grid(grid: Grid) -> None:
    """Initialise Megatron's process groups and its random states."""
    mpu.initialize_model_parallel(
        grid.tp,
        grid.pp,
        grid.vpp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        get_embedding_ranks=partial(_list_embedding_ranks, grid) if grid.layout else None,
    )
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)


def _list_embedding_ranks(grid: Grid, ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline with a copy of the embedding (Megatron-LM's pretrain_gpt)."""
    stages = (grid.layout or "").split("|")
    last = next((at for at, stage in enumerate(stages) if "m" in stage), len(stages) - 1)
    return sorted({ranks[0], ranks[last % len(ranks)]})


def config_of(case: Case) -> TransformerConfig:
    """Return the config that ``core_transformer_config_from_args`` makes."""
    told = COMMON | {k: v for k, v in FAMILIES[case.family].items() if k not in OF_GPT}
    told["activation_func"] = getattr(torch.nn.functional, told["activation_func"])
    grid = case.grid
    latent = FAMILIES[case.family].get("latent")
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **told,
        **latent or {},
        params_dtype=DTYPES[case.precision],
        pipeline_dtype=DTYPES[case.precision],
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        num_layers_in_first_pipeline_stage=grid.first,
        pipeline_model_parallel_layout=grid.layout,
        sequence_parallel=grid.sp,
    )
    for name, value in FAMILIES[case.family].get("yarn", {}).items():
        setattr(config, name, value)  # no field of the class: GPTModel reads them by getattr
    return config


def build(case: Case, config: TransformerConfig) -> list[Any]:
    """Return this rank's chunks, wrapped as training wraps them (megatron/training/training.py)."""
    chunks = [_gpt(case, config, stage) for stage in range(case.grid.vpp or 1)]
    if case.expert_part:
        for name, param in chunks[0].named_parameters():
            param.allreduce = ".experts." not in name
    for param in [p for chunk in chunks for p in chunk.parameters()] if case.one_bucket else []:
        param.shared_embedding = False
    told = DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.reduces_in_fp32,
        overlap_grad_reduce=case.bucket is not None,
        use_distributed_optimizer=case.distributed,
        bucket_size=case.bucket,
    )
    if case.precision != "fp32":
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [
        DistributedDataParallel(config, told, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]


def _gpt(case: Case, config: TransformerConfig, stage: int) -> GPTModel:
    family = FAMILIES[case.family]
    chunk = stage if case.grid.vpp else None
    if family.get("fused"):
        spec = fused.make_layer_spec(config)
        layers = [spec]
    elif config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=config.normalization,
            vp_stage=chunk,
        )
        layers = spec.layer_specs
        for layer in layers if family.get("bank") else []:
            layer.submodules.mlp.submodules.experts.module = Bank
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
            multi_latent_attention=config.multi_latent_attention,
        )
        layers = [spec]
    if config.moe_latent_size:
        moe_layer.HAVE_TE, moe_layer.TELinear = True, fused.WholeLinear
    if config.multi_latent_attention:
        multi_latent_attention.HAVE_TE = False  # 0.16.1 has it True without the package
        core = StatefulLatentCore if family.get("fused") else LatentCore
        for layer in layers:
            layer.submodules.self_attention.submodules.core_attention = core
    mtp = get_gpt_mtp_block_spec(config, spec, False, chunk) if config.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        mtp_block_spec=mtp,
        vocab_size=case.padded_vocabulary,
        max_sequence_length=SEQUENCE,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=family["tied"],
        position_embedding_type=family["position_embedding_type"],
        vp_stage=chunk,
    )
    model.model_type = ModelType.encoder_or_decoder
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in case.frozen))
    return model


class StatefulLatentCore(fused.Whole, LatentCore):
    """The same with a state of its own, as Transformer Engine's attention has one."""


class Bank(SequentialMLP):
    """Experts under a name of a fork's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._modules["bank"] = self._modules.pop("local_experts")

    @property
    def local_experts(self) -> Any:
        """Return the experts, under the base class's name for them."""
        return self._modules.get("bank", self._modules.get("local_experts"))

    def sharded_state_dict(self, *args: Any, **options: Any) -> Any:
        """Return what the base class makes, under this module's names."""
        found = super().sharded_state_dict(*args, **options)
        return {key.replace(".local_experts.", ".bank."): each for key, each in found.items()}


def unwrapped(chunks: list[Any]) -> list[GPTModel]:
    """Return the models themselves."""
    found = []
    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        found.append(model)
    return found


def forward_step(iterator: Any, model: Any, found: list[torch.Tensor] | None) -> Any:
    """Pass a microbatch through a stage; return its loss, as the schedules require it."""
    tokens = next(iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).expand_as(inputs)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    return model(inputs, positions, mask, labels=labels), partial(_loss, found)


def _loss(found: list[torch.Tensor] | None, losses: torch.Tensor) -> Any:
    if found is not None:
        found.append(losses.detach().float())  # (samples, SEQUENCE)
    return losses.float().mean(), {"loss": losses.detach().float().mean()}
