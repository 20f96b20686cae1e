"""Read what is stored beside a checkpoint's tensors: trainer state, scheduler, a model's config."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.containers.json_files import read_json_object
from reshard.containers.pickles import trust
from reshard.containers.torch_detect import is_torch_file
from reshard.core.location import Location, note_outside
from reshard.core.manifest import Manifest, TrainState
from reshard.errors import CorruptError, UnsupportedError, UsageError
from reshard.system.paths import as_path
from reshard.training import copied_files, trainer_run
from reshard.training.companion_files import (
    BATCH_BEFORE,
    CONFIG_FOLDERS,
    is_model_config,
    is_of_diffusers,
)

if TYPE_CHECKING:
    from reshard.containers.torch_objects import TorchFile
    from reshard.model import ModelHint, ModelShapes

_RANDOM = re.compile(r"(?:rng_state|random_states)(?:_(\d+))?\.(?:pth|pkl)")
_EPOCH = re.compile(r"epoch_\d+")
_ENGINE = re.compile(r"pytorch_model(?:_(\d+))?")  # Accelerate's folders of DeepSpeed engines
TRAINER_STATE = "trainer_state.json"
_COMPANIONS = {
    "scheduler.pt": "scheduler",
    "scheduler.bin": "scheduler",
    "rng_state.pth": "rng",
    "rng_state_0.pth": "rng",
    "random_states_0.pkl": "rng",
}


def add_companions(manifest: Manifest, location: Location) -> Manifest:
    """Add the files of HF Trainer or Accelerate that are beside or above a DeepSpeed checkpoint."""
    # HF Trainer and Accelerate have DeepSpeed write its ranks' files into a folder of their own.
    for near in (location.folder, location.get_parent()):
        trainer = read_trainer_state(near)
        paths = {
            kind: path
            for name, path in near.files.items()
            if (kind := _COMPANIONS.get(name)) and is_torch_file(path)
        }
        if not trainer and not paths:
            continue
        opened = {kind: _open(path) for kind, path in paths.items()}
        values = {kind: _convert(file) for kind, file in opened.items()}
        train = manifest.train
        unknown = trust.list_unknown(set().union(*(file.globals for file in opened.values())))
        extended = replace(
            manifest,
            train=replace(
                train,
                scheduler=train.scheduler or values.get("scheduler"),
                rng=train.rng or values.get("rng"),
                rng_files=list_random_files(near),
                trainer_state=trainer or None,
                opaque={**train.opaque, **read_batch_before(near)},
            ),
            unknown_globals=tuple(sorted({*manifest.unknown_globals, *unknown})),
        )
        models = sum(_ENGINE.fullmatch(name) is not None for name in near.folders)
        engine = _ENGINE.fullmatch(location.name)
        number = int(engine[1] or 0) if engine else 0
        return choose_scheduler(add_kept_files(extended, near), number, models)
    return manifest


def _open(path: str | Path) -> TorchFile:
    from reshard.containers import torch_reader  # which most checkpoints need for no file beside

    return torch_reader.read(path)


def _convert(file: TorchFile) -> Any:
    from reshard.state_dict import tree
    from reshard.state_dict.plain_values import to_plain

    return to_plain(tree.convert_file(file))


def is_read(name: str, train: TrainState) -> bool:
    """Return whether a file of HF Trainer or Accelerate is one whose content a state has."""
    kind = "rng" if _RANDOM.fullmatch(name) else _COMPANIONS.get(name)
    return kind is not None and getattr(train, kind) is not None


def choose_scheduler(manifest: Manifest, number: int, models: int) -> Manifest:
    """Return the state with the scheduler of one of several models, as its only one.

    Accelerate numbers models, optimizers and schedulers in the order in which they were prepared
    (1.15 ``checkpointing.py``, ``save_accelerator_state``). Unless there are as many schedulers as
    models, nothing states whose they are, and all stay.

    Args:
        number: of the model that is read, from 0.
        models: how many there are in the checkpoint.
    """
    train = manifest.train
    files = {n: p for n, p in train.kept_files.items() if copied_files.SCHEDULER.fullmatch(n)}
    name = f"scheduler_{number}.bin" if number else "scheduler.bin"
    if models < 2 or len(files) != models or name not in files:
        return manifest
    file, stems = _open(as_path(files[name])), {Path(file_name).stem for file_name in files}
    objects = {key: value for key, value in train.objects.items() if key not in stems}
    if number:
        from reshard.containers.pickles.script_values import SCHEDULER

        own = train.objects.get(Path(name).stem)
        objects = {key: value for key, value in objects.items() if key != SCHEDULER}
        objects |= {} if own is None else {SCHEDULER: own}
    others = {n: path for n, path in train.kept_files.items() if n not in files}
    return replace(
        manifest,
        train=replace(
            train,
            scheduler=_convert(file),
            client={key: value for key, value in train.client.items() if key not in stems},
            objects=objects,
            kept_files={**others, "scheduler.bin": files[name]},
        ),
        files={file.path: file.source(), **manifest.files},
    )


def describe_recipe(location: Location) -> list[str]:
    """Return a note if torchtune stores the optimizer in a directory beside that of the epoch.

    Source: torchtune 0.6.1 ``training/checkpointing/_checkpointer.py`` (``RECIPE_STATE_DIRNAME``).
    """
    if not _EPOCH.fullmatch(location.name) or len(location.directories) > 1:
        return []
    recipe = location.directories[0].parent / "recipe_state" / "recipe_state.pt"
    if not recipe.is_file():
        return []
    note = (
        f"{recipe} contains the optimizer of torchtune's last epoch under torchtune's names, and"
        " was not read: pass its directory as a second source"
    )
    return [note]


def add_kept_files(manifest: Manifest, location: Location) -> Manifest:
    """Add the files that only their framework understands; their values become client state."""
    files = copied_files.find(location)
    opened = {name: _open(path) for name, path in files.items()}
    shown = {
        Path(name).stem: file
        for name, file in opened.items()
        if copied_files.is_accelerates_own(name)
    }
    unknown = trust.list_unknown(set().union(*(file.globals for file in opened.values())))
    train = manifest.train
    values = {stem: _convert(file) for stem, file in shown.items()}
    return replace(
        manifest,
        train=replace(
            train,
            kept_files=files,
            hook_files=copied_files.find_hook_files(location),
            client={**train.client, **values},
        ),
        files={**manifest.files, **{file.path: file.source() for file in opened.values()}},
        unknown_globals=tuple(sorted({*manifest.unknown_globals, *unknown})),
        warnings=(*manifest.warnings, *note_outside(copied_files.list_outside(location))),
    )


def add_run_document(manifest: Manifest, location: Location) -> Manifest:
    """Add our trainer's document of its run, if there is one."""
    for near in (location, location.get_parent()):
        document = read_trainer_state(near)
        if trainer_run.is_document(document):
            return replace(manifest, train=replace(manifest.train, trainer_state=document))
    return manifest


def find_model(location: Location, wrap: str | None) -> ModelHint | None:
    """Return the model of a transformers config beside the checkpoint; None if it is broken.

    Beside an adapter this is the config of its base model, if that is in a directory of this
    machine.
    """
    from reshard.model import ModelHint

    for folder in (".", *(CONFIG_FOLDERS if not location.chosen else ())):
        config = location.find_nested(f"{folder}/config.json")
        # The config is needed only if the files are ambiguous, so reading goes on without a broken
        # one.
        with contextlib.suppress(CorruptError):
            if config and (is_model_config(config) or is_of_diffusers(read_json_object(config))):
                return ModelHint(str(config), wrap, by_blocks=is_verl_with_fsdp_1(location))
    with contextlib.suppress(CorruptError):
        base = _find_base_config(location)
        if base is not None and is_model_config(base):
            return ModelHint(str(base), wrap)
    return None


def _find_base_config(location: Location) -> Path | None:
    # A relative path refers to the working directory of the training, and a name to the Hub: both
    # are unknown here.
    path = location.files.get("adapter_config.json")
    base = read_json_object(path).get("base_model_name_or_path") if path else None
    if not isinstance(base, str) or not base or not as_path(base).is_absolute():
        return None
    config = as_path(base) / "config.json"
    return config if config.is_file() else None


def is_verl_with_fsdp_1(location: Location) -> bool:
    """Return whether verl wrapped the model with FSDP 1, according to its ``fsdp_config.json``."""
    settings = location.files.get("fsdp_config.json")
    return settings is not None and read_json_object(settings).get("FSDP_version") == 1


def read_trainer_state(location: Location) -> dict[str, Any]:
    """Return HF Trainer's or our trainer's document of the run, without its log."""
    path = location.files.get(TRAINER_STATE)
    if path is None:
        return {}
    state = read_json_object(path)
    return {key: value for key, value in state.items() if key != "log_history"}


def describe_trained_model(location: Location, given: str | None) -> ModelShapes | None:
    """Return the model of a run of HF Trainer, given or from the config near the checkpoint.

    Args:
        location: the checkpoint's directory, or DeepSpeed's folder in it.
    """
    for near in (location, location.get_parent()):
        state = read_trainer_state(near)
        if state and not trainer_run.is_document(state):
            if given:
                from reshard.model import ModelHint

                return ModelHint(given).shapes()
            hint = find_model(near, None)
            # transformers may not have the class, or the code of the model.
            with contextlib.suppress(UsageError, UnsupportedError):
                return hint.shapes() if hint else None
    return None


def read_batch_before(location: Location) -> dict[str, dict[str, int]]:
    """Return the run's own number of ranks, batch of a rank and accumulation as opaque state.

    The result is empty if they are unchanged.

    Raises:
        CorruptError: the file is not a JSON object of these numbers.
    """
    path = location.files.get(BATCH_BEFORE)
    if path is None:
        return {}
    from reshard.training.batch import BATCH, STEPS, WORLD

    numbers = read_json_object(path)
    if numbers.keys() - {STEPS} != {BATCH, WORLD} or any(
        type(n) is not int or n < 1 for n in numbers.values()
    ):
        raise CorruptError(
            path,
            f"has {numbers}, expected {BATCH}, {WORLD} and perhaps {STEPS}, all at least 1",
            "delete it",
        )
    return {BATCH_BEFORE: numbers}


def list_random_files(location: Location) -> tuple[str, ...]:
    """Return the files of random states, in rank order, up to the first missing rank."""
    by_rank = {
        int(match[1] or 0): str(path)
        for name, path in location.files.items()
        if (match := _RANDOM.fullmatch(name)) and is_torch_file(path)
    }
    # The position is the rank: after a gap, states would be taken for those of other ranks.
    return tuple(by_rank[rank] for rank in takewhile(by_rank.__contains__, count()))
