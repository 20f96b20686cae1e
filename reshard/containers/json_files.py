"""Read and format the small JSON files that are stored beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reshard.core.counts import check_config
from reshard.errors import ALTERED, DAMAGED, CorruptError
from reshard.system.files import read_small_file

_OF_MODELS = {"model_type", "architectures", "num_hidden_layers"}  # keys of models' configs only


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CorruptError: the file is not JSON.
    """
    try:
        return json.loads(read_small_file(path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(path, f"is not JSON: {error}", DAMAGED) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object; if it is a model's config, check its sizes.

    Raises:
        CorruptError: the file is not JSON, its value is not an object, or it states a size that no
            model has.
    """
    config = read_json(path)
    if not isinstance(config, dict):
        raise CorruptError(path, "is not a JSON object", ALTERED)
    if not _OF_MODELS.isdisjoint(config):
        check_config(path, config)
    return config


def format_json(value: Any) -> bytes:
    r"""Format JSON as transformers does: two spaces, sorted keys, a newline at the end.

    A source's JSON may have half of a surrogate pair, which UTF-8 cannot encode: then everything
    beyond ASCII is escaped.

    >>> format_json({"a": "\xe9"}), format_json({"a": "\ud800"})
    (b'{\n  "a": "\xc3\xa9"\n}\n', b'{\n  "a": "\\ud800"\n}\n')
    """
    try:
        return _format_json_lines(value, ascii_only=False).encode()
    except UnicodeEncodeError:
        return _format_json_lines(value, ascii_only=True).encode()


def _format_json_lines(value: Any, *, ascii_only: bool) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=ascii_only) + "\n"
