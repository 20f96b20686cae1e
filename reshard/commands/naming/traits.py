"""What a source, or a config of transformers, says of its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.commands.naming.state import Asked
from reshard.containers.json_files import read_json_object
from reshard.errors import UsageError, understood
from reshard.formats import megatron, meta
from reshard.formats.deepspeed import dialects, neox
from reshard.formats.meta import reader as of_meta
from reshard.manifest import Manifest
from reshard.model_parallel import families
from reshard.model_parallel.families import Family
from reshard.model_parallel.megatron_traits import of_megatron
from reshard.model_parallel.traits import Traits
from reshard.paths import as_path
from reshard.training.companion_files import config_beside

_OF_MEGATRON = {"num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"}


def of(manifest: Manifest) -> Traits | None:
    """What a source says of its model, where its names are not Hugging Face's."""
    with understood(manifest.origin.path):
        return _said(manifest)


def _said(manifest: Manifest) -> Traits | None:
    origin, config = manifest.origin, manifest.train.config
    if origin.format == megatron.NAME and isinstance(config, Mapping):
        return of_megatron(config, origin.path)
    if origin.format == meta.NAME:
        return of_meta.traits(manifest)
    args = manifest.train.client.get("args")  # Megatron-DeepSpeed's, a Namespace
    if dialects.find_dialect(manifest) == dialects.NEOX:
        said = neox.read_settings(origin.path)
        padded = args.get("padded_vocab_size") if isinstance(args, Mapping) else None
        return neox.read_traits(said, padded, origin.path) if said else None
    state = args.get("state") if isinstance(args, Mapping) else None
    if isinstance(state, Mapping) and state.keys() >= _OF_MEGATRON:
        return of_megatron(state, origin.path)
    return None


def of_config(manifest: Manifest, asked: Asked, model: str | None) -> tuple[Family, Traits]:
    """By the config that the user names, else by the one beside the source.

    Raises:
        UsageError: there is none, or it is none of transformers.
        UnsupportedError: there is no table of its model.
    """
    path = as_path(model) if model else config_beside(manifest)
    if path is not None and path.is_dir():
        path /= "config.json"
    if path is None or not path.is_file():
        raise UsageError(
            manifest.origin.path if model is None else f"--model {model}",
            "nothing says which of Hugging Face's models it is",
            "give its config: --model config.json|DIR",
        )
    config = _filled(path)
    with understood(path):
        return families.of_config(config, str(path), asked.family, _defaults)


def _defaults(model_type: str) -> Mapping[str, Any]:
    """Return the default config of a model's class in transformers."""
    from transformers import AutoConfig

    made: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    return made


def _filled(path: Path) -> Mapping[str, Any]:
    """A transformers config with the defaults of its class.

    transformers itself reads the file: it writes an infinity as ``{"__float__": "Infinity"}``
    (transformers 5.23 ``configuration_utils.py``), as in the configs of Mamba 2 and Nemotron-H.
    """
    read_json_object(path)  # refuse what is no JSON in our own words
    from transformers import AutoConfig

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        made: dict[str, Any] = AutoConfig.from_pretrained(path, **options).to_dict()
    except Exception as error:  # each config class has its own ways to refuse
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(path, f"is no config of transformers: {problem}") from error
    return made
