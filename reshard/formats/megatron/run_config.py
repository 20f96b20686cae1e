"""The arguments of a run of Megatron-Bridge, which saves no ``args`` but ``run_config.yaml``.

    iter_0000003/run_config.yaml   the configuration: model, optimizer, ddp, train, checkpoint ...
    iter_0000003/train_state.pt    counters of iterations and samples, as tensors

An object is a mapping with the name of its class under ``_target_``; nothing is called here. Most
fields of ``model`` have the names of Megatron-LM's arguments, from which Megatron-LM fills them.
After 0.6 a model may have those of its layers under ``transformer``.

Sources: Megatron-Bridge 0.3.1 ``training/checkpointing.py`` (``save_checkpoint``),
``training/utils/config_utils.py`` (``to_dict``), ``utils/yaml_utils.py``, ``training/mlm_compat/
arguments.py`` (``_transformer_config_from_args``: the other direction), ``models/gpt_provider.py``;
067f987 ``models/gpt/model_config.py`` (``BridgeGPTModelConfig.as_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.torch_objects import TorchFile
from reshard.containers.yaml_files import parse_yaml
from reshard.core.location import Location
from reshard.core.schema import COUNT, NUMBER, expect, fields, mapping, maybe
from reshard.errors import CorruptError, UnsupportedError
from reshard.layouts.model_parallel.megatron_traits import OWN_BUILDER
from reshard.state_dict import tree
from reshard.state_dict.optimizers.hyper_parameters import read_counter
from reshard.system.files import SourceFiles, read_small_file
from reshard.units import round_up

NAME = "run_config.yaml"
TRAIN_STATE = "train_state.pt"
_SECTIONS = ("model", "optimizer", "ddp", "train", "scheduler", "checkpoint", "rng")
_KINDS = fields(**dict.fromkeys(_SECTIONS, maybe(mapping())))
_SIZES = fields(
    **dict.fromkeys(
        """
        num_attention_heads num_query_groups vocab_size tensor_model_parallel_size num_layers
        make_vocab_size_divisible_by hidden_size
        """.split(),
        maybe(COUNT),
    )
)
RENAMED = {  # field of the model -> argument
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "seq_length": "max_position_embeddings",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "rope_scaling": "use_rope_scaling",
}
_OTHERS: dict[str, dict[str, str | None]] = {  # section -> field -> argument
    "ddp": {
        "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
        "use_distributed_optimizer": "use_distributed_optimizer",
        "overlap_grad_reduce": "overlap_grad_reduce",
        "bucket_size": "ddp_bucket_size",
    },
    "train": dict.fromkeys(("micro_batch_size", "global_batch_size", "train_iters")),
    "optimizer": dict.fromkeys(
        """
        optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad decoupled_lr
        decoupled_min_lr bf16 fp16 use_precision_aware_optimizer
        """.split()
    ),
    "rng": {"seed": "seed"},
}
ADAPTER = "peft"  # a section, and an argument
_ADAPTERS = ("LoRA", "CanonicalLoRA")
_ADAPTER = fields(dim=COUNT, alpha=NUMBER)
_SAMPLES = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_LOCAL = "local_layer_spec"
# Builders of the models that the fields describe completely; others have layers of their own.
_SPECS = frozenset(
    f"""
    {_LOCAL} default_layer_spec transformer_engine_layer_spec transformer_engine_full_layer_spec
    modelopt_transformer_layer_spec quantization_layer_spec get_gpt_decoder_block_spec
    get_gpt_layer_with_transformer_engine_spec get_gpt_layer_local_spec
    """.split()
)
_PROVIDERS = re.compile(
    r"(?:GPT|MLA|Llama(?:2|3|31|32|33)?|CodeLlama|Qwen(?:2|25|3)(?:MoE)?|Mistral|Mixtral"
    r"|DeepSeek(?:V2|V2Lite|V3)?|Gemma|CodeGemma|Moonlight|KimiK2)?(?:Model)?Provider\w*"
    r"|(?:Bridge)?GPTModelConfig"
)
_QWEN_NEXT = "qwen3_next"  # of SchedulerConfig.no_weight_decay_cond_type
_ACTIVATION = "activation_func"
_FAST_GELU, _QUICK_GELU = "fast_gelu", "quick_gelu"
_PLAIN = (bool, int, float, str)


def read(location: Location) -> tuple[dict[str, Any], list[TorchFile]]:
    """Return the arguments of the run, and the other files that have some of them.

    Raises:
        CorruptError: a file does not hold such a configuration.
        UnsupportedError: the model is of a kind whose arguments cannot be derived.
    """
    path = location.files[NAME]
    root = parse_yaml(path, read_small_file(path).decode(errors="replace"))
    if not isinstance(root, dict) or not isinstance(root.get("model"), dict):
        raise CorruptError(path, "has no section 'model', expected Megatron-Bridge's configuration")
    expect(path, root, _KINDS, NAME)
    model = root["model"]
    inner = model.get("transformer")
    root = {**root, "model": {**inner, **model} if isinstance(inner, dict) else dict(model)}
    expect(path, root["model"], _SIZES, "model")
    _refuse_what_args_cannot_state(str(path), root)
    args = _derive(root)
    state_path = location.files.get(TRAIN_STATE)
    if state_path is None:
        return args, []
    file = torch_reader.read(state_path)
    state = tree.convert_file(file)
    if not isinstance(state, dict):
        raise CorruptError(state_path, "is not a dict")
    with SourceFiles() as pool:
        counts = {name: read_counter(state.get(name), pool) for name in _SAMPLES}
    return {**args, **{k: int(v) for k, v in counts.items() if isinstance(v, (int, float))}}, [file]


def _refuse_what_args_cannot_state(path: str, root: Mapping[str, Any]) -> None:
    model = root["model"]
    builder = _get_target(model)
    peft = root.get(ADAPTER)
    if peft is not None and _get_target(peft) not in _ADAPTERS:
        raise UnsupportedError(
            path,
            f"states a run with PEFT ({_get_target(peft)}), of which reshard reads only"
            f" {' and '.join(_ADAPTERS)}",
            "merge the adapter with Megatron-Bridge first (scripts of its peft recipes)",
        )
    if peft is not None:
        expect(path, peft, _ADAPTER, ADAPTER)
    if isinstance(model.get("pipeline_model_parallel_layout"), dict):
        raise UnsupportedError(
            path,
            "does not state the pipeline layout: pipeline_model_parallel_layout is an object"
            " without its layers",
            "save the run with even pipeline stages, or with the layout as a list or a text",
        )
    if not model.get("num_layers") or not model.get("hidden_size"):
        raise UnsupportedError(
            path, f"does not state num_layers and hidden_size of the model ({builder or 'model'})"
        )


def _get_target(value: Any) -> str:
    target = value.get("_target_") if isinstance(value, dict) else None
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def _derive(root: Mapping[str, Any]) -> dict[str, Any]:
    model = root["model"]
    args = {
        RENAMED.get(name, name): value
        for name, value in model.items()
        if _is_plain(value) and name != _ACTIVATION
    } | _derive_activation(model)
    for section, names in _OTHERS.items():
        settings = root.get(section) or {}
        for name, argument in names.items():
            if _is_plain(settings.get(name)) and not args.get(argument or name):
                args[argument or name] = settings[name]
    scheduler, saved = root.get("scheduler") or {}, root.get("checkpoint") or {}
    if scheduler.get("no_weight_decay_cond_type") == _QWEN_NEXT:
        args["apply_wd_to_qk_layernorm"] = True
    builder = _find_own_builder(model)
    if builder:
        args[OWN_BUILDER] = builder
    if root.get(ADAPTER) is not None:
        args[ADAPTER] = {k: v for k, v in root[ADAPTER].items() if _is_plain(v)}
    heads, groups = model.get("num_attention_heads"), model.get("num_query_groups")
    return args | {
        "group_query_attention": groups is not None and groups != heads,
        "untie_embeddings_and_output_weights": model.get("share_embeddings_and_output_weights")
        is False,
        "layernorm_epsilon": model.get("layernorm_epsilon", 1e-5),
        "transformer_impl": "local" if _is_local(model) else "transformer_engine",
        "padded_vocab_size": _pad_vocabulary(model),
        "no_save_optim": saved.get("save_optim") is False,
        "no_save_rng": saved.get("save_rng") is False,
        "ckpt_format": "torch_dist",
    }


def _find_own_builder(model: Mapping[str, Any]) -> str:
    provider, spec = _get_target(model), _get_target(model.get("transformer_layer_spec"))
    if provider and not _PROVIDERS.fullmatch(provider):
        return provider
    return "" if spec in _SPECS else spec


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_local(model: Mapping[str, Any]) -> bool:
    spec = model.get("transformer_layer_spec")
    is_plain = isinstance(spec, dict) and spec.get("use_transformer_engine") is False
    return is_plain or _get_target(spec) == _LOCAL


def _derive_activation(model: Mapping[str, Any]) -> dict[str, Any]:
    # Source: Megatron-LM core_v0.16.1 ``training/arguments.py``
    # (``core_transformer_config_from_args``), ``core/transformer/mlp.py``.
    function = model.get(_ACTIVATION)
    name = function if isinstance(function, str) else _get_target(function) or "gelu"
    gated = model.get("gated_linear_unit")
    if gated and name in ("silu", "swish"):
        return {"swiglu": True}
    if gated and name == _QUICK_GELU:
        return {"quick_geglu": True}
    if not gated and name == "squared_relu":
        return {"squared_relu": True}
    if not gated and name == "gelu":
        return {"bias_gelu_fusion": model.get("bias_activation_fusion") is True}
    return {_ACTIVATION: name}


def _pad_vocabulary(model: Mapping[str, Any]) -> int | None:
    """Return the rows of the embedding (``GPTModelProvider.provide``)."""
    rows: int | None = model.get("vocab_size")
    if not rows or not model.get("should_pad_vocab"):
        return rows
    step = max(model.get("make_vocab_size_divisible_by") or 128, 1) * max(
        model.get("tensor_model_parallel_size") or 1, 1
    )
    return round_up(rows, step)
