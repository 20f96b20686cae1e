"""What the files of a model state about its quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.containers.json_files import read_json_object
from reshard.core import dtypes
from reshard.core.dtypes import BFLOAT16, DType
from reshard.core.manifest import Quantisation
from reshard.errors import CorruptError, UsageError

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")  # the second: compressed-tensors before 0.4
# Files of quantisers that state it beside config.json: TensorRT Model Optimizer, AutoGPTQ, AutoAWQ.
OTHERS = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


def find_statement(files: Mapping[str, Path]) -> Quantisation | None:
    """Return what the files of a directory state, or None.

    Args:
        files: the files by name.
    """
    for name in (CONFIG, *OTHERS):
        if name in files:
            try:
                document = read_json_object(files[name])
            except CorruptError:
                continue  # weights can be read without it; codes then cannot be dequantised
            stated = read_statement(document, str(files[name]))
            if stated is not None:
                return stated
            if name in OTHERS:
                return Quantisation(OTHERS[name], document, str(files[name]))
    return None


def read_statement(config: Mapping[str, Any], path: str) -> Quantisation | None:
    """Return what a model's config states about quantisation, or None."""
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in sections:
        for key in KEYS:
            settings = section.get(key)
            if isinstance(settings, dict):
                return Quantisation(
                    _find_method(key, settings), settings, path, _find_dtype(sections)
                )
    return None


def remove_statement(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config as that of a model that is not quantised."""
    return {
        name: remove_statement(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in KEYS
    }


def _find_method(key: str, settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if isinstance(method, str):
        return method
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"  # transformers before 4.33 wrote no quant_method
    return "compressed-tensors" if key == KEYS[1] else "unknown"


def _find_dtype(sections: list[Any]) -> DType:
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if isinstance(section.get(key), str):
                try:
                    dtype = dtypes.parse(section[key])
                except UsageError:
                    continue  # "auto"
                if dtype.family == "float":
                    return dtype
    return BFLOAT16
