"""The random states of ranks in a split: kept, made anew or left out, and never in silence."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.commands.split.options import SplitOptions
from reshard.commands.split.report import SplitReport
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.formats.targets import Target
from reshard.formats.targets.request import Request
from reshard.identity import refuse_conflicts
from reshard.manifest import Manifest
from reshard.training import rng
from reshard.training.rng import RankRng


@dataclass(frozen=True, slots=True)
class Chosen:
    """The states to write, and one sentence of the report; ``how`` is kept, derived or dropped."""

    states: tuple[RankRng, ...] = ()
    how: str = ""
    text: str = ""

    def tell(self, report: SplitReport) -> None:
        """Put the sentence where it belongs."""
        if self.how:
            getattr(report, self.how).append(self.text)


def chosen(manifest: Manifest, request: Request, target: Target, options: SplitOptions) -> Chosen:
    """What becomes of the random states; without a choice they are kept where they can be.

    Raises:
        CorruptError: a file of states is that of another rank.
        IncompleteError: the source has none that could be kept.
        UnsupportedError: the target has no place for them.
        UsageError: states of another number of ranks are to be kept.
    """
    if manifest.train.rng is None and not manifest.train.rng_files and not options.rng:
        return Chosen()
    if options.rng == "drop" or request.weights_only:
        why = "--rng drop" if options.rng == "drop" else "--weights-only"
        return Chosen(how="dropped", text=f"random states ({why})")
    obstacle = _obstacle(manifest, request, target, options)
    if obstacle is not None:
        if options.rng:
            raise obstacle
        return Chosen(how="dropped", text=f"random states: {obstacle.where} {obstacle.problem}")
    if options.trust != "none":
        refuse_conflicts(rng.describe_files(manifest.train.rng_files))
    states = rng.read(manifest.train.rng_files)
    ranks = request.world_size
    if options.rng != "derive":
        return Chosen(states, "kept", f"random states of {ranks} ranks")
    devices = sorted({name for state in states for name in state.devices})
    left = f"; those of {', '.join(devices)} are left out" if devices else ""
    text = f"random states of {ranks} ranks, seeded from rank 0's and the rank{left}"
    return Chosen(rng.derive(states[0], ranks), "derived", text)


def _obstacle(
    manifest: Manifest, request: Request, target: Target, options: SplitOptions
) -> IncompleteError | UnsupportedError | UsageError | None:
    """Why the states cannot be kept or made."""
    files, where = manifest.train.rng_files, manifest.origin.path
    if not target.keeps_rng:
        return UnsupportedError(f"--to {target.name}", "has no place for the states of ranks")
    if not files or not rng.has_states(files[0]):
        return IncompleteError(
            where,
            "holds no file of random states a rank, which alone can be carried",
            "leave them out: --rng drop",
        )
    before, ranks = manifest.origin.world, request.world_size
    if options.rng != "derive" and not len(files) == before == ranks:
        return UsageError(
            where,
            f"holds random states of {len(files)} ranks, which mean nothing at {ranks}",
            "make new ones with --rng derive, or leave them out with --rng drop",
        )
    return None
