"""Universal checkpoints: ``zero/<fqn>/{fp32,exp_avg,...}.pt``, one whole tensor a file.

Source: DeepSpeed 0.19.8 ``checkpoint/ds_to_universal.py`` (``merge_tp_slices``: a dict with
``param`` and how it was cut; ``step.pt`` a bare 0-d tensor; ``optimizer_state.pt``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard import trust
from reshard.errors import CorruptError, IncompleteError
from reshard.formats import torch_file
from reshard.formats.deepspeed import train
from reshard.formats.deepspeed.states import ModelStates, open_model, whole_entry
from reshard.formats.torch_file import Tensor, TorchFile
from reshard.manifest import BUFFER, MASTER, Entry, Manifest, Origin, ParamGroup, keyed

_ENUM = {"deepspeed.runtime.zero.config.ZeroStageEnum": lambda stage: stage}


def read(place: Path) -> Manifest:
    """Describe a universal directory; layout-free, so any parallel grid may have written it.

    Raises:
        IncompleteError: a parameter without its weights, or no model states beside ``zero``.
    """
    model = _model_states(place)
    files: dict[str, TorchFile] = {model.file.path: model.file}
    entries: list[Entry] = []
    steps: dict[str, float] = {}
    for folder in sorted(path for path in (place / "zero").iterdir() if path.is_dir()):
        for kind, file, tensor in _tensors(folder):
            files[file.path] = file
            if kind == "step":
                steps[folder.name] = float(file.number(tensor))
            else:
                entries.append(whole_entry(file, folder.name, kind, tensor))
    masters = {entry.fqn for entry in entries if entry.kind == MASTER}
    tied = {alias: kept for alias, kept in model.aliases().items() if alias not in masters}
    entries += _module_rest(model, masters, tied)
    order = {name: index for index, name in enumerate(model.module)}
    entries.sort(key=lambda entry: order.get(entry.fqn, len(order)))
    root = _optimizer_root(place, files)
    mesh = {"world": int(model.root.get("dp_world_size") or 1)}
    return Manifest(
        origin=Origin(
            format="deepspeed-universal",
            path=str(place),
            detail="layout-free",
            versions={"deepspeed": str(model.root.get("ds_version", "unknown"))},
            mesh=mesh,
            precision=_precision(model),
        ),
        entries=keyed(entries),
        files={path: file.source() for path, file in files.items()},
        train=train.state(model, groups=_groups(model, root), steps=steps, scaler_root=root),
        tied=tied,
        frozen=frozenset(entry.fqn for entry in entries if entry.kind == "param"),
        warnings=tuple(_warnings(model)),
        unknown_globals=trust.unknown(set().union(*(file.globals for file in files.values()))),
    )


def _model_states(place: Path) -> ModelStates:
    names = sorted(place.glob("mp_rank_*_model_states.pt")) or sorted(
        place.glob("zero_pp_rank_*_model_states.pt")
    )
    if not names:
        raise IncompleteError(
            place,
            "has zero/ but no *_model_states.pt beside it: the step and the buffers are in it",
            "copy it here from the directory that was converted",
        )
    return open_model(names[0])


def _tensors(folder: Path) -> Iterator[tuple[str, TorchFile, Tensor]]:
    """(kind, file, tensor) of one parameter's folder."""
    paths = sorted(folder.glob("*.pt"))
    if not any(path.name == "fp32.pt" for path in paths):
        raise IncompleteError(folder, "has no fp32.pt", "the conversion was interrupted: repeat it")
    for path in paths:
        file = torch_file.read(path, builders=_ENUM)
        value: Any = file.root.get("param") if isinstance(file.root, dict) else file.root
        if isinstance(value, (int, float)) and path.stem == "step":
            continue
        if not isinstance(value, Tensor):
            raise CorruptError(path, "holds no tensor 'param'")
        yield (MASTER if path.stem == "fp32" else path.stem), file, value


def _module_rest(model: ModelStates, masters: set[str], tied: dict[str, str]) -> Iterator[Entry]:
    """Buffers, and parameters that the optimizer does not hold: only the module has them."""
    for entry in model.whole_tensors(tied):
        if entry.kind == BUFFER or (entry.fqn not in masters and entry.numel):
            yield entry


def _optimizer_root(place: Path, files: dict[str, TorchFile]) -> dict[str, Any]:
    path = place / "zero" / "optimizer_state.pt"
    if not path.is_file():
        return {}
    file = torch_file.read(path, builders=_ENUM)
    files[file.path] = file
    return file.root if isinstance(file.root, dict) else {}


def _groups(model: ModelStates, root: dict[str, Any]) -> list[ParamGroup]:
    shapes = model.shapes
    return [
        ParamGroup(
            train.hyper(group),
            tuple(
                f for index in group.get("params", []) if index < len(shapes) for f in shapes[index]
            ),
        )
        for group in root.get("param_groups", [])
    ]


def _precision(model: ModelStates) -> str:
    config = model.mapping("ds_config")
    for key, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            return name
    return "float32"


def _warnings(model: ModelStates) -> Iterator[str]:
    if model.root.get("module") is None:
        yield "the model states hold no module (pipeline): buffers and tied names are not known"
