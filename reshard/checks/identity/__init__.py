"""Evidence that the files of a checkpoint belong together, and to the ranks whose names they have.

claims       compare what files state about themselves: archive names, stamps, steps, ranks
crosscheck   compare values that files hold twice: 16-bit weights and their master weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from reshard.checks.identity.claims import Conflict, compare_claims, find_conflicts
from reshard.core.manifest import Manifest, SourceFile
from reshard.errors import ALTERED, CorruptError
from reshard.training.completeness import check_optimizer
from reshard.units import counted

__all__ = [
    "Conflict",
    "Identity",
    "Trust",
    "check_identity",
    "compare_claims",
    "find_conflicts",
    "refuse_conflicts",
]

Trust = Literal["full", "sampled", "none"]

_REMEDY = (
    "fetch the files of this checkpoint again from the ranks that saved them; if you know that they"
    " belong together, pass --trust none"
)


@dataclass(slots=True)
class Identity:
    """What was compared to establish that the files belong together.

    Args:
        trust: how much was compared.
        evidence: the kinds of evidence that the files contain.
        compared: number of elements that were compared with a second copy.
    """

    trust: Trust
    evidence: list[str] = field(default_factory=list)
    compared: int = 0

    def __str__(self) -> str:
        if self.trust == "none":
            return "not checked (--trust none)"
        texts = list(self.evidence)
        if self.compared:
            texts.append(
                f"{counted(self.compared, 'element')} of weights equal those of their masters"
            )
        return ", ".join(texts) or "the files carry no evidence of the rank or save they belong to"


def refuse_conflicts(files: Mapping[str, SourceFile]) -> list[str]:
    """Refuse files whose claims contradict one another, and return the evidence that they do not.

    Raises:
        CorruptError: two claims contradict each other; the error names the first such file.
    """
    compared = compare_claims(files)
    for conflict in compared.conflicts:
        raise CorruptError(conflict.file, conflict.problem, _REMEDY)
    return compared.evidence


def check_identity(
    manifest: Manifest, trust: Trust = "sampled", *, optimizer: bool = True
) -> Identity:
    """Check that all files of a checkpoint are of one save, each under the name of its own rank.

    Args:
        trust: ``sampled`` compares the claims of all files and about a hundred elements of each
            weight that is stored in two precisions; ``full`` compares all elements of such
            weights; ``none`` compares nothing.
        optimizer: whether the values of its slots are used.

    Raises:
        IncompleteError: a part of the optimizer's state was lost.
        CorruptError: two files make claims that cannot both be true, or hold different values for
            the same weight; or the optimizer has impossible settings or means of squares.
    """
    if trust == "none":
        return Identity(trust)
    check_optimizer(manifest)
    evidence = refuse_conflicts(manifest.files)
    from reshard.checks.identity.crosscheck import compare_masters, find_negative

    compared = compare_masters(manifest, every_element=trust == "full")
    if compared.unequal:
        first = compared.unequal[0]
        raise CorruptError(first.file, first.problem, _REMEDY)
    for problem in find_negative(manifest) if optimizer else ():
        raise CorruptError(manifest.origin.path, problem, ALTERED)
    return Identity(trust, evidence, compared.elements)
