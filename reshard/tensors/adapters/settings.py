"""The settings of an adapter that decide its merge; settings that are not known are refused.

Source: PEFT 0.21 ``tuners/lora/config.py`` (LoraConfig) and ``tuners/lora/layer.py``
(LoraLayer.update_layer). Later versions may have settings that change the sum, so every setting
that is not listed here must be unset.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from reshard.errors import UnsupportedError, shown
from reshard.model.adapter_names import ADALORA
from reshard.tensors.adapters.config import AdapterConfig
from reshard.tensors.adapters.targets import compile_safe

# They choose what is trained, how it starts, or what is saved; the tensors show the result.
_NEUTRAL = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode", "revision"),
        *("base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
        *("use_rslora", "use_dora", "lora_bias", "bias", "fan_in_fan_out", "lora_dropout"),
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
        *("layers_pattern", "modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("megatron_core", "qalora_group_size", "velora_config"),
        *("token_indices", "init_weights"),  # of TRAINABLE_TOKENS
        *("init_r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2"),  # of ADALORA
        *("orth_reg_weight", "total_step"),
    )
)
_WHY = {
    "layer_replication": "the adapter belongs to a model with repeated layers",
    "alora_invocation_tokens": "the adapter is added only after certain tokens",
    "arrow_config": "the adapter is one of several that a router chooses",
    "use_qalora": "the adapter belongs to a GPTQ model",
}
# These start from a changed base: W - scale * B @ A. The base that is merged lacks the change.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_settings(config: AdapterConfig) -> None:
    """Check that plain LoRA arithmetic gives the merged weights.

    Raises:
        UnsupportedError: a setting changes the sum; the message names it.
    """
    for name, value in config.values.items():
        if value and name not in _NEUTRAL:
            why = _WHY.get(name, "reshard does not know its effect on the weights")
            raise UnsupportedError(
                config.path,
                f"has {name} {shown(value)}: {why}",
                "merge it with PEFT, if PEFT can",
            )
    start = config.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            config.path,
            f"has init_lora_weights {start!r}, which changed the base model when training began",
            "save the adapter again with PEFT's"
            " save_pretrained(..., path_initial_model_for_weight_conversion=...), which converts it"
            " to an adapter of the unchanged base",
        )


def compute_scale(config: AdapterConfig, key: str, rank: int) -> float:
    """Return the factor of a layer's product: alpha / rank, or alpha / sqrt(rank).

    AdaLoRA divides by the rank at the start, to which it adds 1e-5 (PEFT 0.21
    ``tuners/adalora/layer.py``, SVDLinear), and knows neither patterns nor the square root.

    Args:
        key: name of the layer in the base model; of a parameter, its full name.

    Raises:
        UnsupportedError: a pattern is not one that reshard runs.
    """
    values = config.values
    if config.method == ADALORA:
        alpha = values.get("lora_alpha") or 0
        return float((alpha if alpha > 0 else rank) / (values["init_r"] + 1e-5))
    alpha = _find_alpha(config, key)
    return float(alpha / math.sqrt(rank) if values.get("use_rslora") else alpha / rank)


def _find_alpha(config: AdapterConfig, key: str) -> Any:
    # That of the first pattern that matches, as PEFT's get_pattern_key does.
    patterns: Mapping[str, Any] = config.values.get("alpha_pattern") or {}
    for pattern, value in patterns.items():
        if _compile(config, pattern).match(key):
            return value
    return config.values["lora_alpha"]


def _compile(config: AdapterConfig, pattern: str) -> re.Pattern[str]:
    if compile_safe(pattern):
        return re.compile(rf"(.*\.)?({pattern})$")
    raise UnsupportedError(
        config.path,
        f"has alpha_pattern {pattern!r}, a regular expression that reshard does not run",
        "copy the file, write one pattern for each layer name, and pass its directory as --hf-dir",
    )


def list_trained_tokens(config: AdapterConfig, layer: str) -> list[int]:
    """Return the rows of an embedding that ``trainable_token_indices`` name.

    Args:
        layer: name of the embedding in the base model.
    """
    indices = config.values.get("trainable_token_indices")
    if isinstance(indices, Mapping):
        own = (rows for name, rows in indices.items() if f".{layer}".endswith(f".{name}"))
        indices = next(own, None)
    rows = indices if isinstance(indices, list) else []
    return [row for row in rows if isinstance(row, int)]
