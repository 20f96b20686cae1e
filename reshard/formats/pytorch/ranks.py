"""Group the files that ranks saved by their names, and join those of one group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.containers import torch_reader
from reshard.containers.pickle_cache import PickleCache
from reshard.containers.torch_detect import SUFFIXES
from reshard.containers.torch_objects import TorchFile
from reshard.core.location import (
    Location,
    list_missing_ranks,
    name_missing,
)
from reshard.errors import (
    FETCH_MISSING,
    TWO_RUNS,
    IncompleteError,
    StaleError,
    shown,
)
from reshard.formats import huggingface
from reshard.formats.pytorch.directory import (
    OF_WORLD,
    RANDOM,
    is_of_rank,
    is_rank_file,
    match_rank,
)
from reshard.state_dict import sharded_reader, tree
from reshard.state_dict.tree import ParsedTree
from reshard.system.paths import as_path
from reshard.system.threads import map_files_by_key

_ONE_RANK = (
    "If they are here, pass the directory. If the program saved only one rank's file, its tensors"
    " are incomplete; pass another file to read that file alone"
)
_NUMBERED = re.compile(rf"^(.*?)[-_.]?(\d+){OF_WORLD}((?:\.[a-z]+)+)$")
_WORLD = re.compile(r"(?:world_size|(?<=\d)[-_.]?of)[-_.]?(\d+)")
_SHARED = "_shared"  # added to the name of a file that all ranks share


@dataclass(frozen=True, slots=True)
class OpenedRanks:
    """The opened files of one name that ranks saved."""

    files: Mapping[int, TorchFile]
    trees: Mapping[int, Any]

    @classmethod
    def open(
        cls,
        files: Mapping[int, Path],
        *,
        alone: bool = False,
        alike: Mapping[str, str] | None = None,
    ) -> OpenedRanks:
        """Read the headers, in rank order.

        Args:
            alone: whether no other files are part of the checkpoint.
            alike: see `formats.read`; such files share their tree.
        """
        cache, found = PickleCache(), dict[str, TorchFile]()
        savers: dict[str, sharded_reader.Saver | None] = {}
        shared: dict[str, str] = {}

        def open_file(path: Path) -> TorchFile:
            file = torch_reader.read(path, cache=cache)
            savers[file.path] = tree.find_saver(file)
            first = found.get((alike or {}).get(file.path, ""))
            if first is not None and _are_alike(file, first):
                shared[file.path] = first.path
                return replace(file, root=None, records={})  # thousands of ranks would need memory
            return found.setdefault(file.path, file)

        # Threads open the files of one list in any order, so those that others are like come first.
        likened = {*(alike or {}).values()}
        firsts = {rank: path for rank, path in sorted(files.items()) if str(path) in likened}
        opened = map_files_by_key(firsts, open_file)
        opened |= map_files_by_key({r: files[r] for r in sorted(files.keys() - firsts)}, open_file)
        opened = dict(sorted(opened.items()))
        _check_savers(opened, savers, alone=alone)
        trees: dict[str, Any] = {}
        for rank, file in opened.items():
            if file.path not in shared:
                trees[file.path] = tree.convert_file(file, rank)
        paths = {rank: shared.get(file.path, file.path) for rank, file in opened.items()}
        return cls(opened, {rank: trees[path] for rank, path in paths.items()})

    def select(self, ranks: Container[int]) -> OpenedRanks:
        """Return the files of some ranks."""
        files = {rank: file for rank, file in self.files.items() if rank in ranks}
        return OpenedRanks(files, {rank: self.trees[rank] for rank in files})

    def join(self, place: object) -> ParsedTree:
        """Join all files into one tree."""
        opened = list(self.files.values())
        distinct = {id(root): (root, self.files[rank].path) for rank, root in self.trees.items()}
        roots, paths = zip(*distinct.values(), strict=True)
        root, differing = tree.join_trees(roots, paths)
        return ParsedTree(
            root=root,
            where=str(place),
            files={file.path: file.source() for file in opened},
            world=len(opened),
            globals=set().union(*(file.globals for file in opened)),
            differing=differing,
        )


def _are_alike(file: TorchFile, other: TorchFile) -> bool:
    """Return whether two files have equal pickles but for their ranks, and equal positions."""
    positions = ([record.byte_offset for record in one.records.values()] for one in (file, other))
    # One set is shared by all files whose pickles `PickleCache` has found to be equal.
    return file.globals is other.globals and next(positions) == next(positions)


def _is_numbered_by_rank(files: Mapping[str, Path]) -> bool:
    # ``model_0.pt`` and ``model_1.pt`` may as well be two epochs.
    matches = [match for name in files if (match := _NUMBERED.fullmatch(name))]
    if any(map(is_of_rank, files)):
        return False
    # torch_checkpointing 0.1 saves each item of each rank to a file, some of which have no tensors.
    firsts = {match[1]: match.string for match in reversed(matches)}
    return any(
        name.endswith((".ShardedTensor", ".DTensor"))
        for first in firsts.values()
        for name in torch_reader.read(files[first]).globals
    )


def stands_for_ranks(location: Location) -> bool:
    """Return whether the chosen file is one rank's, and those of the other ranks lie beside it."""
    chosen = location.path
    match = _NUMBERED.fullmatch(chosen.name)
    if is_rank_file(chosen.name) or not match:
        return is_rank_file(chosen.name)
    saver = tree.find_saver(torch_reader.read(chosen))
    found = (_NUMBERED.fullmatch(name) for name in location.files)
    numbers = {int(other[2]) for other in found if other and other[1] == match[1]}
    return saver is not None and saver.needed and numbers == {*saver.ranks}


def group_by_family(files: Mapping[str, Path]) -> dict[str, dict[int, Path]]:
    """Group files by the common part of their names: name -> rank -> file; a lone file is rank 0's.

    A file without a number beside files of all ranks is what the ranks share (SpecForge 0.2:
    ``training_state.pt`` has the model, ``training_state_rank0.pt`` an optimizer).

    Raises:
        IncompleteError: a rank between others, or of a stated world size, has no file.
        StaleError: two files belong to one rank, or a file to a rank beyond the stated world size.
    """
    families: dict[str, dict[int, Path]] = {}
    find = _NUMBERED.fullmatch if _is_numbered_by_rank(files) else match_rank
    numbered = {_find_common_part(match) for name in files if (match := find(name))}
    for name, path in files.items():
        match = find(name)
        common = _find_common_part(match) if match else path.stem.strip("_-.") or "rank"
        if not match and common in numbered:
            common += _SHARED
        rank = int(match[2]) if match else 0
        ranks = families.setdefault(common, {})
        if rank in ranks:
            raise StaleError(
                path,
                f"belongs to rank {rank}, and so does {ranks[rank].name}",
                TWO_RUNS,
            )
        ranks[rank] = path
    for ranks in families.values():
        _check_ranks(ranks)
    # A part with one file, such as a scheduler, belongs to rank 0. Other ranks need none.
    sizes = {len(ranks) for ranks in families.values()} - {1}
    if len(sizes) > 1:
        most = max(sizes)
        ranks = next(r for r in families.values() if 1 < len(r) < most)
        raise IncompleteError(
            next(iter(ranks.values())).parent,
            f"contains files of {most} ranks, but"
            f" {name_missing(ranks, [rank for rank in range(most) if rank not in ranks])}",
            FETCH_MISSING,
        )
    return families


def find_lost_files(location: Location) -> str:
    """Return "FILE is missing" for ranks that other files or tensors name; empty if there are none.

    It explains why tensors are not whole, and proves nothing: rank 0 alone may save a part.
    """
    find = match_rank if any(map(is_of_rank, location.files)) else _NUMBERED.fullmatch
    families: dict[str, dict[int, Path]] = {}
    for name, path in location.files.items():
        # Programs save shards as safetensors under the names of torch.save's files.
        stem, suffix = path.stem, ".pt" if path.suffix == ".safetensors" else path.suffix
        match = find(f"{stem}{suffix}") if suffix in SUFFIXES else None
        if match and not huggingface.is_shard(name) and not RANDOM.match(name):
            families.setdefault(_find_common_part(match), {})[int(match[2])] = path
    most = max(map(len, families.values()), default=0)
    lost = []
    for ranks in families.values():
        world = max(most, *(_count_savers(path) for path in ranks.values()))
        missing = list_missing_ranks(ranks, range(world)) if max(ranks) < world > 1 else []
        if missing:
            lost.append(name_missing(ranks, missing))
    return "; ".join(lost)


def _count_savers(path: Path) -> int:
    saver = None if path.suffix == ".safetensors" else tree.find_saver(torch_reader.read(path))
    return saver.world if saver else 1


def refuse_copies(families: Mapping[str, OpenedRanks]) -> None:
    """Check that a file that the ranks share has no key of a rank's file.

    Raises:
        StaleError: it has one. It can be a copy of a rank's file, or be of another run.
    """
    for stem, ranks in families.items():
        shared = families.get(f"{stem}{_SHARED}")
        if shared is None:
            continue
        file, root = next(iter(shared.files.values())), next(iter(shared.trees.values()))
        for rank, own in ranks.trees.items():
            if not (isinstance(root, dict) and isinstance(own, dict)):
                continue
            both = [key for key in root if key in own]
            if both:
                raise StaleError(
                    file.path,
                    f"has {shown(both[0])}, and so has {Path(ranks.files[rank].path).name}",
                    TWO_RUNS,
                )


def _find_common_part(match: re.Match[str]) -> str:
    common = re.sub(r"[-_.]?(rank|world_size_\d+)", "", match[1])
    return common.strip("_-.") or "rank"


def _check_savers(
    files: Mapping[int, TorchFile],
    found: Mapping[str, sharded_reader.Saver | None],
    *,
    alone: bool,
) -> None:
    stated = {rank: found[file.path] for rank, file in files.items()}
    savers = {rank: saver for rank, saver in stated.items() if saver is not None}
    if not savers:
        return
    usual, _ = Counter(saver.world for saver in savers.values()).most_common(1)[0]
    by_rank: dict[int, TorchFile] = {}
    for number, saver in savers.items():
        file = files[number]
        if saver.world != usual:
            raise StaleError(
                file.path,
                f"has tensors of a run of {saver.world} ranks, but the other files of {usual}",
                TWO_RUNS,
            )
        other = by_rank.setdefault(saver.rank, file)
        if other is not file:
            raise StaleError(
                file.path,
                f"has the tensors of rank {saver.rank}, and so has {as_path(other.path).name}",
                "one of them is a copy, or of another run: fetch both again from their ranks",
            )
    path = as_path(next(iter(files.values())).path)
    are_ranks = alone or len(files) > 1 or is_of_rank(path.name)
    missing = list_missing_ranks(by_rank, next(iter(savers.values())).ranks)
    if (
        missing
        and are_ranks
        and len(savers) == len(files)
        and all(saver.needed for saver in savers.values())
    ):
        raise IncompleteError(
            path.parent,
            f"contains {path.name} of a run of {usual} ranks, but"
            f" {name_missing({rank: as_path(f.path) for rank, f in by_rank.items()}, missing)}",
            FETCH_MISSING if is_of_rank(path.name) else f"{FETCH_MISSING}. {_ONE_RANK}",
        )


def _are_all_of_run(ranks: Mapping[int, Path]) -> bool:
    """Return whether the tensors state that no other ranks saved them, as a part of a program's."""
    saver = tree.find_saver(torch_reader.read(next(iter(ranks.values()))))
    return saver is not None and saver.world == len(ranks) and ranks.keys() == set(saver.ranks)


def _check_ranks(ranks: Mapping[int, Path]) -> None:
    first = next(iter(ranks.values()))
    stated = {match[1] for path in ranks.values() if (match := _WORLD.search(path.name))}
    if len(stated) > 1:
        raise StaleError(
            first.parent,
            f"contains files of runs with {' and '.join(sorted(stated))} ranks",
            TWO_RUNS,
        )
    world = int(stated.pop()) if stated else max(ranks) + 1
    missing = list_missing_ranks(ranks, range(world))
    if missing and not _are_all_of_run(ranks):
        raise IncompleteError(
            first.parent,
            f"contains {first.name}, but {name_missing(ranks, missing)}",
            FETCH_MISSING,
        )
    if max(ranks) >= world:
        raise StaleError(
            ranks[max(ranks)],
            f"belongs to rank {max(ranks)}, but the others to a run of {world} ranks",
            TWO_RUNS,
        )
