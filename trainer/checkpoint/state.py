"""``trainer_state.json``: what a checkpoint says beside the frameworks' own files.

=============  ==================================================================
``format``     1
``world_size`` ranks that wrote it
``progress``   ``step`` (optimizer steps, skipped ones included), ``skipped``,
               ``updates`` (steps that changed the weights: the schedule's position),
               ``samples`` (drawn so far: the data position)
``scaler``     the loss scaler's fields
``settings``   the resolved settings of the run, its paths absolute
``text``       SHA-256 of the text that samples are drawn from
=============  ==================================================================

There is no state of random generators to save: the data order and dropout are functions of
``settings.seed`` and the sample number.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import STATE, find
from trainer.errors import CheckpointError
from trainer.scaling import LossScaler
from trainer.settings import Settings, default_reduction

OF_THE_CALL = frozenset(
    "nproc device threads timeout accumulation nvme_path save overwrite keep resume tag log "
    "progress wall_clock_breakdown parameter_hash save_16bit_model".split()
)
"""Settings that belong to one start of the trainer; a resumed run inherits all others."""

FORMAT = 1
SINCE_FORMAT_1 = frozenset({"tp", "pp", "ep", "pp_schedule"})
"""Settings that a file of this format may not have yet."""


@dataclasses.dataclass
class Progress:
    """How far a run has come; see the table above."""

    step: int = 0
    skipped: int = 0
    updates: int = 0
    samples: int = 0


def document(
    settings: Settings, progress: Progress, scaler: LossScaler, text: str
) -> dict[str, Any]:
    """The content of the file."""
    paths = {"data": settings.data, "model": settings.model}
    found = {name: str(Path(p).resolve()) for name, p in paths.items() if p and Path(p).exists()}
    return {
        "format": FORMAT,
        "world_size": settings.nproc,
        "progress": dataclasses.asdict(progress),
        "scaler": dataclasses.asdict(scaler),
        "settings": {**dataclasses.asdict(settings), **found},
        "text": text,
    }


def deciding(document: dict[str, Any]) -> dict[str, Any]:
    """What of the document decides what a checkpoint holds: not where it lies, nor who asked."""
    settings = document["settings"].items()
    kept = {name: value for name, value in settings if name not in OF_THE_CALL | {"data"}}
    return {**document, "settings": kept}


def read(checkpoint: Path) -> dict[str, Any] | None:
    """Return the document, or None for a checkpoint that another program wrote.

    HF Trainer has another file of this name.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = checkpoint / STATE
    if not path.exists():
        return None
    try:
        state = json.loads(path.read_text())
        if isinstance(state, dict) and "global_step" in state and "format" not in state:
            return None
        _check_types(state)
        Progress(**state["progress"])
        LossScaler(**state["scaler"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", "resume from another --tag"
        ) from error
    return dict(state)


def _check_types(state: dict[str, Any]) -> None:
    """Raise ValueError or KeyError for what is missing or of another type than its field's."""
    if state["format"] != FORMAT:
        raise ValueError(f"format {state['format']}, expected {FORMAT}")
    counts = {**state["progress"], "world_size": state["world_size"]}
    for name, value in counts.items():
        if type(value) is not int:
            raise ValueError(f"{name} is {value!r}, expected a whole number")
    kinds: dict[str, Any] = {"bool": bool, "int": int, "float": (int, float), "str": str}
    for field in dataclasses.fields(Settings):
        word, _, optional = str(field.type).partition(" | ")
        if field.name in SINCE_FORMAT_1 and field.name not in state["settings"]:
            continue  # the run was before them: their defaults are what it did
        value = state["settings"][field.name]
        if not isinstance(value, kinds.get(word, list)) and not (optional and value is None):
            raise ValueError(f"setting {field.name} is {value!r}, expected {field.type}")


def inherited(resume: str, tag: str | None) -> dict[str, Any]:
    """The settings that a resumed run takes over unless others are chosen.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    state = read(find(Path(resume), tag))
    if state is None:
        return {}
    known = {field.name for field in dataclasses.fields(Settings)} - OF_THE_CALL
    settings = {name: value for name, value in state["settings"].items() if name in known}
    plain: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    plain["nproc"] = state["world_size"]
    if plain.get("reduction") == default_reduction(Settings(**plain)):
        del plain["reduction"]  # follows the strategy, also another one
    return plain
