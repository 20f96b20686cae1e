"""The files of a DeepSpeed checkpoint: where they are, which ranks they belong to, what is amiss.

File names: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_get_ckpt_name``,
``_get_rank_zero_ckpt_name``, ``_get_expert_ckpt_name``), ``runtime/pipe/module.py``
(``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import (
    CorruptError,
    IncompleteError,
    StaleError,
    UnrecognisedError,
)
from reshard.files import MAX_POINTER, read_small_file
from reshard.location import Location
from reshard.units import some

NAME = "deepspeed"

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"((?:bf16_)?zero)_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_POINTERS = ("latest", "latest_universal")  # the second is ds_to_universal's
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STATES = (_MODEL, _MODEL3, _OPTIM, _LAYER, _EXPERT, _EXPERT_OPTIM)


@dataclass(slots=True)
class Census:
    """The files of one model-parallel rank in a tag directory, by data-parallel rank."""

    location: Location
    model: dict[int, Path] = field(default_factory=dict)  # {0: ...} where one file serves all ranks
    optim: dict[int, Path] = field(default_factory=dict)
    model_is_sharded: bool = False  # stage 3 names

    def check_ranks(self, world_size: int) -> None:
        """Every rank of ``world_size`` has its files and no other rank has.

        Raises:
            IncompleteError: a rank's file is missing.
            CorruptError: a file of a rank that this run did not have.
        """
        wanted = set(range(world_size))
        for kind, files in (("model", self.model), ("optimizer", self.optim)):
            if not files or (kind == "model" and not self.model_is_sharded):
                continue
            missing, extra = sorted(wanted - set(files)), sorted(set(files) - wanted)
            if missing:
                raise IncompleteError(
                    self.location,
                    f"{kind} states of {world_size} ranks are expected; those of rank"
                    f" {_ranks(missing)} are missing",
                    "copy the missing files here (a node-local disk may still hold them)",
                )
            if extra:
                names = ", ".join(files[rank].name for rank in extra[:4])
                raise StaleError(
                    self.location,
                    f"the checkpoint is of {world_size} ranks, but {kind} states of rank"
                    f" {_ranks(extra)} lie beside it ({names}): left over from another run",
                    "move the extra files away, if the others are the run that you mean",
                )


@dataclass(slots=True)
class Files:
    """The files of one tag directory.

    Args:
        ranks: by model-parallel rank.
        layers: of a pipeline, by layer and tensor-parallel rank.
        experts: by (layer of experts, expert) and model-parallel rank; -1 where no layer is named.
        expert_optim: of training without ZeRO, by expert-parallel and model-parallel rank.
    """

    location: Location
    ranks: dict[int, Census] = field(default_factory=dict)
    layers: dict[int, dict[int, Path]] = field(default_factory=dict)
    experts: dict[tuple[int, int], dict[int, Path]] = field(default_factory=dict)
    expert_optim: dict[tuple[int, int], Path] = field(default_factory=dict)

    @property
    def is_parallel(self) -> bool:
        """Whether any form of model parallelism shows in the names."""
        return bool(set(self.ranks) - {0} or self.layers or self.experts or self.expert_optim)


def _ranks(ranks: list[int]) -> str:
    return some([str(rank) for rank in ranks], 8)


def _is_state_file(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _STATES)


def _is_tag(location: Location) -> bool:
    """Whether a directory holds rank files or the universal form."""
    return _is_universal(location) or any(map(_is_state_file, location.files))


def _is_universal(location: Location) -> bool:
    zero = location.folders.get("zero")
    return zero is not None and _is_zero(zero)


def _is_zero(location: Location) -> bool:
    return any("fp32.pt" in folder.files for folder in location.folders.values())


def _tags(location: Location) -> list[str]:
    return [name for name, folder in location.folders.items() if _is_tag(folder)]


def detect(location: Location) -> bool:
    """Whether the place is a run directory, a tag directory, or a rank file of DeepSpeed.

    Raises:
        CorruptError: the file that names the latest tag is no text.
    """
    if location.chosen:
        return _is_state_file(location.chosen) or location.chosen in _POINTERS
    if _is_tag(location) or _tags(location) or (location.name == "zero" and _is_zero(location)):
        return True
    pointer = _pointer(location)
    return pointer is not None and _named_in(pointer) not in location.folders


def locate(location: Location, tag: str | None = None) -> Location:
    """The tag directory that a place stands for.

    Raises:
        UnrecognisedError: no tag was given where several, or none, are possible.
        CorruptError: the file that names the latest tag is no text.
    """
    location = Location(location.directories)
    if location.name == "zero":
        location = location.above()
    if tag is None and _is_tag(location):
        return location
    tags = _tags(location)
    chosen = tag or _latest(location, tags)
    if chosen in tags:
        return location.folders[chosen]
    found = f"the directory holds {', '.join(tags)}" if tags else "it holds no checkpoint"
    raise UnrecognisedError(
        location.path / chosen,
        f"is not a DeepSpeed checkpoint directory; {found}",
        f"give one of them with --tag, e.g. --tag {tags[-1]}" if tags else "",
    )


def _pointer(location: Location) -> Path | None:
    return next((location.files[name] for name in _POINTERS if name in location.files), None)


def _named_in(pointer: Path) -> str:
    """The tag that a pointer file names.

    Raises:
        CorruptError: it names something else.
    """
    chosen = read_small_file(pointer, MAX_POINTER).decode(errors="replace").strip()
    if chosen and "/" not in chosen and chosen not in (".", ".."):
        return chosen
    raise CorruptError(pointer, f"names {chosen[:80]!r}, which is not a tag", "give --tag")


def _latest(location: Location, tags: list[str]) -> str:
    """The tag that the run's ``latest`` file names; never a guess."""
    pointer = _pointer(location)
    if pointer:
        return _named_in(pointer)
    raise UnrecognisedError(
        location,
        f"has no file 'latest' that says which checkpoint is meant; found {', '.join(tags)}",
        f"give the directory itself ({location.path / tags[-1]}) or --tag {tags[-1]}",
    )


def census(location: Location) -> Files:
    """Sort the files of a tag directory by rank.

    Raises:
        StaleError: files of two runs with different settings.
        IncompleteError: a rank's model states are missing.
    """
    found = Files(location)
    prefixes: dict[str, str] = {}
    for name, path in location.files.items():
        if match := _MODEL.fullmatch(name):
            _rank(found, match[1]).model.setdefault(0, path)
        elif match := _MODEL3.fullmatch(name):
            rank = _rank(found, match[2])
            rank.model_is_sharded = True
            rank.model[int(match[1])] = path
        elif match := _OPTIM.fullmatch(name):
            prefixes.setdefault(match[1], name)
            _rank(found, match[3]).optim[int(match[2])] = path
        elif match := _LAYER.fullmatch(name):
            found.layers.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
        elif match := _EXPERT.fullmatch(name):
            key = int(match[1] or -1), int(match[2])
            found.experts.setdefault(key, {})[int(match[3])] = path
        elif match := _EXPERT_OPTIM.fullmatch(name):
            found.expert_optim[int(match[1]), int(match[2])] = path
    if len(prefixes) > 1:
        raise StaleError(
            location,
            f"holds optimizer states of two runs: {' and '.join(sorted(prefixes.values()))}",
            "move the files of the older run away",
        )
    _check_models(found)
    return found


def _rank(found: Files, digits: str) -> Census:
    return found.ranks.setdefault(int(digits), Census(found.location))


def _check_models(found: Files) -> None:
    """Every model-parallel rank has its model states, of one form."""
    for number in range(max(found.ranks, default=0) + 1):
        rank, name = found.ranks.get(number), f"mp_rank_{number:02d}_model_states.pt"
        if rank is None or not rank.model:
            raise IncompleteError(
                found.location,
                f"{name} (or zero_pp_rank_*_model_states.pt) is missing:"
                " it holds the parameter names and shapes",
                "copy it here from rank 0's disk",
            )
        if rank.model_is_sharded and name in found.location.files:
            raise StaleError(
                found.location,
                f"holds model states of stage 3 (zero_pp_rank_*) and of another stage ({name}):"
                " two runs are mixed",
                "move the files of the older run away",
            )
