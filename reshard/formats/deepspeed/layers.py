"""A pipeline's layer files: of each layer a plain state dict, under the names that it has alone.

The optimizer, and a universal checkpoint, call a parameter ``{layer}.{name}``, or
``tied_modules.{key}.{name}`` where several layers share a module. Source: DeepSpeed 0.19.8
``runtime/pipe/module.py`` (``_build``, ``ckpt_layer_path``, ``save_state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard import counts
from reshard.box import Index
from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.deepspeed.directory import Files
from reshard.state_dict import leaves

TIED = "tied_modules."
Names = Mapping[str, Index | None]  # name -> shape, where it is known


@dataclass(frozen=True, slots=True)
class Said:
    """What a stage's model states say of its layers.

    Args:
        names: of tensors in them.
        count: how many parameters they have, where none is named: an optimizer by index.
    """

    names: Names
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """What one rank of a pipeline holds of the model."""

    tensors: Mapping[str, Tensor]
    files: Sequence[TorchFile]


def modules(files: Files, tensor: int, stages: Sequence[Said]) -> list[Module]:
    """What each stage holds on one tensor-parallel rank, in order.

    A layer is on the first stage that names something of it; one that none names (all of it frozen,
    or no names at all), where the layer before it is or, by count, on the next.

    Raises:
        IncompleteError: a layer's file is missing.
        CorruptError: a file is no layer's.
        UnsupportedError: one may be any of several tied modules.
    """
    named = {name: shape for said in stages for name, shape in said.names.items()}
    found = [Module({}, []) for _ in stages]
    at = 0
    for layer, ranks in sorted(files.layers.items()):
        if tensor not in ranks:
            raise IncompleteError(
                files.location,
                f"holds layer {layer} of tensor-parallel rank {min(ranks)}, and not of {tensor}",
                "copy the missing file here",
            )
        file = torch_reader.read(ranks[tensor])
        tensors = _tensors(file, layer, named)
        owners = [n for n, said in enumerate(stages) if said.names.keys() & tensors.keys()]
        if not owners and at + 1 < len(stages) and _is_full(found[at], stages[at]):
            owners = [at + 1]
        at = min(owners, default=at)
        found[at] = Module({**found[at].tensors, **tensors}, [*found[at].files, file])
    _check_all(files, named, found)
    return found


def _is_full(held: Module, said: Said) -> bool:
    """Whether a stage has all the parameters that its optimizer counts."""
    return said.count is not None and len(held.tensors.keys() - said.names.keys()) >= said.count


def _tensors(file: TorchFile, layer: int, named: Names) -> dict[str, Tensor]:
    if not isinstance(file.root, dict):
        raise CorruptError(file.path, "is not a layer's state dict")
    leaves.find_opaque(file.path, file.root)
    held = {str(key): value for key, value in file.root.items() if isinstance(value, Tensor)}
    prefix = f"{layer}."
    if held and not any(prefix + key in named for key in held):
        prefix = _tied(file, held, named) or prefix
    return {prefix + key: value for key, value in held.items()}


def _tied(file: TorchFile, held: Mapping[str, Tensor], named: Names) -> str | None:
    """The prefix of the shared module that a file holds, if it is of one."""
    prefixes: dict[str, dict[str, Index | None]] = {}
    for name, shape in named.items():
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            prefixes.setdefault(f"{TIED}{key}.", {})[rest] = shape
    fitting = [
        prefix
        for prefix, members in prefixes.items()
        if all(key in held and shape in (None, held[key].shape) for key, shape in members.items())
    ]
    if len(fitting) > 1:
        raise UnsupportedError(
            file.path,
            f"may be any of {', '.join(fitting)}, which have the same names and shapes",
            "give reshard what DeepSpeed's ds_to_universal makes of it",
        )
    return fitting[0] if fitting else None


def _check_all(files: Files, named: Names, found: Sequence[Module]) -> None:
    held = {name for module in found for name in module.tensors}
    lacking = [name for name in named if name not in held]
    if lacking:
        layer = lacking[0].partition(".")[0]
        number = counts.natural(layer)
        where = "layer's file" if number is None else f"layer_{number:02d}-*"
        raise IncompleteError(
            files.location,
            f"names {lacking[0]!r}, which no {where} here holds",
            "copy the missing file here",
        )


def layer_of(path: str) -> int | None:
    """The layer whose file this is; None where it is another file."""
    parts = Path(path).name.removeprefix("layer_").partition("-")
    is_layer = Path(path).name.startswith("layer_") and parts[2].endswith("model_states.pt")
    return counts.natural(parts[0]) if is_layer else None
