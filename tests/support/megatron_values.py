"""Change what files of Megatron hold beside tensors, without Megatron."""

from __future__ import annotations

import pickle
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


def change(file: Path, **values: Any) -> None:
    """Write a file again with other values, of its own or of its arguments."""
    root = read_root(file)
    for name, value in values.items():
        if name in root:
            root[name] = value
        else:
            setattr(root["args"], name, value)
    torch.save(root, file)
