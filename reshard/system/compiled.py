"""Find the modules that a C compiler makes at the installation."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

LETTERS = {"float32": "f", "float16": "e", "bfloat16": "b"}
"""Names of the dtypes whose values the compiled sums take, and how these are told of them."""


def find_compiled(name: str) -> ModuleType | None:
    """Return a compiled module; None if there was no C compiler at the installation."""
    try:
        return import_module(name)
    except ImportError:
        return None
