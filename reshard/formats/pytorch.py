"""What PyTorch-native training leaves in a directory: DCP, rank files, whole files, in any mixture.

Accelerate, HF Trainer, Lightning, verl, torchtitan, FairScale and plain scripts differ in how they
name these parts; what is in them is told by its form (`state_dict.parts`).

Names: Accelerate 1.15 ``utils/constants.py`` and ``fsdp_utils.py``; transformers 5 ``trainer.py``;
Lightning 2.6 ``strategies/fsdp.py`` (``meta.pt``); verl 0.9 ``fsdp_checkpoint_manager.py``;
torchtitan 0.3 ``components/checkpoint.py``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.errors import CorruptError, IncompleteError, StaleError, UnrecognisedError, UsageError
from reshard.files import small
from reshard.formats import huggingface, rng, stages, torch_file
from reshard.formats.dcp import directory as dcp
from reshard.formats.dcp import hf_shards
from reshard.formats.place import Place, missing_ranks
from reshard.formats.state_dict import assemble, parts, tree
from reshard.formats.state_dict.assemble import Found
from reshard.formats.state_dict.tree import Logical
from reshard.formats.torch_file import TorchFile
from reshard.formats.values import plain
from reshard.manifest import Manifest, Origin
from reshard.model import Told
from reshard.pickles import trust

NAME = "torch"
SUFFIXES = (".pt", ".bin", ".pth", ".ckpt", ".pkl", ".tar")

# Between these words and the suffix stands the rank.
_RANK = re.compile(r"^(.*?(?:rank|shard|rng_state|random_states)[-_]?)(\d+)((?:\.\w+)+)$")
_RANDOM = re.compile(r"rng_state|random_states")  # of a rank, beside whole files too
_NUMBERED = re.compile(r"^(.*?)[-_.]?(\d+)((?:\.[a-z]+)+)$")
_WORLD = re.compile(r"world_size_(\d+)")
_FOLDER = re.compile(r"(pytorch_)?(model|optim(izer)?s?)(_fsdp)?(_\d+)?")
_WEIGHTS = re.compile(r"(adapter_)?model(_\d+)?\.safetensors")
_STRONG = re.compile(  # beside a model, these make a directory a training checkpoint
    r"optim(izer)?(_\d+)?\.(bin|pt|pth)|scheduler(_\d+)?\.(bin|pt)|trainer_state\.json"
    r"|pytorch_model_fsdp(_\d+)?\.bin|random_states_\d+\.pkl|rng_state(_\d+)?\.pth|scaler\.pt"
)
_HF_SHARD = re.compile(r"-\d+-of-\d+\.bin$")
_COPY = "{} is taken to be the same model as {}; it is not read"
_STEP = re.compile(r"(?:global_)?step[-_]?(\d+)")
_COMPANIONS = {
    "scheduler.pt": "scheduler",
    "scheduler.bin": "scheduler",
    "rng_state.pth": "rng",
    "rng_state_0.pth": "rng",
    "random_states_0.pkl": "rng",
}
_TRAINER_STATE = "trainer_state.json"
_ARGUMENTS = "training_args"


def detect(place: Place) -> bool:
    """Whether a sharded training checkpoint's parts lie at a place."""
    if place.chosen:
        return is_rank_file(place.chosen)
    return (
        dcp.detect(place)
        or any(map(hf_shards.is_shard, place.files))
        or any(_STRONG.fullmatch(name) or _RANK.fullmatch(name) for name in place.files)
        or any(_is_dcp_part(name, folder) for name, folder in place.folders.items())
    )


def detect_loosely(place: Place) -> bool:
    """Whether any ``torch.save`` file lies at a place that nothing else recognises.

    Raises:
        CorruptError: a file that is by its name a part of the checkpoint is none.
    """
    if place.chosen:
        return torch_file.is_torch_file(place.path)
    return bool(_torch_files(place))


def is_rank_file(name: str) -> bool:
    """Whether a file's name says that it is one rank's, or one of DCP's."""
    return dcp.is_part(name) or hf_shards.is_shard(name) or _RANK.fullmatch(name) is not None


def read(
    place: Place,
    *,
    key: str | None = None,
    model: str | None = None,
    wrap: str | None = None,
) -> Manifest:
    """Every part at a place, as one manifest; a file that is no rank's, by itself.

    Args:
        key: which state dict is the model, dotted.
        model: what the user says of the model, where the files do not (see `model.describe`).
        wrap: how FSDP 1 wrapped it, or the model of a config beside the checkpoint.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: files contradict each other.
        UnrecognisedError: no weights among the parts, or several models.
        UsageError: a way to wrap, and no model.
    """
    if place.chosen and not is_rank_file(place.chosen):
        saved, trainer = [(Ranks.open({0: place.path}).joined(place), list[str]())], {}
    else:
        place = Place(place.directories)
        saved, trainer = _by_stage(place, key), _trainer_state(place)
    found = saved[0][0]
    origin = Origin(
        format=_framework(place, found),
        path=str(place),
        detail=_detail(place),
        versions=_versions(found),
    )
    told = Told(model, wrap) if model else None
    nearby = _nearby(place, wrap)
    if wrap and not (told or nearby):
        raise UsageError(f"--wrap {wrap}", "needs --model: what was wrapped so?")
    if len(saved) > 1:
        made = _joined(saved, origin, key, told)
    else:
        made = assemble.manifest(
            found, origin, key=key, told=told, nearby=nearby, warnings=saved[0][1]
        )
    train = made.train
    if trainer:
        step = trainer.get("global_step")
        train = replace(
            train,
            step=step if type(step) is int else train.step,
            trainer_state=trainer,
        )
    if train.step is None:
        train = replace(train, step=_step_of(place))
    files = () if place.chosen else rng.files_of(place)
    return replace(made, train=replace(train, rng_files=files))


def with_companions(manifest: Manifest, place: Place) -> Manifest:
    """A DeepSpeed checkpoint with what HF Trainer or Accelerate put beside or above it.

    Raises:
        CorruptError: one of them is damaged.
    """
    for near in (Place(place.directories), place.above()):
        trainer = _trainer_state(near)
        held = {
            kind: path
            for name, path in near.files.items()
            if (kind := _COMPANIONS.get(name)) and torch_file.is_torch_file(path)
        }
        if not trainer and not held:
            continue
        opened = {kind: torch_file.read(path) for kind, path in held.items()}
        values = {kind: plain(tree.of_file(file)) for kind, file in opened.items()}
        train = manifest.train
        unknown = trust.unknown(set().union(*(file.globals for file in opened.values())))
        return replace(
            manifest,
            train=replace(
                train,
                scheduler=train.scheduler or values.get("scheduler"),
                rng=train.rng or values.get("rng"),
                rng_files=rng.files_of(near),
                trainer_state=trainer or None,
            ),
            unknown_globals=tuple(sorted({*manifest.unknown_globals, *unknown})),
        )
    return manifest


@dataclass(frozen=True, slots=True)
class Ranks:
    """The files of one name that ranks saved, opened."""

    files: Mapping[int, TorchFile]
    trees: Mapping[int, Any]

    @classmethod
    def open(cls, files: Mapping[int, Path]) -> Ranks:
        """Read the headers, in rank order.

        Raises:
            CorruptError: a file is damaged.
        """
        opened = {rank: torch_file.read(path) for rank, path in sorted(files.items())}
        return cls(opened, {rank: tree.of_file(file, rank) for rank, file in opened.items()})

    def only(self, ranks: Container[int]) -> Ranks:
        """Those of some ranks."""
        held = {rank: file for rank, file in self.files.items() if rank in ranks}
        return Ranks(held, {rank: self.trees[rank] for rank in held})

    def joined(self, place: object) -> Found:
        """One tree of all.

        Raises:
            CorruptError: the ranks contradict each other.
        """
        opened = list(self.files.values())
        joined = tree.join([*self.trees.values()], [file.path for file in opened])
        return Found(
            root=joined.root,
            where=str(place),
            files={file.path: file.source() for file in opened},
            world=len(opened),
            globals=set().union(*(file.globals for file in opened)),
            differing=joined.differing,
        )


def _by_stage(place: Place, key: str | None) -> list[tuple[Found, list[str]]]:
    """What each pipeline stage saved, as `_collected` has it; one where there is no pipeline."""
    families = {stem: Ranks.open(held) for stem, held in _families(_torch_files(place)).items()}
    found = _stages(families.values(), key)
    if not found:
        return [_collected(place, families)]
    parted = [
        {stem: held for stem, each in families.items() if (held := each.only(ranks)).files}
        for ranks in found
    ]
    return [_collected(place, parted[0]), *((_alone(place, held), []) for held in parted[1:])]


def _alone(place: Place, families: Mapping[str, Ranks]) -> Found:
    """A later stage's files; what lies beside is the first one's."""
    found = Found({}, str(place), {})
    for stem, files in families.items():
        _take(found, None if len(families) == 1 else stem, files.joined(place))
    return found


def _stages(families: Iterable[Ranks], key: str | None) -> list[set[int]]:
    """The ranks of each pipeline stage: none has a parameter of another's; else nothing."""
    names: dict[int, set[str]] = {}
    for family in families:
        if len(family.files) > 1:
            for rank, root in family.trees.items():
                with contextlib.suppress(UnrecognisedError, UsageError):  # no model is in this file
                    names.setdefault(rank, set()).update(parts.find(root, "", key).model)
    ranks: dict[frozenset[str], set[int]] = {}
    for rank, held in names.items():
        ranks.setdefault(frozenset(held), set()).add(rank)
    apart = len(frozenset().union(*ranks)) == sum(map(len, ranks))
    return list(ranks.values()) if len(ranks) > 1 and apart and all(ranks) else []


def _joined(
    saved: Sequence[tuple[Found, list[str]]], origin: Origin, key: str | None, told: Told | None
) -> Manifest:
    """The checkpoint of all pipeline stages, whose optimizers count each its own parameters."""
    made = stages.joined(
        [assemble.manifest(found, origin, key=key, warnings=warnings) for found, warnings in saved]
    )
    if told is None:
        return made
    note = f"the files say which parameters each stage has: --model {told.model} was not needed"
    return replace(made, warnings=(*made.warnings, note))


def _collected(place: Place, families: dict[str, Ranks]) -> tuple[Found, list[str]]:
    """One tree of all parts, each under the name of its file or folder."""
    found = Found({}, str(place), {})
    warnings: list[str] = []
    if dcp.detect(place):
        _take(found, None, dcp.read(place))
    if any(map(hf_shards.is_shard, place.files)):
        _take(found, None, hf_shards.read(place))
    for name, folder in place.folders.items():
        if _is_dcp_part(name, folder):
            _take(found, name, dcp.read(folder))
    weights = _weights_beside(place)
    if "model" in weights and "pytorch_model" in families:
        del families["pytorch_model"]
        warnings.append(_COPY.format("pytorch_model.bin", "the safetensors beside it"))
    for stem, files in families.items():
        alone = len(families) == 1 and not found.root and not weights
        _take(found, None if alone else stem, files.joined(place))
    sharded = any(name.startswith("pytorch_model_fsdp") for name in (*families, *place.folders))
    for stem, path in weights.items():
        if sharded and stem == "model":
            warnings.append(_COPY.format(path.name, "pytorch_model_fsdp*"))
        else:
            _take(found, stem, _safetensors(place, path))
    return found, warnings


def _take(found: Found, name: str | None, part: Found) -> None:
    """Add a part's tree to the whole, at the top where it has no name."""
    added = (
        part.root if name is None and isinstance(part.root, dict) else {name or "state": part.root}
    )
    twice = found.root.keys() & added.keys()
    if twice:
        raise UnrecognisedError(
            found.where,
            f"holds two parts that are called {min(map(str, twice))!r}: no telling which is meant",
            "give the one that you mean by its own path, or move the other away",
        )
    found.root.update(added)
    found.files.update(part.files)
    found.globals |= part.globals
    found.world = max(found.world, part.world)
    prefix = () if name is None else (name,)
    found.differing = [*found.differing, *((*prefix, *path) for path in part.differing)]
    found.notes += part.notes
    found.proved = found.proved and part.proved
    found.ordered = found.ordered and part.ordered
    found.plain_is_buffer = found.plain_is_buffer and part.plain_is_buffer


def _is_dcp_part(name: str, folder: Place) -> bool:
    return _FOLDER.fullmatch(name) is not None and dcp.detect(folder)


def _torch_files(place: Place) -> dict[str, Path]:
    """The ``torch.save`` files, but for shards of an index and the trainer's arguments.

    Raises:
        CorruptError: one that is by its name a part of the checkpoint is none.
    """
    found = {}
    for name, path in place.files.items():
        if path.suffix not in SUFFIXES or _HF_SHARD.search(name) or path.stem == _ARGUMENTS:
            continue
        if torch_file.is_torch_file(path):
            found[name] = path
        elif _STRONG.fullmatch(name) or _RANK.fullmatch(name):
            size = path.stat().st_size
            raise CorruptError(
                path,
                f"is no file of torch.save ({size} bytes)" if size else "is empty",
                "fetch it again; a node-local disk may still hold it",
            )
    return found


def _is_numbered_by_rank(files: Mapping[str, Path]) -> bool:
    """Whether numbers in names are ranks without a word that says so: shards lie in the files.

    ``model_0.pt`` and ``model_1.pt`` may as well be two epochs.
    """
    found = [match for name in files if (match := _NUMBERED.fullmatch(name))]
    if not found or any(map(_RANK.fullmatch, files)):
        return False
    names = torch_file.read(files[found[0].string]).globals
    return any(name.endswith((".ShardedTensor", ".DTensor")) for name in names)


def _families(files: Mapping[str, Path]) -> dict[str, dict[int, Path]]:
    """Rank -> file, by what the files' names have in common; a file by itself is rank 0's.

    Raises:
        IncompleteError: a rank between others, or of a stated world size, has no file.
        CorruptError: two files are of one rank.
    """
    families: dict[str, dict[int, Path]] = {}
    pattern = _NUMBERED if _is_numbered_by_rank(files) else _RANK
    for name, path in files.items():
        match = pattern.fullmatch(name)
        common = re.sub(r"[-_.]?(rank|world_size_\d+)", "", match[1]) if match else path.stem
        rank = int(match[2]) if match else 0
        ranks = families.setdefault(common.strip("_-.") or "rank", {})
        if rank in ranks:
            raise StaleError(
                path,
                f"and {ranks[rank].name} are both rank {rank}'s",
                "files of two runs are mixed: move those of the other away",
            )
        ranks[rank] = path
    for ranks in families.values():
        _check_ranks(ranks)
    sizes = {len(ranks) for ranks in families.values()} - {1}
    if len(sizes) > 1:
        most = max(sizes)
        stem, ranks = next((s, r) for s, r in families.items() if 1 < len(r) < most)
        raise IncompleteError(
            next(iter(ranks.values())).parent,
            f"holds {stem} files of {len(ranks)} ranks, others of {most}",
            "copy the missing files here (a node-local disk may still hold them)",
        )
    return families


def _check_ranks(ranks: Mapping[int, Path]) -> None:
    first = next(iter(ranks.values()))
    stated = {match[1] for path in ranks.values() if (match := _WORLD.search(path.name))}
    if len(stated) > 1:
        raise StaleError(
            first.parent,
            f"holds files of worlds of {' and '.join(sorted(stated))} ranks",
            "files of two runs are mixed: move those of the other away",
        )
    wanted = int(stated.pop()) if stated else max(ranks) + 1
    missing = missing_ranks(ranks, wanted)
    if missing:
        raise IncompleteError(
            first.parent,
            f"holds {first.name}, but no such file of rank {', '.join(map(str, missing))}",
            "copy the missing files here (a node-local disk may still hold them), or give that"
            " node's directory as a second source",
        )
    if max(ranks) >= wanted:
        raise StaleError(
            ranks[max(ranks)], f"is of rank {max(ranks)}, the others of {wanted} ranks"
        )


def _weights_beside(place: Place) -> dict[str, Path]:
    """Full weights in safetensors, by the name of their model."""
    found = {
        Path(name).stem: path for name, path in place.files.items() if _WEIGHTS.fullmatch(name)
    }
    index = huggingface.index_of(place)
    if "model" not in found and index:
        found["model"] = place.files[index]
    return found


def _safetensors(place: Place, path: Path) -> Found:
    made = huggingface.read(Place(place.directories, path.name))
    state = {e.fqn: Logical(e.dtype, e.shape, tuple(e.chunks)) for e in made.entries.values()}
    return Found(state, str(place), dict(made.files), plain_is_buffer=False, ordered=False)


def _step_of(place: Place) -> int | None:
    """The step in the directory's name, or in its parent's (verl: ``global_step_3/actor``)."""
    names = [folder.name for folder in (place, place.above())]
    found = (_STEP.fullmatch(name) for name in names)
    return next((int(match[1]) for match in found if match), None)


def _nearby(place: Place, wrap: str | None) -> Told | None:
    """The model of a transformers config beside the checkpoint; a broken one says nothing."""
    for near in (place, place.folders.get("huggingface") if not place.chosen else None):
        config = near.files.get("config.json") if near else None
        with contextlib.suppress(CorruptError):
            if config and huggingface.is_model_config(config):
                return Told(str(config), wrap)
    return None


def _trainer_state(place: Place) -> dict[str, Any]:
    """HF Trainer's own account of the run, without its log.

    Raises:
        CorruptError: it is not JSON.
    """
    path = place.files.get(_TRAINER_STATE)
    if path is None:
        return {}
    try:
        state = json.loads(small(path))
    except (ValueError, RecursionError) as error:
        raise CorruptError(path, f"is not JSON: {error}") from error
    return {k: v for k, v in state.items() if k != "log_history"} if isinstance(state, dict) else {}


def _framework(place: Place, found: Found) -> str:
    """Who wrote it, as far as the names tell; only messages depend on it."""
    names = [place.chosen] if place.chosen else [*place.files, *place.folders]
    root = found.root if isinstance(found.root, dict) else {}
    is_dcp = any(map(dcp.is_part, names))
    signs = {
        "hf-trainer": _TRAINER_STATE in names,
        "verl": any(re.match(r"model_world_size_\d+_rank_\d+\.pt", name) for name in names),
        "lightning": "pytorch-lightning_version" in root or "meta.pt" in names,
        "accelerate": any(re.match("random_states_|pytorch_model_fsdp", name) for name in names),
        "fairscale": any(
            isinstance(node, dict) and "shard_metadata" in node for node in (root, *root.values())
        ),
        "torchtitan": is_dcp and "train_state" in root,
        "dcp": is_dcp,
        "fsdp": found.world > 1,
    }
    return next((name for name, present in signs.items() if present), NAME)


def _detail(place: Place) -> str:
    if place.chosen:
        return "state dict"
    kinds = []
    if dcp.detect(place) or any(dcp.detect(f) for f in place.folders.values()):
        kinds.append("DCP")
    if any(_RANK.fullmatch(name) and not _RANDOM.match(name) for name in place.files):
        kinds.append("rank files")
    return ", ".join(kinds) or "state dict"


def _versions(found: Found) -> dict[str, str]:
    root = found.root if isinstance(found.root, dict) else {}
    version = root.get("pytorch-lightning_version")
    return {"lightning": str(version)} if isinstance(version, str) else {}
