"""Explain the weights of a SentenceTransformer, which saves each of its modules by itself.

``modules.json`` lists the modules: a ``name`` (``0``, ``1``, ...) and a ``path``, the module's
folder, which is empty for the first one. In the state dict of the whole model, which engines save,
all names begin with the name of a module.

Source: sentence-transformers 6.2 ``base/model.py`` (``save_pretrained``); the model is an
``nn.Sequential``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from reshard.containers.json_files import read_json
from reshard.core.location import Location
from reshard.errors import CorruptError

_LIST = "modules.json"
_FOLDER = re.compile(r"(\d+)_[A-Z]\w*")  # 1_Pooling, 2_Dense
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class Modules(NamedTuple):
    """The relation of weights to the modules of a SentenceTransformer.

    Attributes:
        warnings: what the user must know of an output with these weights.
        are_whole: whether the weights have the names of the whole model, not of its first module.
    """

    warnings: tuple[str, ...] = ()
    are_whole: bool = False


def list_files(directory: Path) -> dict[str, str]:
    """Return the files with weights of the modules in folders: path in the directory -> module.

    A folder of the usual name counts also if ``modules.json`` is missing.
    """
    path = directory / _LIST
    folders = {folder: name for name, folder in _read(path).items()} if path.is_file() else {}
    for name in Location([directory], inner=True).folders:
        usual = _FOLDER.fullmatch(name)
        if usual:
            folders.setdefault(name, usual[1])
    return {
        file: name
        for folder, name in folders.items()
        for file in (f"{folder}/{weights}" for weights in _WEIGHTS)
        if folder and (directory / file).is_file()
    }


def compare(directories: Iterable[Path], fqns: Iterable[str]) -> Modules:
    """Compare the names of weights with the first ``modules.json`` in some directories."""
    path = next((near / _LIST for near in directories if (near / _LIST).is_file()), None)
    listed = _read(path) if path else {}
    if path is None or not listed:
        return Modules()
    if all(fqn.partition(".")[0] in listed for fqn in fqns):
        note = (
            f"the names begin with the modules that {path} lists, so transformers cannot load them:"
            " load them into the SentenceTransformer (model.load_state_dict), and save it"
        )
        return Modules((note,), are_whole=True)
    if not list_files(path.parent):  # which the manifest names among the files that were not read
        return Modules()
    note = (
        "the output has the weights of the first module of the SentenceTransformer alone, and"
        f" SentenceTransformer({str(path.parent)!r}) loads all"
    )
    return Modules((note,))


def _read(path: Path) -> dict[str, str]:
    try:
        content = read_json(path)
    except CorruptError:
        return {}
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
        return {}
    pairs = [(module.get("name"), module.get("path")) for module in content]
    return {name: at for name, at in pairs if isinstance(name, str) and isinstance(at, str)}
