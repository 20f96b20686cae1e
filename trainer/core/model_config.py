"""The model's configuration: a built-in tiny model, a config.json, or a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.core.data import VOCABULARY
from trainer.core.errors import SettingsError, get_first_line
from trainer.core.settings import CoreSettings

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
        "intermediate_size": 88,
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
"""Sizes are odd on purpose: 257 tokens and 172 columns do not divide by usual numbers of ranks.

The experts' 88 columns are a multiple of 8, because torch's ``grouped_mm``, with which transformers
computes experts, requires rows of a multiple of 16 bytes, in bfloat16 as well.
"""


def load_model_config(settings: CoreSettings) -> Any:
    """Return the ``transformers`` configuration that the settings describe.

    Raises:
        SettingsError: there is no such model, or the trainer cannot train it.
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
        except Exception as error:  # the file chooses which code of transformers checks it
            raise SettingsError(
                f"cannot read a model configuration from {settings.model}: {get_first_line(error)}",
                "give a config.json of transformers, or a directory that has one, with --model",
            ) from error
    else:
        raise SettingsError(
            f"no model {settings.model!r}: there is no such path, and the built-in models are "
            f"{', '.join(TINY)}",
            "give a built-in model, a config.json, or a directory with a config.json (and weights)",
        )
    _check(config, settings)
    if settings.tie_embeddings is not None:
        config.tie_word_embeddings = settings.tie_embeddings
    if settings.dropout is not None:
        names = [name for name in config.to_dict() if name.endswith(("dropout", "pdrop"))]
        for name in names:
            setattr(config, name, settings.dropout)
    return config


def _check(config: Any, settings: CoreSettings) -> None:
    """Refuse a model that cannot be trained on byte tokens of this length, or on several ranks."""
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None or vocabulary < VOCABULARY:
        raise SettingsError(
            f"{settings.model} has a vocabulary of {vocabulary}, and byte tokens need {VOCABULARY}",
            f"set vocab_size to {VOCABULARY} or more in its config.json",
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and settings.seq_len > positions:
        raise SettingsError(
            f"seq_len is {settings.seq_len}, and {settings.model} has {positions} positions",
            f"use --seq-len {positions} or less",
        )
    for name, value in config.to_dict().items():
        # Ranks would run different layers, and wait for each other in different collectives.
        if name.endswith("layerdrop") and value:
            raise SettingsError(
                f"{settings.model} has {name} {value}: every rank must run the same layers",
                f"set {name} to 0 in its config.json",
            )
