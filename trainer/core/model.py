"""A causal language model with random or saved weights, and the classes of its repeated layers."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from trainer.core.errors import SettingsError, get_first_line
from trainer.core.model_config import load_model_config
from trainer.core.settings import CoreSettings


def build_model(settings: CoreSettings, *, meta: bool = False) -> nn.Module:
    """Return the model in float32, the same on every rank.

    The weights come from ``settings.seed``, or from the directory that ``settings.model`` names.

    Args:
        meta: make shapes without values; a reader of checkpoints needs no more of the model.

    Raises:
        SettingsError: the model is unknown or cannot be built, or an option does not fit it.
    """
    from transformers import AutoModelForCausalLM

    config = load_model_config(settings)
    try:
        if _has_weights(settings.model) and not meta:
            model = AutoModelForCausalLM.from_pretrained(
                settings.model, config=config, dtype=torch.float32
            )
        else:
            torch.manual_seed(settings.seed)
            with torch.device("meta" if meta else "cpu"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # the configuration chooses which code of transformers runs
        raise SettingsError(
            f"cannot build a causal language model from {settings.model}: {get_first_line(error)}",
            "check --model: its config.json and, if there are any, its *.safetensors",
        ) from error
    if settings.activation_checkpointing:
        # transformers 5 renamed the method.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.config.use_cache = False
    if getattr(model, "loss_type", "") is None:  # transformers derives none for GPT2LMHeadModel
        model.loss_type = "ForCausalLM"
    _freeze(model, settings.freeze)
    trained: nn.Module = model.train()
    return trained


def _has_weights(model: str) -> bool:
    return any(Path(model).glob("*.safetensors")) if Path(model).is_dir() else False


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        matched = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        if not matched:
            names = [name for name, _ in model.named_parameters()]
            raise SettingsError(
                f"--freeze {pattern} matches none of the {len(names)} parameters",
                f"parameters are named like {names[0]}",
            )
        for parameter in matched:
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SettingsError(
            "every parameter is frozen: there is nothing to train", "use a narrower --freeze"
        )


def find_layer_classes(model: nn.Module, names: tuple[str, ...] = ()) -> set[type[nn.Module]]:
    """Return the classes of the layers that stage 3 and FSDP gather one at a time.

    These are the classes called ``names``, or else those in the model's ``_no_split_modules``.

    Raises:
        SettingsError: the model has no module of a class that was named.
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    declared = sorted(getattr(model, "_no_split_modules", None) or ())
    if missing := [name for name in names if name not in classes]:
        raise SettingsError(
            f"{type(model).__name__} has no layer class {missing[0]}",
            f"the model declares these layer classes: {', '.join(declared) or 'none'}",
        )
    return {classes[name] for name in names or declared if name in classes}
