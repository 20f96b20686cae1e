"""The family and traits of a model, by a config of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.containers.json_files import read_json_object
from reshard.core.manifest import Manifest
from reshard.errors import UsageError, understood
from reshard.layouts.model_parallel import families
from reshard.layouts.model_parallel.families import Family
from reshard.layouts.model_parallel.traits import Traits
from reshard.naming.options import NameOptions
from reshard.system.paths import as_path
from reshard.training.companion_files import find_config


def describe_config(
    manifest: Manifest, options: NameOptions, model: str | None
) -> tuple[Family, Traits]:
    """Describe the model by the config that the user names, else by the one beside the source.

    Raises:
        UsageError: there is no config, or transformers does not know it.
        UnsupportedError: there is no table of its model.
    """
    path = as_path(model) if model else find_config(manifest)
    if path is not None and path.is_dir():
        path /= "config.json"
    if path is None or not path.is_file():
        raise UsageError(
            manifest.origin.path if model is None else f"--model {model}",
            "no file states which Hugging Face model this is",
            "pass its config: --model config.json|DIR",
        )
    config = read_config(path, options.rules)
    with understood(path):
        return families.read_config(
            config, str(path), options.family, _read_defaults, options.rules
        )


def _read_defaults(model_type: str) -> Mapping[str, Any]:
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:  # a family of the user's file
        return {}
    defaults: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    return defaults


def read_config(path: Path, rules: Path | None = None) -> Mapping[str, Any]:
    """Return a transformers config with the defaults of its class, if transformers has one.

    transformers itself reads the file: it writes an infinity as ``{"__float__": "Infinity"}``
    (transformers 5.23 ``configuration_utils.py``), as in the configs of Mamba 2 and Nemotron-H.

    Args:
        rules: a user's file of rules, which may have families of its own. Their models may be of a
            type that transformers does not know.

    Raises:
        UsageError: transformers does not accept the config.
        CorruptError: the file is not JSON.
    """
    stated = read_json_object(path)  # refuses a file that is not JSON with reshard's own message
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = stated.get("model_type")
    is_own = families.is_known(model_type, rules) and not families.is_known(model_type, None)
    if model_type not in CONFIG_MAPPING and is_own:
        return stated
    base = families.find_base_type(model_type, rules)
    if model_type not in CONFIG_MAPPING and base is not None:
        # The model's own code comes with its weights, and its config is that of another class.
        own: dict[str, Any] = AutoConfig.for_model(
            base, **{key: value for key, value in stated.items() if key != "model_type"}
        ).to_dict()
        return {**own, "model_type": model_type}

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(path, **options).to_dict()
    except Exception as error:  # each config class refuses in its own way
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(path, f"is not a config that transformers can read: {problem}") from error
    return config
