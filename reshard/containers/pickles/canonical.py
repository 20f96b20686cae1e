"""Convert values to a canonical form, so that a pickle's bytes depend on the values alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any


class Canonicalizer:
    """Makes equal texts and tuples of a tree one object; tensors and objects stay as they are.

    A pickle stores one object once, so the bytes of a file then depend on values alone.
    """

    def __init__(self) -> None:
        self._same: dict[Any, Any] = {}

    def convert(self, value: Any) -> Any:
        """Return a copy of a tree in which equal texts and tuples are one object."""
        if isinstance(value, Mapping):
            pairs = ((self.convert(key), self.convert(item)) for key, item in value.items())
            return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
        if isinstance(value, list):
            return [self.convert(item) for item in value]
        if isinstance(value, tuple):
            parts = tuple(self.convert(item) for item in value)
            # The key is their text, because (1,), (1.0,) and (True,) are equal as keys.
            return self._same.setdefault((tuple, repr(parts)), parts) if _is_plain(parts) else parts
        return self._same.setdefault(value, value) if isinstance(value, str) else value


def _is_plain(values: tuple[Any, ...]) -> bool:
    return all(v is None or isinstance(v, (bool, int, float, str)) for v in values)
