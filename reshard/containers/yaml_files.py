"""Read YAML documents of plain values, which training programs store beside weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard.errors import CorruptError

_MAX_VALUES = 1 << 17


def parse_yaml(path: Path, text: str) -> Any:
    """Return the value of a document, but not of one whose aliases expand to too many values.

    Tags that stand for objects are refused, so no class or function is called.

    Raises:
        CorruptError: it is not YAML of plain values, or has such aliases.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if _count_values(node, {}) > _MAX_VALUES:
            raise CorruptError(
                path, f"has more than {_MAX_VALUES} values after its aliases are expanded"
            )
        return loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date, a number
        raise CorruptError(path, f"is not YAML: {(str(error).splitlines() or [''])[0]}") from error


def _count_values(node: Any, counted: dict[int, int]) -> int:
    """Return how many values a YAML node expands to; too many if it contains itself."""
    inside = getattr(node, "value", None)
    if not isinstance(inside, list):
        return 1
    if id(node) not in counted:
        counted[id(node)] = _MAX_VALUES  # the count if the node occurs inside itself
        parts = (part for item in inside for part in (item if isinstance(item, tuple) else [item]))
        counted[id(node)] = 1 + sum(_count_values(part, counted) for part in parts)
    return counted[id(node)]
