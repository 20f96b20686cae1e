"""``trainer_state.json``: what a checkpoint records beside the files of the engine.

=============  ==================================================================
``format``     1
``world_size`` ranks that wrote it
``progress``   ``step`` (optimizer steps, skipped ones included), ``skipped``,
               ``updates`` (steps that changed the weights: the schedule's position),
               ``samples`` (drawn so far: the data position)
``scaler``     the loss scaler's fields
``settings``   the resolved settings of the run, its paths absolute
``text``       SHA-256 of the training text
=============  ==================================================================

There is no random state to save: the data order and dropout are functions of ``settings.seed`` and
the sample number.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import STATE, find_checkpoint
from trainer.core.errors import CheckpointError, LayoutError
from trainer.core.loop import Progress
from trainer.core.scaling import LossScaler
from trainer.settings import Settings, get_default_reduction

NOT_INHERITED = frozenset(
    "nproc device threads timeout accumulation save async_save overwrite "
    "keep resume tag log "
    "progress parameter_hash".split()
)
"""Settings of one call of the trainer; a resumed run inherits all others."""

FORMAT = 1
_REMEDY = "the file is damaged; resume from another --tag"


def make_document(
    settings: Settings, progress: Progress, scaler: LossScaler, text: str
) -> dict[str, Any]:
    """Return the content of the file."""
    paths = {"data": settings.data, "model": settings.model}
    absolute = {name: str(Path(p).resolve()) for name, p in paths.items() if p and Path(p).exists()}
    return {
        "format": FORMAT,
        "world_size": settings.nproc,
        "progress": dataclasses.asdict(progress),
        "scaler": dataclasses.asdict(scaler),
        "settings": {**dataclasses.asdict(settings), **absolute},
        "text": text,
    }


def read(checkpoint: Path) -> dict[str, Any] | None:
    """Return the document, or None for a checkpoint that another program wrote.

    HF Trainer writes another file of this name.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = checkpoint / STATE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state, dict) and "global_step" in state and "format" not in state:
            return None
        _check_types(state)
        Progress(**state["progress"])
        LossScaler(**state["scaler"])
    except KeyError as error:
        raise CheckpointError(f"{path} has no field {error}", _REMEDY) from error
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", _REMEDY) from error
    return dict(state)


def read_hf_trainer(checkpoint: Path, global_batch: int) -> dict[str, int]:
    """Return the progress that HF Trainer's file of the same name records; empty without one."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        step = state.get("global_step") if isinstance(state, dict) else None
    except (OSError, ValueError, RecursionError):  # none, or `read` says what is wrong with it
        return {}
    if not isinstance(step, int):
        return {}
    return {"step": step, "skipped": 0, "updates": step, "samples": step * global_batch}


def _check_types(state: dict[str, Any]) -> None:
    """Raise ValueError or KeyError for a field that is missing or has a wrong type."""
    if state["format"] != FORMAT:
        raise ValueError(f"format is {state['format']!r}, expected {FORMAT}")
    counts = {**state["progress"], "world_size": state["world_size"]}
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r}, expected a whole number, 0 or more")
    kinds: dict[str, Any] = {"bool": bool, "int": int, "float": (int, float), "str": str}
    for field in dataclasses.fields(LossScaler):
        if not isinstance(state["scaler"][field.name], kinds[str(field.type)]):
            value = state["scaler"][field.name]
            raise ValueError(  # noqa: TRY004 - `read` makes one message of all
                f"scaler.{field.name} is {value!r}, expected {field.type}"
            )
    for field in dataclasses.fields(Settings):
        type_name, _, optional = str(field.type).partition(" | ")
        value = state["settings"][field.name]
        if not isinstance(value, kinds.get(type_name, list)) and not (optional and value is None):
            raise ValueError(f"setting {field.name} is {value!r}, expected {field.type}")
        choices = field.metadata["choices"]
        if choices and value is not None and value not in choices:
            raise ValueError(f"setting {field.name} is {value!r}, expected {' or '.join(choices)}")


def read_inherited(resume: str, tag: str | None) -> dict[str, Any]:
    """Return the settings that a resumed run takes over unless others are chosen.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    try:
        state = read(find_checkpoint(Path(resume), tag))
    except LayoutError:
        return {}  # of another program
    if state is None:
        return {}
    inheritable = {field.name for field in dataclasses.fields(Settings)} - NOT_INHERITED
    settings = {name: value for name, value in state["settings"].items() if name in inheritable}
    values: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()
    }
    values["nproc"] = state["world_size"]
    if values.get("reduction") == get_default_reduction(Settings(**values)):
        del values["reduction"]  # the default follows the strategy, which may change
    return values
