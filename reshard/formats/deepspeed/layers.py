"""Read a pipeline's layer files: a plain state dict of each layer, with the layer's own names.

The optimizer, and a universal checkpoint, call a parameter ``{layer}.{name}``, or
``tied_modules.{key}.{name}`` if several layers share a module. Source: DeepSpeed 0.19.8
``runtime/pipe/module.py`` (``_build``, ``ckpt_layer_path``, ``save_state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reshard.containers import torch_reader
from reshard.containers.torch_objects import Tensor, TorchFile
from reshard.core import counts
from reshard.core.box import Index
from reshard.errors import OTHER_FILE, CorruptError, IncompleteError, UnsupportedError
from reshard.formats.deepspeed.directory import LAYER_FILE, TagFiles
from reshard.state_dict import leaves
from reshard.system.threads import map_files_by_key

TIED = "tied_modules."
Names = Mapping[str, Index | None]  # name -> shape, if it is known


@dataclass(frozen=True, slots=True)
class DeclaredStage:
    """What a stage's model states declare about its layers.

    Args:
        names: the tensors in the layers that are named -> shape, if it is known.
        count: number of parameters, if the optimizer stores them by index and names none.
    """

    names: Names
    count: int | None = None


@dataclass(frozen=True, slots=True)
class StageModule:
    """The tensors of the model that one rank of a pipeline holds, and the files they are in.

    ``copies`` are those of a shared module in the files of its later uses on the stage.
    """

    tensors: Mapping[str, Tensor]
    files: Sequence[TorchFile]
    copies: Sequence[tuple[str, Tensor]] = ()


def read_stages(
    files: TagFiles, tensor_rank: int, stages: Sequence[DeclaredStage]
) -> list[StageModule]:
    """Read what each stage holds on one tensor-parallel rank, in order.

    A layer is on the first stage that names a tensor of it. A layer that no stage names (all of it
    frozen, or no names at all) is on the stage of the layer before it; on the next stage if that
    one has all the parameters that its optimizer counts.
    """
    named = {name: shape for stage in stages for name, shape in stage.names.items()}
    modules = [StageModule({}, []) for _ in stages]
    opened = _open_files(files, tensor_rank)
    at = 0  # stages are contiguous ranges of layers, so this number only grows
    for layer, file in opened.items():
        tensors = _read_tensors(file, layer, named)
        owners = [n for n, stage in enumerate(stages) if stage.names.keys() & tensors.keys()]
        if not owners and at + 1 < len(stages) and _is_full(modules[at], stages[at]):
            owners = [at + 1]
        at = min(owners, default=at)
        own = modules[at]
        copies = [item for item in tensors.items() if item[0] in own.tensors]
        modules[at] = StageModule(
            {**tensors, **own.tensors} if copies else {**own.tensors, **tensors},
            [*own.files, file],
            [*own.copies, *copies],
        )
    _check_named(files, named, modules)
    return modules


def _open_files(files: TagFiles, tensor_rank: int) -> dict[int, TorchFile]:
    paths: dict[int, Path] = {}
    for layer, ranks in sorted(files.layers.items()):
        if tensor_rank not in ranks:
            raise IncompleteError(
                files.location,
                f"contains layer {layer} of tensor-parallel rank {min(ranks)}, but not of rank"
                f" {tensor_rank}",
                "copy the missing file here",
            )
        paths[layer] = ranks[tensor_rank]
    return map_files_by_key(paths, torch_reader.read)


def _is_full(module: StageModule, stage: DeclaredStage) -> bool:
    unnamed = module.tensors.keys() - stage.names.keys()
    return stage.count is not None and len(unnamed) >= stage.count


def _read_tensors(file: TorchFile, layer: int, named: Names) -> dict[str, Tensor]:
    if not isinstance(file.root, dict):
        raise CorruptError(file.path, "is not the state dict of a layer", OTHER_FILE)
    leaves.find_opaque(file.path, file.root)  # raises if a weight has a form that is not read
    tensors = {str(key): value for key, value in file.root.items() if isinstance(value, Tensor)}
    prefix = f"{layer}."
    if tensors and not any(prefix + key in named for key in tensors):
        prefix = _find_tied_prefix(file, tensors, named) or prefix
    return {prefix + key: value for key, value in tensors.items()}


def _find_tied_prefix(file: TorchFile, tensors: Mapping[str, Tensor], named: Names) -> str | None:
    prefixes: dict[str, dict[str, Index | None]] = {}
    for name, shape in named.items():
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            prefixes.setdefault(f"{TIED}{key}.", {})[rest] = shape
    fitting = [
        prefix
        for prefix, members in prefixes.items()
        if all(
            key in tensors and shape in (None, tensors[key].shape) for key, shape in members.items()
        )
    ]
    if len(fitting) > 1:
        raise UnsupportedError(
            file.path,
            f"could be any of {', '.join(fitting)}, which have the same names and shapes",
            "convert the run with DeepSpeed's ds_to_universal, and pass reshard the result",
        )
    return fitting[0] if fitting else None


def _check_named(files: TagFiles, named: Names, modules: Sequence[StageModule]) -> None:
    tensors = {name for module in modules for name in module.tensors}
    missing = next((name for name in named if name not in tensors), None)
    if missing is not None:
        number = counts.parse_index(missing.partition(".")[0])
        where = "layer's file" if number is None else f"layer_{number:02d}-*"
        raise IncompleteError(
            files.location,
            f"names {missing!r}, but no {where} here contains it",
            "copy the missing file here",
        )


def parse_layer(path: str) -> int | None:
    """Return the number of the layer whose file this is; None for another file."""
    match = LAYER_FILE.fullmatch(Path(path).name)
    return int(match[1]) if match else None
