"""Change what files of Megatron hold beside tensors, without Megatron."""

from __future__ import annotations

import pickle
import shutil
import types
from pathlib import Path
from typing import Any

import torch


class _Names(pickle.Unpickler):
    """Unpickles files of Megatron without it: its enums become their names."""

    def find_class(self, module: str, name: str) -> Any:
        return (
            (lambda *_: name) if module.startswith("megatron") else super().find_class(module, name)
        )


def read_root(file: Path) -> Any:
    """Return the contents of a file."""
    module = types.SimpleNamespace(Unpickler=_Names, load=pickle.load, __name__="names")
    return torch.load(file, weights_only=False, pickle_module=module)


def copy_changed(
    source: Path, place: Path, files: str = "model_optim_rng.pt", **values: Any
) -> Path:
    """Copy a run, and change values in these files of its ranks."""
    shutil.copytree(source, place)
    for file in place.rglob(files):
        change(file, **values)
    return place


def change(file: Path, **values: Any) -> None:
    """Write a file again with other values, of its own or of its arguments.

    A function gets the old value of the file.
    """
    root = read_root(file)
    for name, value in values.items():
        if name in root:
            root[name] = value(root[name]) if callable(value) else value
        else:
            setattr(root["args"], name, value)
    torch.save(root, file)
