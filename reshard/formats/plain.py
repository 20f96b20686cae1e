"""A full state dict in one ``torch.save`` file: ``.pt``, ``.bin``, ``.pth``, bare or nested.

Source: torch 2.13 ``torch/serialization.py``; the nesting keys are those of the frameworks that
write such files (Lightning ``state_dict``, DeepSpeed ``module``, many trainers ``model``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reshard import trust
from reshard.dtypes import DType
from reshard.errors import (
    CorruptError,
    IncompleteError,
    UnrecognisedError,
    UnsupportedError,
    UsageError,
)
from reshard.formats import torch_file
from reshard.formats.torch_file import Tensor, TorchFile
from reshard.manifest import PARAM, Entry, Manifest, Origin, keyed
from reshard.unpickle import Call

NAME = "torch"
_NESTS = ("state_dict", "model_state_dict", "model", "module")


def detect(path: Path) -> bool:
    """Whether the path is one ``torch.save`` file, or a directory of a ``pytorch_model.bin``."""
    path = _file_of(path)
    return path.is_file() and torch_file.is_torch_file(path)


def _file_of(path: Path) -> Path:
    return path / "pytorch_model.bin" if path.is_dir() else path


def read(path: Path, key: str | None = None) -> Manifest:
    """Read the state dict of one file, at ``key`` (dotted) or where it is found.

    Raises:
        UnrecognisedError: no state dict in it, or several.
        IncompleteError: its weights are placeholders of size 0.
    """
    path = _file_of(path)
    file, state = open_state_dict(path, key)
    held = entries(file, state)
    _refuse_placeholders(path, held)
    first: dict[Any, str] = {}
    tied = {}
    for name, value in _tensors(state).items():
        if value.numel:
            kept = first.setdefault(value.place, name)
            if kept != name:
                tied[name] = kept
    held = [entry for entry in held if entry.fqn not in tied]
    return Manifest(
        origin=Origin(
            format=NAME,
            path=str(path),
            detail="state dict",
            mesh={"world": 1},
            precision=most_common_dtype(held),
        ),
        entries=keyed(held),
        files={file.path: file.source()},
        tied=tied,
        trained_dtypes={entry.fqn: entry.dtype for entry in held},
        warnings=_left_out(state),
        unknown_globals=trust.unknown(file.globals),
    )


def open_state_dict(path: Path, key: str | None = None) -> tuple[TorchFile, dict[str, Any]]:
    """The opened file and the state dict in it."""
    file = torch_file.read(path)
    if key is not None:
        return file, _at(path, file.root, key)
    if not isinstance(file.root, dict):
        raise UnrecognisedError(path, f"holds a {type(file.root).__name__}, not a state dict")
    if _tensors(file.root):
        return file, file.root
    found = [name for name in _NESTS if _tensors(file.root.get(name))]
    if len(found) != 1:
        nests = [str(name) for name, value in file.root.items() if _tensors(value)]
        listed = f"state dicts under {', '.join(nests)}" if nests else "no state dict"
        raise UnrecognisedError(
            path, f"holds {listed}", f"choose with --key {nests[0]}" if nests else ""
        )
    return file, file.root[found[0]]


def _at(path: Path, value: Any, key: str) -> dict[str, Any]:
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            choices = ", ".join(map(str, value)) if isinstance(value, dict) else "nothing"
            raise UsageError(
                f"--key {key}", f"{path} has no {part!r} there; it has {choices[:200]}"
            )
        value = value[part]
    if not _tensors(value):
        raise UsageError(f"--key {key}", f"in {path} this is not a state dict")
    return dict(value)


def _tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a possible state dict; an unreadable or ambiguous one is an error.

    Raises:
        UnsupportedError: a tensor that is no plain strided one (sparse, meta, quantised, sharded).
        CorruptError: two names that are the same as text.
    """
    if not isinstance(value, dict):
        return {}
    found: dict[str, Tensor] = {}
    for name, item in value.items():
        if isinstance(item, Call) and item.name.startswith("torch."):
            raise UnsupportedError(str(name), f"is stored through {item.name}, no plain tensor")
        if isinstance(item, Tensor):
            if str(name) in found:
                raise CorruptError(item.storage.file, f"two tensors are called {str(name)!r}")
            found[str(name)] = item
    return found


def entries(file: TorchFile, state: dict[str, Any]) -> list[Entry]:
    """Every tensor of a state dict; what is not a tensor is no weight."""
    return [
        Entry(name, PARAM, tensor.dtype, tensor.shape, (file.chunk(tensor),))
        for name, tensor in _tensors(state).items()
    ]


def _left_out(state: dict[str, Any]) -> tuple[str, ...]:
    """What lies among the tensors and is none."""
    names = [str(name) for name, value in state.items() if not isinstance(value, Tensor)]
    if not names:
        return ()
    shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
    return (f"{len(names)} entries beside the weights are no tensors and are left out: {shown}",)


def _refuse_placeholders(path: Path, held: list[Entry]) -> None:
    """ZeRO-3 state dicts saved without gathering hold size-0 tensors for every weight."""
    empty = [entry for entry in held if entry.numel == 0 and entry.fqn.endswith("weight")]
    if len(empty) * 2 > len(held) or (empty and len(empty) == len(held)):
        near = [p for p in (path.parent, *path.parent.glob("global_step*")) if p.is_dir()]
        real = [str(p) for p in near if any(p.glob("*_optim_states.pt"))]
        raise IncompleteError(
            path,
            f"{len(empty)} of {len(held)} weights have size 0 (e.g. {empty[0].fqn!r}): ZeRO-3"
            " placeholders, the real weights are in the ranks' *_optim_states.pt",
            f"merge {real[0]}" if real else "merge the checkpoint directory that holds those files",
        )


def most_common_dtype(held: list[Entry]) -> str:
    """The float dtype of most tensors; empty where there is none."""
    counts: dict[DType, int] = {}
    for entry in held:
        if entry.dtype.family == "float":
            counts[entry.dtype] = counts.get(entry.dtype, 0) + 1
    return str(max(counts, key=lambda dtype: counts[dtype])) if counts else ""
