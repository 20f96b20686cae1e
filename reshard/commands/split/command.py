"""``split`` and ``convert``: a training state for other ranks, in its framework or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from reshard import formats
from reshard.commands.output import Job, convert
from reshard.commands.passes import run_passes
from reshard.commands.reading import Meter
from reshard.commands.split import passes, read_back
from reshard.commands.split.options import SplitOptions
from reshard.commands.split.passes import SplitConversion
from reshard.commands.split.report import SplitReport, describe_split
from reshard.commands.split.request import choose_writer
from reshard.core.manifest import WEIGHT_KINDS, Manifest, Skeleton
from reshard.engine.planning.planner import Plan
from reshard.formats import registry
from reshard.formats.base import Notes
from reshard.formats.request import NO_PROGRAM, LiveTarget

PASSES: Sequence[Callable[[SplitConversion], SplitConversion]] = (
    passes.decode,
    passes.strip_wrappers,
    passes.choose_optimizer,
    passes.leave_out_optimizer,
    passes.resolve_model,
    passes.resolve,
    passes.keep_run,
    passes.compare_copies,  # under the names of the source, which messages name
    passes.rename,
    passes.adapt,  # a state that has the names of the output
    passes.rebalance_batch,  # in the form that `adapt` gives the run's configuration
    passes.choose_random_states,
    passes.build_state,
    passes.lay_out,
)
"""The passes from a source to the files that are written, for every target."""


def split(
    source: formats.Paths,
    destination: str | Path,
    options: SplitOptions | None = None,
    meter: Meter | None = None,
) -> SplitReport:
    """Write the training state of ``source`` for another number of ranks, or in another layout.

    Raises:
        ReshardError: see its subclasses; the destination is then unchanged.
    """
    options = options or SplitOptions()

    def prepare(manifest: Manifest, output: Path, means: list[str]) -> Job[SplitReport]:
        return plan_split(manifest, output, options, report_as=str(destination), means=means)

    kinds = WEIGHT_KINDS if options.without_optimizer else None
    sources = formats.as_paths(source)
    return convert(
        sources, destination, options, prepare, kinds=kinds, is_stamped=True, meter=meter
    )


def plan_split(
    manifest: Manifest,
    destination: Path,
    options: SplitOptions,
    *,
    report_as: str = "",
    means: Sequence[str] = (),
    live: LiveTarget = NO_PROGRAM,
) -> Job[SplitReport]:
    """Run all passes, plan the files of the output and the copies that fill them.

    Args:
        report_as: the destination as the user wrote it.
        means: notes on copies that were averaged.
        live: the program that loads the output, if it runs already.
    """
    opened = SplitConversion(
        manifest=manifest,
        writer=choose_writer(manifest, options),
        source=registry.describe_source(manifest),
        notes=Notes(derived=list(means)),
        options=options,
        destination=destination,
        report_as=report_as,
        live=live,
    )
    split = run_passes(PASSES, opened)
    plan = Plan(split.manifest.entries, _leave_out_zeros(split), options.budget()[1])
    return Job(
        manifest=split.manifest,
        shown=split.manifest,
        skeleton=split.layout.skeleton,
        plan=plan,
        report=describe_split(split, plan),
        check=partial(read_back.check, split),
        save_id=split.state.save.save_id if split.state.save else "",
        stores_masters=split.writer.stores_masters,
    )


def _leave_out_zeros(split: SplitConversion) -> Skeleton:
    """Return the files without entries of zeros, which no source has and no window fills."""
    skeleton, zeros = split.layout.skeleton, split.state.zero_slots
    if not zeros:
        return skeleton
    return replace(skeleton, entries=tuple(e for e in skeleton.entries if e.key not in zeros))
