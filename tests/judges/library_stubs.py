"""Replacements for modules that a library imports but does not need to save a checkpoint.

A library installed with ``pip install --no-deps`` imports its web servers, loggers and schedulers
at the top of its modules. Any attribute of a stub is a class that accepts everything.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(cls)(name, (cls,), {})


class _Anything(metaclass=_Meta):
    """A class, a decorator and a base class, whatever is asked of it."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if args else self

    def __class_getitem__(cls, _item: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class Stub(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, as the import system asks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (_Anything,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None:
        pass


@contextmanager
def stand_in(names: Iterable[str]) -> Iterator[None]:
    """Replace these top-level packages by stubs inside the block, unless they are installed.

    Afterwards they are absent again, for other libraries that look whether they are there.
    """
    finder = _Finder({name for name in names if importlib.util.find_spec(name) is None})
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] in finder.names]:
            del sys.modules[name]
