"""Compare what the files of a checkpoint state about themselves. Reads no file.

A file of ``torch.save`` keeps the name that it was saved under: the root of its zip archive is the
stem of the path (torch 2.13 ``caffe2/serialize/inline_container.cc``, ``archive_name_``; it is
``archive`` if the file was saved through a stream). A stamp (`reshard.core.stamps`) states the
save, the step, the rank and the world size. Readers add the claims that their format makes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

from reshard.core.manifest import Claim, SourceFile
from reshard.core.stamps import FILE_NAME
from reshard.system.paths import get_stem
from reshard.units import counted

_DIGITS = re.compile(r"\d+")


class Conflict(NamedTuple):
    """Two claims about one file that cannot both be true."""

    file: str
    problem: str


class Comparison(NamedTuple):
    """What a comparison of the claims of all files showed.

    Args:
        conflicts: the contradictions, in file order.
        evidence: the kinds of claims that were compared, each with the number of files.
    """

    conflicts: list[Conflict]
    evidence: list[str]


def compare_claims(files: Mapping[str, SourceFile]) -> Comparison:
    """Compare what the files state about themselves."""
    siblings = _Siblings(files)
    return Comparison(_find_conflicts(files, siblings), _list_evidence(files, siblings))


def find_conflicts(files: Mapping[str, SourceFile]) -> list[Conflict]:
    """Return the contradictions between the claims of the files, in file order."""
    return _find_conflicts(files, _Siblings(files))


def _find_conflicts(files: Mapping[str, SourceFile], siblings: _Siblings) -> list[Conflict]:
    return [*_find_misplaced(files, siblings), *_find_other_saves(files)]


def _list_evidence(files: Mapping[str, SourceFile], siblings: _Siblings) -> list[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)  # of each kind of evidence
    for file in files.values():
        for claim in file.claims:
            if claim.about != FILE_NAME or siblings.has_claimed_name(file, claim):
                counts[claim.about][claim.evidence] += 1
    return [
        f"{about} agrees with {evidence} in {counted(number, 'file')}"
        for about, numbers in counts.items()
        for evidence, number in numbers.items()
        if numbers.total() > 1
    ]


def mask_digits(name: str) -> str:
    """Replace every number in a name, so that the files of all ranks get the same text.

    >>> mask_digits("zero_pp_rank_12_mp_rank_00_optim_states")
    'zero_pp_rank_#_mp_rank_#_optim_states'
    """
    return _DIGITS.sub("#", name)


class _Siblings:
    """The files whose names differ in their numbers alone: those of the ranks of one save."""

    def __init__(self, files: Mapping[str, SourceFile]) -> None:
        masked = {path: mask_digits(path.rpartition("/")[2]) for path in files}
        counts = Counter(masked.values())
        # A file that has no siblings may have been renamed.
        self._stems = {path: get_stem(name) for path, name in masked.items() if counts[name] > 1}

    def has_claimed_name(self, file: SourceFile, claim: Claim) -> bool:
        """Return whether the name that a file claims is its own or that of another rank's file.

        An archive that was saved through a stream or a temporary file has another name altogether,
        which says nothing about ranks.
        """
        stem = self._stems.get(file.path)
        return stem is not None and "#" in stem and mask_digits(claim.value) == stem


def _find_misplaced(files: Mapping[str, SourceFile], siblings: _Siblings) -> Iterator[Conflict]:
    for file in files.values():
        stem = get_stem(file.path)
        for claim in file.claims:
            expected = claim.expected
            if claim.about == FILE_NAME and claim.value != stem:
                expected = stem if siblings.has_claimed_name(file, claim) else expected
            if expected is not None and claim.value != expected:
                yield Conflict(
                    file.path,
                    f"{claim.evidence} states that the {claim.about} is {claim.value}, but"
                    f" {expected} is expected at this path: it is a file of another rank or save",
                )
                break  # one conflict of a file is enough


def _find_other_saves(files: Mapping[str, SourceFile]) -> Iterator[Conflict]:
    stated: dict[str, list[tuple[SourceFile, Claim]]] = defaultdict(list)
    for file in files.values():
        for claim in file.claims:
            if claim.expected is None and claim.about != FILE_NAME:
                stated[claim.about].append((file, claim))
    for about, claims in stated.items():
        # Nothing says which save is the right one: the value of most files counts.
        usual, _ = Counter(claim.value for _, claim in claims).most_common(1)[0]
        witness = next(PurePath(file.path) for file, claim in claims if claim.value == usual)
        for file, claim in claims:
            if claim.value != usual:
                yield Conflict(
                    file.path,
                    f"{claim.evidence} says {about} {claim.value}, but {witness.name} says"
                    f" {about} {usual}: files of two saves are mixed",
                )
