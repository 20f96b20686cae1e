"""The named checks of a run's history: each finds what training cannot have produced.

A check fails only if the files themselves contradict one another. What also occurs in sound runs (a
learning rate of zero, skipped updates, weights without a gradient) is accepted, or is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter

from reshard.checks.history.movement import Change, Movement
from reshard.checks.history.tags import Tag
from reshard.checks.identity import find_conflicts
from reshard.checks.result import Check, not_applicable
from reshard.training.optimizers import bound_update, is_bounded
from reshard.units import abridge, counted

READABLE = "readable"  # every checkpoint of the run can be read
TENSORS = "tensors"  # all checkpoints have the same tensors
STEPS = "steps"  # steps and updates grow
IDENTICAL = "identical"  # no two saves have the same bits
WEIGHTS = "weights"  # weights changed whose optimizer state changed
MOMENTS = "moments"  # the optimizer state changed of weights that changed
SHARDS = "shards"  # the shards of all ranks changed
UPDATES = "updates"  # no weight changed by more than its learning rate allows
UNCHANGED = "unchanged"  # every trained weight changed between the first save and the last
CONTENT = "content"  # no checkpoint has the content of another run or step
FINITE = "finite"  # no value is NaN or infinite
ALL = (
    *(READABLE, TENSORS, STEPS, IDENTICAL, WEIGHTS, MOMENTS),
    *(SHARDS, UPDATES, UNCHANGED, CONTENT, FINITE),
)

_AWAY = 8.0  # a stray checkpoint is this many times as far from its neighbours as they are apart
_MANY = 64  # elements of a weight whose distance is judged at least: a few can swing to and fro
_FEW = 16  # elements of a file that are needed to judge it
_FOREIGN = 1 / 16  # part of a weight's moments that must be outside of the bound
_SLACK = 10.0  # factor on the bound on updates if the highest learning rate is not stated
_ROUNDING = 1.01  # factor on the bound on updates, for the rounding of its terms
_WEIGHTS_MOVED = attrgetter("expected", "expected_moved")
_SLOTS_MOVED = attrgetter("momenta", "momenta_moved")


@dataclass(slots=True)
class History:
    """The checkpoints of a run that could be read, and the movements of their weights.

    Args:
        tags: oldest first.
        movements: the movements of the weights that all checkpoints have.
        unreadable: name of a checkpoint that cannot be read -> the check that failed.
        interrupted: numbers of directories without a complete checkpoint.
        is_whole: whether every element was read.
        differs: returns whether a weight of the first checkpoint differs from that of the last,
            all of its elements compared.
    """

    tags: Sequence[Tag]
    movements: Sequence[Movement]
    unreadable: Mapping[str, Check] = field(default_factory=dict)
    interrupted: Sequence[int] = ()
    is_whole: bool = False
    differs: Callable[[str], bool] = lambda _fqn: False

    @property
    def trained(self) -> list[Movement]:
        """The movements of trained weights; of all, if no file states which are trained."""
        known = [tag.trained for tag in self.tags if tag.trained is not None]
        if not known:
            return list(self.movements)
        names = frozenset.union(*known)
        return [movement for movement in self.movements if movement.fqn in names]

    def pairs(self) -> Iterator[tuple[int, Tag, Tag]]:
        """Yield each checkpoint with the next one, and the number of the pair."""
        for number, (before, now) in enumerate(pairwise(self.tags)):
            yield number, before, now

    @property
    def span(self) -> str:
        """The checkpoints that were compared, for messages."""
        return (
            f"{counted(len(self.tags), 'checkpoint')}, {self.tags[0].name} to {self.tags[-1].name}"
        )


def check_history(history: History) -> list[Check]:
    """Run all checks."""
    checks = [_check_readable(history)]
    if len(history.tags) < 2:
        reason = "a history needs at least two checkpoints that can be read"
        return [*checks, *(not_applicable(name, reason) for name in ALL if name != READABLE)]
    return [
        *checks,
        _check_tensors(history),
        _check_steps(history),
        _check_identical(history),
        _check_weights(history),
        _check_moments(history),
        _check_shards(history),
        _check_updates(history),
        _check_unchanged(history),
        _check_content(history),
        _check_finite(history),
    ]


def _check_readable(history: History) -> Check:
    total = len(history.tags) + len(history.unreadable)
    check = Check(READABLE, f"{counted(total, 'checkpoint')} of the run")
    for name, failed in history.unreadable.items():
        check.failures.append(f"{name}: {'; '.join(failed.failures)}")
        check.exit_code = max(check.exit_code, failed.exit_code)
    check.warnings += [
        f"step {number}: its directory has no complete checkpoint; the save was interrupted, or"
        " still runs"
        for number in history.interrupted
    ]
    return check


def _check_tensors(history: History) -> Check:
    check = Check(TENSORS, f"names and shapes of {history.span}")
    for _, before, now in history.pairs():
        one, other = ({f: e.shape for f, e in tag.weights.items()} for tag in (before, now))
        lost, gained = [f for f in one if f not in other], [f for f in other if f not in one]
        changed = [f for f in one if f in other and one[f] != other[f]]
        for names, what in (
            (lost, f"{now.name} lacks weights of {before.name}"),
            (gained, f"{now.name} has weights that {before.name} lacks"),
            (changed, f"shapes differ between {before.name} and {now.name}"),
        ):
            check.failures += [f"{what}: {abridge(names)}"] if names else []
    return check


def _check_steps(history: History) -> Check:
    check = Check(STEPS, "steps in the files, and updates of the optimizer")
    for _, before, now in history.pairs():
        if None not in (before.step, now.step) and (now.step or 0) <= (before.step or 0):
            check.failures.append(
                f"{now.name} states step {now.step}, {before.name} step {before.step}: steps must"
                " grow"
            )
        elif _has_stopped(before, now):
            text = (
                f"the optimizer counts {now.updates:g} updates in {now.name}, not more than the"
                f" {before.updates:g} in {before.name} before it"
            )
            # A gradient scaler skips updates without counting them.
            is_scaled = now.manifest.train.scaler is not None
            (check.warnings if is_scaled else check.failures).append(text)
    offsets = [tag.step - tag.number for tag in history.tags if tag.step is not None]
    if offsets.count(0) > len(offsets) / 2:  # names count the same as files
        check.failures += [
            f"{tag.name} states step {tag.step}"
            for tag in history.tags
            if tag.step not in (None, tag.number)
        ]
    if not offsets and all(tag.updates is None for tag in history.tags):
        return not_applicable(STEPS, "no file states a step")
    return check


def _has_stopped(before: Tag, now: Tag) -> bool:
    if before.updates is None or now.updates is None or now.updates > before.updates:
        return False
    one, other = before.manifest.train, now.manifest.train
    if now.updates < before.updates or one.step is None or other.step is None:
        return True
    skipped = (other.skipped_steps or 0) - (one.skipped_steps or 0)
    return not skipped == other.step - one.step > 0


def _check_identical(history: History) -> Check:
    trained, tags = history.trained, history.tags
    how = "every bit" if history.is_whole else "a sample"
    check = Check(IDENTICAL, f"{how} of {counted(len(trained), 'trained weight')}, and their slots")
    contents: dict[tuple[int, ...], Tag] = {}
    for number, tag in enumerate(tags):
        digests = tuple(movement.digests[number] for movement in trained)
        same = contents.setdefault(digests, tag)
        if same is tag or not digests or _may_be_equal(same, tag, trained):
            continue
        check.failures.append(
            f"{tag.name} has the same bits as {same.name} in all trained weights"
            + (" and their optimizer state" if tag.slots else "")
            + ": the saver wrote an earlier state again, or one is a copy of the other"
        )
    if not check.failures:
        check.warnings += _find_kept(history)
    return check


def _find_kept(history: History) -> Iterator[str]:
    # Some optimizers (apex's FusedAdam) count updates for all weights together, and leave out those
    # that had no gradient.
    for number, before, now in history.pairs():
        updated = [e for e in history.trained if _made_updates(before, now, e.fqn)]
        changes = {movement.fqn: movement.changes[number] for movement in updated}
        kept = [
            fqn
            for fqn, change in changes.items()
            if change.expected and change.momenta and not change.moved + change.momenta_moved
        ]
        if kept:
            yield (
                f"{counted(len(kept), 'trained weight')} and their optimizer state have the same"
                f" bits in {before.name} and {now.name}: {abridge(kept)}"
            )


def _may_be_equal(before: Tag, now: Tag, trained: Sequence[Movement]) -> bool:
    """Return whether the weights may be equal: no update in between, or a learning rate of 0."""
    if before.updates is not None and before.updates == now.updates:
        # `_check_steps` judges whether it is sound that all steps in between were skipped.
        return None in (before.step, now.step) or now.step != before.step
    # A learning rate of 0 keeps the weights, but not the moments of an optimizer.
    rates = [tag.find_rate(movement.fqn) for tag in (before, now) for movement in trained]
    return not now.slots and bool(rates) and not any(rate is None or rate for rate in rates)


def _made_updates(before: Tag, now: Tag, fqn: str) -> bool:
    one, other = before.count_updates(fqn), now.count_updates(fqn)
    return one is not None and other is not None and other > one


def _check_weights(history: History) -> Check:
    def is_stale(change: Change) -> bool:
        stale = change.expected > 0 and not change.expected_moved and not change.moved
        return stale and change.momenta_moved > 0

    return _check_both_moved(
        history, WEIGHTS, is_stale, "did not move, although their optimizer state did"
    )


def _check_moments(history: History) -> Check:
    def is_stale(change: Change) -> bool:
        return change.momenta > 0 and not change.momenta_moved and change.moved > 0

    check = _check_both_moved(
        history, MOMENTS, is_stale, "moved, although their optimizer state did not"
    )
    for number, before, now in history.pairs():
        changes = {movement.fqn: movement.changes[number] for movement in history.trained}
        foreign = [fqn for fqn, c in changes.items() if c.foreign > _FOREIGN * c.judged]
        if foreign:
            check.failures.append(
                f"from {before.name} to {now.name}, no updates with these betas turn the moments of"
                f" {counted(len(foreign), 'weight')} into the later ones, which are lost or those"
                f" of other weights: {abridge(foreign)}"
            )
    return check


def _check_both_moved(
    history: History, name: str, is_stale: Callable[[Change], bool], what: str
) -> Check:
    """Check that both changed; ``what`` is the predicate of a finding about weights."""
    check = Check(name, "weights and their optimizer state, from each checkpoint to the next")
    found = False
    for number, before, now in history.pairs():
        updated = [
            movement
            for movement in history.trained
            if movement.changes[number].momenta and _made_updates(before, now, movement.fqn)
        ]
        found = found or bool(updated)
        stale = [movement.fqn for movement in updated if is_stale(movement.changes[number])]
        if stale:
            check.failures.append(
                f"from {before.name} to {now.name}, {len(stale)} of"
                f" {counted(len(updated), 'weight')} {what}: {abridge(stale)}"
            )
    return check if found else not_applicable(name, "no optimizer state, or no update of it")


def _check_shards(history: History) -> Check:
    check = Check(SHARDS, "what each file stores of the weights and slots that moved")
    found = False
    for number, before, now in history.pairs():
        moving = [e for e in history.trained if _made_updates(before, now, e.fqn)]
        for what, tables, count in (
            ("weights", [e.weight_files for e in moving], _WEIGHTS_MOVED),
            ("optimizer state", [e.slot_files for e in moving], _SLOTS_MOVED),
        ):
            files: dict[str, Change] = {}
            for table in tables:
                for (later, file), change in table.items():
                    if later == number + 1:
                        files.setdefault(file, Change()).add(change)
            found = found or len(files) > 1
            check.failures += _find_stale_files(files, count, f"{what} of {before.name}", now.name)
    return check if found else not_applicable(SHARDS, "one file, or no optimizer state")


def _find_stale_files(
    files: Mapping[str, Change], count: Callable[[Change], tuple[int, int]], of: str, now: str
) -> Iterator[str]:
    counts = {file: count(change) for file, change in files.items()}
    if not any(moved for _, moved in counts.values()):
        return  # another check reports it
    for file, (elements, moved) in counts.items():
        if elements >= _FEW and not moved:
            yield f"{file} of {now} has the {of}: none of {elements} elements moved"


def _check_updates(history: History) -> Check:
    check = Check(UPDATES, "changes of weights, against learning rate x updates of Adam")
    found = False
    for number, before, now in history.pairs():
        for movement in history.trained:
            limit = _find_limit(history, movement, number, before, now)
            if limit is None:
                continue
            found = True
            largest = movement.changes[number].largest
            if largest > limit:
                check.failures.append(
                    f"from {before.name} to {now.name}, {movement.fqn} moved by {largest:.3g}; its"
                    f" learning rate and number of updates allow {limit:.3g}"
                )
    return check if found else not_applicable(UPDATES, "no Adam with a known learning rate")


def _find_limit(
    history: History, movement: Movement, number: int, before: Tag, now: Tag
) -> float | None:
    fqn, change = movement.fqn, movement.changes[number]
    group, slots = now.groups.get(fqn), now.slots.get(fqn, {})
    one, other = before.count_updates(fqn), now.count_updates(fqn)
    if group is None or not is_bounded(group.hyper, slots) or one is None or other is None:
        return None
    # A schedule can have been higher between two saves than in either, so the
    # highest known rate counts.
    rates = [rate for tag in history.tags if (rate := tag.find_rate(fqn)) is not None]
    stated = now.find_highest_rate(fqn)
    if not rates or other <= one:
        return None
    slack = 1.0 if stated is not None or len(set(rates)) == 1 else _SLACK
    highest = max([*rates, *([] if stated is None else [stated])])
    if not highest:
        return None
    step = bound_update(group.hyper, change.largest_weight, other)
    narrow = min(tag.weights[fqn].dtype.itemsize for tag in (before, now))
    rounding = 2.0**-8 if narrow < 4 else 2.0**-23
    lost = rounding * change.largest_weight  # an update of 16-bit weights is rounded
    return (other - one) * (highest * step * slack * _ROUNDING + lost)


def _check_unchanged(history: History) -> Check:
    trained = history.trained
    if all(tag.trained is None for tag in history.tags):
        return not_applicable(UNCHANGED, "no file states which weights are trained")
    first, last = history.tags[0], history.tags[-1]
    check = Check(UNCHANGED, f"{counted(len(trained), 'trained weight')}, first to last")
    still = [
        movement
        for movement in trained
        if not any(change.moved for change in movement.changes)
        and _made_updates(first, last, movement.fqn)
        and any(tag.find_rate(movement.fqn) != 0 for tag in history.tags)
    ]
    if trained and len(still) == len(trained):
        return check  # `_check_identical` or `_check_weights` judges a run that stands still
    kept = [movement for movement in still if history.is_whole or not history.differs(movement.fqn)]
    for has_state, why in (
        (False, "they have no gradient, so the loss does not reach them"),
        (True, "their updates are lost, or smaller than the rounding of their dtype"),
    ):
        names = [e.fqn for e in kept if any(c.momenta for c in e.changes) == has_state]
        if names:
            count = counted(len(names), "trained weight")
            check.warnings.append(f"{count} never changed: {abridge(names)}; {why}")
    return check


def _check_content(history: History) -> Check:
    check = Check(CONTENT, "claims of files, and the distance of each checkpoint to its neighbours")
    for tag in history.tags:
        check.failures += [
            f"{tag.name}: {conflict.file}: {conflict.problem}"
            for conflict in find_conflicts(tag.manifest.files)
        ]
    # The first and the last checkpoint lack a neighbour to compare with.
    for number in range(1, len(history.tags) - 1):
        eligible = [e for e in history.trained if e.changes[number].elements >= _MANY]
        away = [movement.fqn for movement in eligible if _is_far(movement, number)]
        if away and 2 * len(away) >= len(eligible):
            before, tag, after = history.tags[number - 1 : number + 2]
            check.failures.append(
                f"{len(away)} of {counted(len(eligible), 'weight')} of {tag.name} are more than"
                f" {_AWAY:g} times as far from {before.name} and {after.name} as these are from"
                " each other: it has the weights of another run or step"
            )
    return check


def _is_far(movement: Movement, number: int) -> bool:
    past = movement.jumps[number - 1]
    squares = min(movement.changes[pair].squares for pair in (number - 1, number))
    return squares > _AWAY**2 * past


def _check_finite(history: History) -> Check:
    check = Check(FINITE, f"weights of {history.span}")
    for number, tag in enumerate(history.tags):
        bad = [movement.fqn for movement in history.movements if movement.not_finite[number]]
        check.failures += (
            [f"{tag.name} has infinite values or NaN in {abridge(bad)}"] if bad else []
        )
    return check
