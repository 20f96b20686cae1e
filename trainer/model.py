"""A causal language model from a name, a config.json, or a directory with weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.errors import SettingsError, first_line
from trainer.settings import Settings
from trainer.tokenizer import VOCABULARY

TINY: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "tiny-mixtral": {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 92,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "tiny-gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 2048,
    },
}
"""Odd sizes on purpose: 257 tokens and 172 columns do not divide by the usual numbers of ranks."""


def build(settings: Settings, *, meta: bool = False) -> nn.Module:
    """The model in float32, the same on every rank: weights from ``seed``, or from the directory.

    Args:
        meta: only shapes, for ranks that receive their weights.

    Raises:
        SettingsError: the model or an option for it is not known.
    """
    from transformers import AutoModelForCausalLM

    config = configuration(settings)
    try:
        if _has_weights(settings.model) and not meta:
            model = AutoModelForCausalLM.from_pretrained(
                settings.model, config=config, dtype=torch.float32
            )
        else:
            torch.manual_seed(settings.seed)
            with torch.device("meta" if meta else "cpu"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{settings.model} does not make a causal language model: {first_line(error)}"
        ) from error
    if settings.activation_checkpointing:
        # Renamed in transformers 5.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.config.use_cache = False
    if getattr(model, "loss_type", "") is None:  # a class whose name does not tell (GPT-2)
        model.loss_type = "ForCausalLM"
    _freeze(model, settings.freeze)
    built: nn.Module = model.train()
    return built


def configuration(settings: Settings) -> Any:
    """The ``transformers`` configuration that the settings describe.

    Raises:
        SettingsError: there is no such model, or it cannot be trained here.
    """
    from transformers import AutoConfig

    if settings.model in TINY:
        fields = dict(TINY[settings.model])
        config = AutoConfig.for_model(
            fields.pop("model_type"),
            vocab_size=VOCABULARY,
            bos_token_id=256,
            eos_token_id=256,
            **fields,
        )
    elif Path(settings.model).exists():
        try:
            config = AutoConfig.from_pretrained(settings.model)
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{settings.model}: {first_line(error)}") from error
    else:
        raise SettingsError(
            f"no model {settings.model!r}: not a path, and the built-in ones are {', '.join(TINY)}",
            "give a config.json or a directory with config.json (and weights)",
        )
    _check(config, settings)
    if settings.tie_embeddings is not None:
        config.tie_word_embeddings = settings.tie_embeddings
    if settings.dropout is not None:
        names = [name for name in config.to_dict() if name.endswith(("dropout", "pdrop"))]
        for name in names:
            setattr(config, name, settings.dropout)
    return config


def _check(config: Any, settings: Settings) -> None:
    """Refuse a model that cannot be trained on these samples, or not on several ranks."""
    if config.vocab_size < VOCABULARY:
        raise SettingsError(
            f"{settings.model} has {config.vocab_size} tokens, bytes need {VOCABULARY}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and settings.seq_len > positions:
        raise SettingsError(
            f"seq_len is {settings.seq_len}, and {settings.model} has {positions} positions"
        )
    for name, value in config.to_dict().items():
        # Ranks would run different layers, and wait for each other in different places.
        if name.endswith("layerdrop") and value:
            raise SettingsError(
                f"{settings.model} has {name} {value}: every rank must run the same layers",
                f"set {name} to 0 in its config.json",
            )


def _has_weights(model: str) -> bool:
    return any(Path(model).glob("*.safetensors")) if Path(model).is_dir() else False


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze every parameter whose name matches; a pattern that matches none is an error."""
    for pattern in patterns:
        matched = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        if not matched:
            raise SettingsError(f"--freeze {pattern}: no parameter has such a name")
        for parameter in matched:
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingsError("every parameter is frozen: nothing to train")


def layer_classes(model: nn.Module, names: tuple[str, ...] = ()) -> set[type[nn.Module]]:
    """The classes of the repeated layers: those named, or the model's own ``_no_split_modules``.

    Raises:
        SettingsError: the model has no module of a class that was named.
    """
    known = {type(module).__name__: type(module) for module in model.modules()}
    wanted = names or tuple(sorted(getattr(model, "_no_split_modules", None) or ()))
    if missing := [name for name in names if name not in known]:
        own = ", ".join(sorted(getattr(model, "_no_split_modules", None) or ()))
        raise SettingsError(
            f"the model has no layer class {missing[0]}", f"its layers are: {own or 'not named'}"
        )
    return {known[name] for name in wanted if name in known}
