"""Build Megatron-core's own model from a command line of Megatron-LM, and load a checkpoint.

This module repeats what Megatron-LM core_v0.16.1 does between a command line and a model
(``training/arguments.py`` ``core_transformer_config_from_args``, ``gpt_builders.py``), because the
package contains ``megatron.core`` without ``megatron.training``. Only kernels that need a GPU are
switched off.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core.optimizer as mcore_optimizer
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from tests.support.megatron import delta, hybrid

ON_CPU = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "sequence_parallel": False,
    "moe_token_dispatcher_type": "allgather",
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
}
TRACKER = "latest_checkpointed_iteration.txt"
YARN = "yarn_"  # prefix of settings that Megatron reads by getattr: the class has no such fields


# Options that ``training/arguments.py`` does not make of the fields of TransformerConfig, with the
# types of their values. None: a switch.
_OPTIONS: dict[str, Callable[[str], Any] | None] = {
    **dict.fromkeys(
        """
        load ckpt-format position-embedding-type rope-type pipeline-model-parallel-layout
        """.split(),
        str,
    ),
    **dict.fromkeys(
        """
        padded-vocab-size max-position-embeddings rotary-base rotary-seq-len-interpolation-factor
        num-experts decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        num-layers-per-virtual-pipeline-stage q-lora-rank kv-lora-rank qk-head-dim
        qk-pos-emb-head-dim v-head-dim
        """.split(),
        int,
    ),
    **dict.fromkeys(
        """
        rotary-percent rope-scaling-factor rotary-scaling-factor mscale mscale-all-dim
        """.split(),
        float,
    ),
    **dict.fromkeys(
        """
        group-query-attention use-rope-scaling swiglu squared-relu quick-geglu
        untie-embeddings-and-output-weights use-distributed-optimizer bf16 fp16 no-load-rng
        """.split()
    ),
    "window-size": lambda text: tuple(map(int, text.split(","))),
    "hybrid-override-pattern": str,
    "moe-aux-loss-coeff": float,
    **dict.fromkeys(
        ("window-attn-skip-freq", "no-rope-freq", "moe-layer-freq", "linear-attention-freq"),
        json.loads,
    ),
}
_DEFAULTS = {
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rope_scaling_factor": 8.0,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "position_embedding_type": "learned_absolute",
    "bias_gelu_fusion": True,
    "moe_layer_freq": 1,
}


# Fields of TransformerConfig that get no option.
_NO_OPTIONS = """
gated_linear_unit activation_func bias_activation_fusion softmax_scale num_moe_experts
heterogeneous_block_specs hetereogenous_dist_checkpoint num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage virtual_pipeline_model_parallel_size
""".split()


def parse_line(line: str) -> Namespace:
    """Return the arguments of a command line, as Megatron-LM parses it.

    ``training/argument_utils.py`` (``ArgumentGroupFactory``) makes most options of the fields of
    Megatron-core's own class.

    Raises:
        ValueError: Megatron-LM has no such option.
    """
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for field in dataclasses.fields(TransformerConfig):
        _add_field(parser, field)
    for name, kind in _OPTIONS.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is None else {"type": kind}
        parser.add_argument(f"--{name}", **how)
    parser.add_argument("--no-bias-gelu-fusion", action="store_false", dest="bias_gelu_fusion")
    parser.add_argument("--spec", nargs=2)
    parser.set_defaults(**_DEFAULTS)
    _, *words = shlex.split(line)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(f"Megatron-LM has no option {unknown[0]}")
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    return args


def _add_field(parser: ArgumentParser, field: dataclasses.Field[Any]) -> None:
    """Add the option of a field, or only its default value."""
    kind: Any = field.type
    while typing.get_args(kind):  # of Optional, Union and Literal the first
        kind = typing.get_args(kind)[0]
    kind = kind if isinstance(kind, type) else type(kind)
    name = field.name.replace("_", "-")
    if name in _OPTIONS or field.default is dataclasses.MISSING:
        return
    if field.name in _NO_OPTIONS or kind not in (bool, int, float, str):
        parser.set_defaults(**{field.name: field.default})
        return
    is_on = field.default is True
    meta = {"arg_names": [f"--no-{name}", f"--disable-{name}"] if is_on else [f"--{name}"]}
    meta |= {"default": field.default, **field.metadata.get("argparse_meta", {})}
    how: dict[str, Any] = {"type": kind}
    if kind is bool:
        how = {"action": "store_false" if is_on else "store_true"}
    parser.add_argument(*meta["arg_names"], dest=field.name, default=meta["default"], **how)


def _is_dist(base: Path) -> bool:
    return (base / "common.pt").exists()


def _find_iteration(place: Path) -> Path:
    name = (place / TRACKER).read_text().strip()
    return place / (name if name == "release" else f"iter_{int(name):07d}")


def create_groups(args: Namespace) -> None:
    """Create Megatron's process groups."""
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)


def make_config(args: Namespace) -> TransformerConfig:
    """Return the config that ``core_transformer_config_from_args`` makes from the arguments."""
    stated = vars(args)
    kind = MLATransformerConfig if stated.get("multi_latent_attention") else TransformerConfig
    values = {f.name: stated[f.name] for f in dataclasses.fields(kind) if f.name in stated}
    values["num_moe_experts"] = stated.get("num_experts")
    values["num_layers_in_first_pipeline_stage"] = stated.get("decoder_first_pipeline_num_layers")
    values["num_layers_in_last_pipeline_stage"] = stated.get("decoder_last_pipeline_num_layers")
    values["bias_activation_fusion"] = stated.get("bias_gelu_fusion", True)
    if stated.get("swiglu"):
        values |= {"activation_func": F.silu, "gated_linear_unit": True}
        values["bias_activation_fusion"] = stated.get("bias_swiglu_fusion", True)
    if stated.get("squared_relu"):
        values["activation_func"] = squared_relu
    elif stated.get("quick_geglu"):
        values |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    values["num_query_groups"] = (
        args.num_query_groups if stated.get("group_query_attention") else None
    )
    # Megatron-core's own modules for grouped experts do not work without Transformer Engine.
    values["moe_grouped_gemm"] = args.transformer_impl == "transformer_engine"
    config = kind(**values | ON_CPU)
    for name in stated:
        if name.startswith(YARN):
            setattr(config, name, stated[name])
    return config


def build(args: Namespace) -> GPTModel:
    """Build this rank's stage like ``gpt_builder`` with ``--transformer-impl local``."""
    config, stated = make_config(args), vars(args)
    common = {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": mpu.is_pipeline_first_stage(),
        "post_process": mpu.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
    }
    if stated.get("hybrid_override_pattern"):
        return hybrid.build(args, config, **common)
    if stated.get("experimental_attention_variant"):
        spec = delta.make_layer_spec(config)
    elif args.num_experts:
        spec = get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=args.normalization,
            qk_l2_norm=stated.get("qk_l2_norm", False),
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=args.normalization,
            qk_l2_norm=stated.get("qk_l2_norm", False),
        )
    if config.multi_latent_attention:
        multi_latent_attention.HAVE_TE = False  # in 0.16.1 it is True without the package
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = LatentCore
    mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        mtp_block_spec=mtp,
        **common,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )


class LatentCore(DotProductAttention):
    """Megatron's attention, which ignores the arguments that 0.16.1 passes in latent attention."""

    def __init__(
        self,
        *args: Any,
        k_channels: int = 0,  # the config states the sizes of keys and values
        v_channels: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)


def load(model: GPTModel, place: Path) -> Any:
    """Load this rank's file, strictly, into the model and a new optimizer; return the optimizer."""
    # Always torch's AdamW, because the proof writes its form (``adam: torch``).
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = True
    mcore_optimizer.Adam = torch.optim.AdamW
    distrib_optimizer.HAVE_APEX_OR_TE = False
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(optimizer="adam", lr=0.0, min_lr=0.0, params_dtype=torch.float32)
    overrides = mcore_optimizer.get_standard_config_overrides(settings)
    optimizer = mcore_optimizer.get_megatron_optimizer(settings, [wrapped], overrides)
    base = _find_iteration(place)
    state = _load_dist(base, model, optimizer) if _is_dist(base) else load_legacy(base)
    wrapped.load_state_dict(state["model"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    return optimizer


def find_rank_directory(base: Path) -> Path:
    """Return the directory of this rank's files, as ``get_checkpoint_name`` does."""
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return base / name


def load_legacy(base: Path) -> dict[str, Any]:
    """Return the content of this rank's file in the format ``torch``."""
    path = find_rank_directory(base) / "model_optim_rng.pt"
    return torch.load(path, map_location="cpu", weights_only=False)


def _load_dist(base: Path, model: GPTModel, optimizer: Any) -> dict[str, Any]:
    """Load a state like ``_load_global_dist_base_checkpoint`` (``training/checkpointing.py``)."""
    common = dist_checkpointing.load_common_state_dict(str(base))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    wanted = {"model": model.sharded_state_dict(metadata=metadata)}
    wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    strategy = get_default_load_sharded_strategy(str(base))
    return dist_checkpointing.load(wanted, str(base), strategy)


def find_wrong_moments(model: GPTModel, optimizer: Any) -> tuple[int, list[str]]:
    """Count the moments of a loaded optimizer, and name those that do not fit their weights."""
    names = {param: name for name, param in model.named_parameters()}
    states = [
        (param, state)
        for each in getattr(optimizer, "chained_optimizers", [optimizer])
        for param, state in each.optimizer.state.items()
    ]
    wrong = []
    for param, state in states:
        # Megatron stores the norm after a gated delta net as weight - 1, and its moments unchanged.
        value = param + 1 if names[param].endswith("out_norm.weight") else param
        for slot, wanted in (("exp_avg", 2 * value), ("exp_avg_sq", value.square())):
            if not torch.equal(state[slot], wanted):
                wrong.append(f"{slot} of {names[param]}")
    missing = names.keys() - {param for param, _ in states}
    return 2 * len(states), [*wrong, *(f"no moments of {names[param]}" for param in missing)]


@torch.no_grad()
def compute_logits(model: GPTModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Compute logits (samples, length, padded vocabulary) on the last stage.

    The result has the logits of the model, then those of each layer of multi-token prediction. It
    is empty on the other stages.
    """
    model.eval()
    computed: list[torch.Tensor] = []
    if mpu.is_pipeline_last_stage():
        model.output_layer.register_forward_hook(
            lambda _module, _inputs, output: computed.append(output[0].transpose(0, 1).clone())
        )
    # Megatron computes the logits of these layers only for their loss, which needs labels.
    labels = {"labels": tokens} if model.config.mtp_num_layers else {}
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(length, length).triu(1).bool()[None, None]

    def step(iterator: Any, stage: Any) -> Any:
        batch = next(iterator)
        return stage(batch, positions, mask, **labels), lambda output, **_: output

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([tokens]),
        model=[model],
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=len(tokens),
        forward_only=True,
        collect_non_loss_data=True,
    )
    # GPTModel calls the output layer for the MTP layers first, and for the model itself last.
    found = computed[-1:] + computed[:-1]
    return [gather_from_tensor_model_parallel_region(logits).float() for logits in found]


def gather_from_all(value: Any) -> list[Any]:
    """Return every rank's value, on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
