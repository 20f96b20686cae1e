"""Find the files of a DeepSpeed checkpoint, and sort them by rank.

File names: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_get_ckpt_name``,
``_get_rank_zero_ckpt_name``, ``_get_expert_ckpt_name``), ``runtime/pipe/module.py``
(``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from reshard.core.location import Location, name_missing
from reshard.errors import (
    FETCH_MISSING,
    CorruptError,
    IncompleteError,
    StaleError,
    UnrecognisedError,
)
from reshard.system.files import MAX_POINTER, read_small_file
from reshard.units import abridge

NAME = "deepspeed"

MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
SHARDED_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"((?:bf16_)?zero)_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_POINTERS = ("latest", "latest_universal")  # the second is ds_to_universal's
LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Accelerate 1.15 (``accelerator.py``, ``save_state``) has such a tag for each model, and ``latest``
# names the last one.
ACCELERATE_TAG = re.compile(r"pytorch_model(_\d+)?")
_STATES = (MODEL_FILE, SHARDED_MODEL_FILE, _OPTIM, LAYER_FILE, _EXPERT, _EXPERT_OPTIM)


@dataclass(slots=True)
class RankFiles:
    """The files of one model-parallel rank in a tag directory, by data-parallel rank.

    ``model`` has the key 0 alone where one file serves all data-parallel ranks (stages 0 to 2).
    """

    location: Location
    model: dict[int, Path] = field(default_factory=dict)
    optim: dict[int, Path] = field(default_factory=dict)
    model_is_sharded: bool = False  # whether the names are those of stage 3

    def check_ranks(self, world_size: int) -> None:
        """Check that the files are those of ``world_size`` ranks, and of no other rank.

        Raises:
            IncompleteError: a rank's file is missing.
            StaleError: there is a file of a rank that this run did not have.
        """
        expected = set(range(world_size))
        for kind, files in (("model", self.model), ("optimizer", self.optim)):
            if not files or (kind == "model" and not self.model_is_sharded):
                continue
            missing, extra = sorted(expected - set(files)), sorted(set(files) - expected)
            if missing:
                raise IncompleteError(
                    self.location,
                    f"{kind} states of {world_size} ranks are expected by"
                    f" {min(self.model.values()).name}; {name_missing(files, missing)}",
                    FETCH_MISSING,
                )
            if extra:
                names = ", ".join(files[rank].name for rank in extra[:4])
                raise StaleError(
                    self.location,
                    f"the checkpoint has {world_size} ranks, but there are also {kind} states of"
                    f" rank {abridge(list(map(str, extra)), 8)} ({names}): left over from another"
                    " run",
                    "move the extra files away; or, if they belong to the run that you want, move"
                    " the others",
                )


@dataclass(slots=True)
class TagFiles:
    """The files of one tag directory.

    Args:
        ranks: model-parallel rank -> its files.
        layers: pipeline layer -> tensor-parallel rank -> file.
        experts: (MoE layer, expert) -> model-parallel rank -> file; the layer is -1 where the name
            has none.
        expert_optim: (expert-parallel rank, model-parallel rank) -> file; only without ZeRO.
        number: the model-parallel rank that has the number 0 here; see `select`.
    """

    location: Location
    ranks: dict[int, RankFiles] = field(default_factory=dict)
    layers: dict[int, dict[int, Path]] = field(default_factory=dict)
    experts: dict[tuple[int, int], dict[int, Path]] = field(default_factory=dict)
    expert_optim: dict[tuple[int, int], Path] = field(default_factory=dict)
    number: int = 0

    @property
    def has_experts(self) -> bool:
        """Whether the names are those of a mixture of experts."""
        return bool(self.experts or self.expert_optim)

    @property
    def is_parallel(self) -> bool:
        """Whether the names show tensor or pipeline parallelism."""
        return bool(set(self.ranks) - {0} or self.layers)

    def select(self, number: int) -> TagFiles:
        """Return the files of one model-parallel rank, as those of a run that has no other."""
        return TagFiles(
            self.location,
            ranks={0: self.ranks[number]},
            experts={
                expert: {0: ranks[number]}
                for expert, ranks in self.experts.items()
                if number in ranks
            },
            expert_optim={
                (rank, 0): path for (rank, at), path in self.expert_optim.items() if at == number
            },
            number=number,
        )


def _is_state_file(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _STATES)


def _is_tag(location: Location) -> bool:
    zero = location.folders.get("zero")
    return (zero is not None and _is_zero(zero)) or location.has_file(_is_state_file)


def _is_zero(location: Location) -> bool:
    return any("fp32.pt" in folder.files for folder in location.folders.values())


def _list_tags(location: Location) -> list[str]:
    return [name for name, folder in location.folders.items() if _is_tag(folder)]


def detect(location: Location) -> bool:
    """Return whether this is a run directory, a tag directory or a rank file of DeepSpeed."""
    if location.chosen in _POINTERS:
        return detect(location.folder)
    if location.chosen:
        return _is_state_file(location.chosen)
    if (
        _is_tag(location)
        or _list_tags(location)
        or (location.name == "zero" and _is_zero(location))
    ):
        return True
    # A pointer to a missing directory is accepted, so that reading can report what is missing. One
    # that names another program's directory is not DeepSpeed's.
    pointer = location.find_first(_POINTERS)
    return pointer is not None and _read_pointer(pointer, []) not in location.folders


def locate(location: Location, tag: str | None = None) -> Location:
    """Return the tag directory to which a path refers.

    Raises:
        UnrecognisedError: no tag was given, and there are several tags, several models, or none.
        CorruptError: the file that names the latest tag does not hold a tag.
    """
    location = location.folder
    if location.name == "zero" and _is_zero(location):
        location = location.get_parent()
    if tag is None and _is_tag(location):
        return location
    tags = _list_tags(location)
    models = [name for name in tags if ACCELERATE_TAG.fullmatch(name)]
    if tag is None and len(models) > 1:
        raise UnrecognisedError(
            location,
            f"contains the checkpoints of several models: {', '.join(models)}",
            f"choose one with --tag, e.g. --tag {models[0]}",
        )
    chosen = tag or _read_latest(location, tags)
    if chosen in tags:
        return location.folders[chosen]
    content = f"{location.path} contains {', '.join(tags) or 'no checkpoint'}"
    pointer = None if tag else location.find_first(_POINTERS)
    named = f", but {pointer.name!r} names it" if pointer else ""
    raise UnrecognisedError(
        location.path / chosen,
        f"is not a DeepSpeed checkpoint directory{named}; {content}",
        f"choose one with --tag, e.g. --tag {tags[-1]}" if tags else "",
    )


def _read_pointer(pointer: Path, tags: list[str]) -> str:
    chosen = read_small_file(pointer, MAX_POINTER).decode(errors="replace").strip()
    if chosen and "/" not in chosen and chosen not in (".", ".."):
        return chosen
    raise CorruptError(
        pointer,
        "is empty" if not chosen else f"names {chosen[:80]!r}, which is not a tag",
        f"choose a checkpoint with --tag, e.g. --tag {tags[-1]}" if tags else "fetch it again",
    )


def _read_latest(location: Location, tags: list[str]) -> str:
    pointer = location.find_first(_POINTERS)
    if pointer:
        return _read_pointer(pointer, tags)
    if not tags:
        raise UnrecognisedError(location, "is not a DeepSpeed checkpoint directory")
    raise UnrecognisedError(
        location,
        f"has no file 'latest' that names the checkpoint to read; found {', '.join(tags)}",
        f"pass the directory itself ({location.path / tags[-1]}) or --tag {tags[-1]}",
    )


def list_files(location: Location) -> TagFiles:
    """Sort the files of a tag directory by rank.

    Raises:
        StaleError: there are files of two runs with different settings.
        IncompleteError: a rank's model states are missing.
    """
    files = TagFiles(location)
    prefixes: dict[str, str] = {}

    def get_rank_files(digits: str) -> RankFiles:
        return files.ranks.setdefault(int(digits), RankFiles(location))

    for name, path in location.files.items():
        if match := MODEL_FILE.fullmatch(name):
            get_rank_files(match[1]).model.setdefault(0, path)
        elif match := SHARDED_MODEL_FILE.fullmatch(name):
            rank = get_rank_files(match[2])
            rank.model_is_sharded = True
            rank.model[int(match[1])] = path
        elif match := _OPTIM.fullmatch(name):
            prefixes.setdefault(match[1], name)
            get_rank_files(match[3]).optim[int(match[2])] = path
        elif match := LAYER_FILE.fullmatch(name):
            files.layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
        elif match := _EXPERT.fullmatch(name):
            key = int(match[1] or -1), int(match[2])
            files.experts.setdefault(key, {})[int(match[3])] = path
        elif match := _EXPERT_OPTIM.fullmatch(name):
            files.expert_optim[int(match[1]), int(match[2])] = path
    if len(prefixes) > 1:  # one run writes every file with bf16_ or every file without
        raise StaleError(
            location,
            f"contains optimizer states of two runs: {' and '.join(sorted(prefixes.values()))}",
            "move the files of the older run away",
        )
    _check_models(files)
    return files


def advise_copying(files: TagFiles, advice: str) -> str:
    """Return the advice to copy model states, and when DeepSpeed itself does not save them.

    With experts, the first of the ranks that share them write the model states (DeepSpeed 0.19.8
    ``runtime/engine.py``, ``_save_moe_checkpoint``).
    """
    if not files.has_experts:
        return advice
    return (
        f"{advice}. DeepSpeed does not save them at all if tensor-parallel ranks have each expert"
        " whole and outnumber the expert-parallel ranks: save again with a larger ep_size, or with"
        " enable_expert_tensor_parallelism"
    )


def _check_models(files: TagFiles) -> None:
    for number in range(max(files.ranks, default=0) + 1):
        rank, name = files.ranks.get(number), f"mp_rank_{number:02d}_model_states.pt"
        if rank is None or not rank.model:
            raise IncompleteError(
                files.location,
                f"{name} (or zero_pp_rank_*_model_states.pt) is missing: it contains the parameter"
                " names and shapes",
                advise_copying(files, "copy it here from rank 0's disk"),
            )
        if rank.model_is_sharded and name in files.location.files:
            raise StaleError(
                files.location,
                f"contains model states of stage 3 (zero_pp_rank_*) and of another stage ({name}):"
                " files of two runs are mixed",
                "move the files of the older run away",
            )
