"""Temporary replacement of attributes of other libraries' objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of a module, class or object other values within this block.

    Afterwards each attribute is as before. One that was inherited is removed from the owner, so
    that it is inherited again.
    """
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            elif name in vars(owner):
                delattr(owner, name)
