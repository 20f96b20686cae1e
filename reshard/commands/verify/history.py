"""``verify --history``: the checkpoints of one run compared with one another."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import formats
from reshard.checks.history.checks import READABLE, History, check_history
from reshard.checks.history.movement import Movement, count_bytes, measure
from reshard.checks.history.tags import Tag
from reshard.checks.opening import open_manifest
from reshard.checks.result import Check
from reshard.commands.lines import LISTED, format_row, format_table
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter, check_trust, open_progress
from reshard.commands.verify.options import VerifyOptions
from reshard.commands.verify.report import VerifyReport
from reshard.commands.verify.single import run_deep_checks, run_quick_checks
from reshard.core import keys
from reshard.core.location import Location
from reshard.errors import UsageError
from reshard.formats import refused_paths, run_directory
from reshard.model import ModelHint
from reshard.system.files import SourceFiles, check_unchanged
from reshard.system.paths import as_path
from reshard.tensors.lazy import find_first_difference
from reshard.units import counted

if TYPE_CHECKING:
    from reshard.core.manifest import Manifest
    from reshard.html.page import Page

_OF_ONE_CHECKPOINT = ("tag", "write_manifest", "against", "include", "ignore")  # options
_LISTED_TAGS = 2 * LISTED
_LAYER = re.compile(r"(.*?\.|)(\d+)(?:\..*|$)")
_MOST_GROUPS = 12  # in the chart
_COLUMNS = ("checkpoint", "step", "updates", "lr", "moved", "change", "largest", "moments moved")


@dataclass(slots=True, repr=False)
class HistoryReport(VerifyReport):
    """The result of `verify` with ``history``.

    Args:
        tags: for each checkpoint: model (if the run trains several), name, number, step, updates,
            lr; and what changed since the one before: the fractions of weights and of moments that
            moved, the root mean square of the changes relative to that of the weights, and the
            largest change.
        groups: layer group -> for each checkpoint but the first, the relative change per update.
    """

    tags: list[dict[str, Any]] = field(default_factory=list)
    groups: dict[str, list[float | None]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {
            **VerifyReport.to_dict(self),
            "history": True,
            "checkpoints": self.tags,
            "groups": self.groups,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: the verdict, a table of checkpoints, and the checks."""
        first, *rest = VerifyReport.lines(self)
        yield first
        shown = self.tags[-_LISTED_TAGS:]
        if len(shown) < len(self.tags):
            newest = f"the newest {len(shown)} of {len(self.tags)}"
            yield format_row("", f"{newest} (all of them with --json)")
        yield from format_table([_COLUMNS, *map(_format_tag, shown)])
        yield from rest


def check_run(
    sources: Sequence[Path], options: VerifyOptions, meter: Meter | None
) -> HistoryReport:
    """Compare the checkpoints of a run with one another.

    Args:
        sources: the directory of the run, or one for each node.

    Raises:
        ReshardError: there is no run, or a file cannot be read.
    """
    began = time.perf_counter()
    options.refuse_beside("--history", *_OF_ONE_CHECKPOINT)
    check_page(options, sources)
    mode = "deep" if options.deep else "sampled"
    report = HistoryReport(str(sources[0]), f"{mode} history", options.given())
    directory = refused_paths.find_run(Location.from_paths(sources))
    checks: dict[str, list[Check]] = {}
    for model, history in _open(directory, sources, options).items():
        if history.tags:
            _measure(history, options, meter)
            _add_model(report, model, history)
        alone = [_check_alone(tag, report, options, meter) for tag in history.tags]
        checks[model] = _add_checks(check_history(history), history.tags, alone)
    report.checks = _join_checks(checks)
    if lost := run_directory.describe_lost_pointer(directory):
        report.check(READABLE).failures.append(f"{lost}: no program resumes from this run")
    report.seconds = time.perf_counter() - began
    write_page(options, lambda: _build_page(report))
    return report


def _add_model(report: HistoryReport, model: str, history: History) -> None:
    origin = history.tags[-1].manifest.origin
    report.format, report.detail = origin.format, origin.detail
    report.tags += [{**tag, "model": model} for tag in _describe_tags(history)]
    for group, changes in _describe_groups(history).items():
        report.groups[f"{model}: {group}" if model else group] = changes
    report.bytes_read += sum(movement.bytes_read for movement in history.movements)


def _join_checks(checks: Mapping[str, Sequence[Check]]) -> list[Check]:
    if len(checks) == 1:
        return list(*checks.values())
    joined = []
    for same in zip(*checks.values(), strict=True):
        by_model = dict(zip(checks, same, strict=True))
        joined.append(
            Check(
                same[0].name,
                "; ".join(f"{model}: {check.looked_at}" for model, check in by_model.items()),
                [
                    f"{model}: {text}"
                    for model, check in by_model.items()
                    for text in check.failures
                ],
                [
                    f"{model}: {text}"
                    for model, check in by_model.items()
                    for text in check.warnings
                ],
                applies=any(check.applies for check in same),
                exit_code=max([check.exit_code for check in same if check.failures], default=1),
            )
        )
    return joined


def _check_alone(
    tag: Tag, report: HistoryReport, options: VerifyOptions, meter: Meter | None
) -> list[Check]:
    manifest = tag.manifest
    shapes = ModelHint(options.model, options.wrap).shapes() if options.model else None
    paths = [as_path(path) for path in manifest.files]
    own = VerifyReport(tag.name, report.mode)
    own.checks = run_quick_checks(manifest, paths if len(paths) == 1 else [], options, shapes)
    if options.deep:
        run_deep_checks(manifest, own, options, shapes, None, meter)
    report.bytes_read += own.bytes_read
    return own.checks


def _add_checks(
    checks: Sequence[Check], tags: Sequence[Tag], alone: Sequence[Sequence[Check]]
) -> list[Check]:
    found = {check.name: check for check in checks}
    for same in zip(*alone, strict=True):
        if same[0].name not in found and not any(check.applies for check in same):
            continue
        own = found.setdefault(
            same[0].name,
            Check(same[0].name, same[-1].looked_at, applies=any(check.applies for check in same)),
        )
        for tag, check in zip(tags, same, strict=True):
            own.failures += [f"{tag.name}: {text}" for text in check.failures]
            own.warnings += [f"{tag.name}: {text}" for text in check.warnings]
            if check.failures:
                own.exit_code = max(own.exit_code, check.exit_code)
    return list(found.values())


def _open(
    directory: Location, sources: Sequence[Path], options: VerifyOptions
) -> dict[str, History]:
    runs = run_directory.list_runs(directory, refused_paths.is_checkpoint)
    count = min(map(len, runs.values()), default=0)
    if count < 2:
        raise UsageError(
            sources[0],
            f"has {counted(count, 'checkpoint')} with a number in the name; a history needs two",
            "pass the directory of a run that keeps several checkpoints",
        )
    return {model: _read_all(found, sources, options) for model, found in runs.items()}


def _read_all(
    found: Mapping[int, Location | None], sources: Sequence[Path], options: VerifyOptions
) -> History:
    tags: list[Tag] = []
    unreadable: dict[str, Check] = {}
    for number, place in found.items():
        if place is None:
            continue
        path = str(place)
        above = next((f"{source}/" for source in sources if path.startswith(f"{source}/")), "")
        name = path.removeprefix(above)
        manifest = _read(place, options)
        if isinstance(manifest, Check):
            unreadable[name] = manifest
        else:
            tags.append(Tag(name, number, manifest))
    interrupted = [number for number, place in found.items() if place is None]
    return History(tags, (), unreadable, interrupted, options.deep)


def _read(place: Location, options: VerifyOptions) -> Manifest | Check:
    arguments = {**options.reader_arguments(), "tag": None}

    def read() -> Manifest:
        manifest = formats.read(place.paths, prove=False, **arguments)
        check_trust(manifest, options.allow_pickle)
        return manifest

    manifest = open_manifest(read)
    return manifest if isinstance(manifest, Check) else keys.edit(manifest, keys.Edits()).manifest


def _measure(history: History, options: VerifyOptions, meter: Meter | None) -> None:
    tags = history.tags
    shapes = [{fqn: entry.shape for fqn, entry in tag.weights.items()} for tag in tags]
    names = [fqn for fqn, shape in shapes[-1].items() if all(s.get(fqn) == shape for s in shapes)]
    names = [fqn for fqn in names if not any(fqn in tag.buffers for tag in tags)]
    workers, _ = options.budget()
    nbytes = count_bytes(tags, names, every_element=options.deep)
    with open_progress(meter, nbytes) as progress:
        history.movements = measure(
            tags, names, every_element=options.deep, workers=workers, progress=progress
        )
    for tag in tags:
        check_unchanged(tag.manifest.files)
    history.differs = lambda fqn: _differs(tags[0], tags[-1], fqn)


def _differs(first: Tag, last: Tag, fqn: str) -> bool:
    with SourceFiles() as pool:
        return find_first_difference(pool, first.weights[fqn], last.weights[fqn]) is not None


def _describe_tags(history: History) -> Iterator[dict[str, Any]]:
    trained = history.trained
    for number, tag in enumerate(history.tags):
        rates = [rate for movement in trained if (rate := tag.find_rate(movement.fqn)) is not None]
        known: dict[str, Any] = {
            "name": tag.name,
            "number": tag.number,
            "step": tag.step,
            "updates": tag.updates,
            "lr": max(rates, default=None),
        }
        if number:
            changes = [movement.changes[number - 1] for movement in trained]
            known |= {
                "moved": _divide(sum(c.moved for c in changes), sum(c.elements for c in changes)),
                "change": _compare_size(trained, number),
                "largest": _drop_not_finite(max((c.largest for c in changes), default=0.0)),
                "moments_moved": _divide(
                    sum(c.momenta_moved for c in changes), sum(c.momenta for c in changes)
                ),
            }
        yield known


def _compare_size(movements: Sequence[Movement], number: int) -> float | None:
    changes = [movement.changes[number - 1] for movement in movements]
    squares, sizes = (sum(c.squares for c in changes), sum(c.weight_squares for c in changes))
    return _drop_not_finite(sqrt(squares / sizes)) if sizes and isfinite(squares / sizes) else None


def _describe_groups(history: History) -> dict[str, list[float | None]]:
    groups = _group_layers(movement.fqn for movement in history.trained)
    members: dict[str, list[Movement]] = {}
    for movement in history.trained:
        members.setdefault(groups[movement.fqn], []).append(movement)
    found: dict[str, list[float | None]] = {name: [] for name in members}
    for number, before, now in history.pairs():
        updates = (now.updates or now.number) - (before.updates or before.number)
        for name, movements in members.items():
            size = _compare_size(movements, number + 1)
            found[name].append(None if size is None else size / max(updates, 1))
    return found


def _group_layers(names: Iterable[str]) -> dict[str, str]:
    """Return the group of each weight: its layer, several layers, or its module.

    >>> groups = _group_layers([*(f"m.layers.{number}.w" for number in range(13)), "head.weight"])
    >>> groups["m.layers.0.w"], groups["m.layers.1.w"], groups["m.layers.12.w"]
    ('m.layers.0-1', 'm.layers.0-1', 'm.layers.12')
    >>> groups["head.weight"]
    'head'
    """
    names = list(names)
    found = {name: _LAYER.fullmatch(name) for name in names}
    others = {name: name.rpartition(".")[0] or name for name in names if not found[name]}
    if len(set(others.values())) > _MOST_GROUPS:
        others = dict.fromkeys(others, "others")
    layers: dict[str, set[int]] = {}
    for match in found.values():
        if match:
            layers.setdefault(match[1], set()).add(int(match[2]))
    ranges = {stack: _join(sorted(numbers)) for stack, numbers in layers.items()}
    return {
        name: f"{match[1]}{ranges[match[1]][int(match[2])]}"
        if (match := found[name])
        else others[name]
        for name in names
    }


def _join(numbers: list[int]) -> dict[int, str]:
    size = -(-len(numbers) // _MOST_GROUPS)
    ranges: dict[int, str] = {}
    for start in range(0, len(numbers), size):
        part = numbers[start : start + size]
        text = str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        ranges |= dict.fromkeys(part, text)
    return ranges


def _divide(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _drop_not_finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _format_tag(tag: dict[str, Any]) -> tuple[str, ...]:
    return (
        tag["name"],
        _format(tag["step"], "d"),
        _format(tag["updates"], "g"),
        _format(tag["lr"], ".3g"),
        _format(tag.get("moved"), ".1%"),
        _format(tag.get("change"), ".2e"),
        _format(tag.get("largest"), ".2e"),
        _format(tag.get("moments_moved"), ".1%"),
    )


def _format(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _build_page(report: HistoryReport) -> Page:
    from reshard.html import check_pages

    return check_pages.build_history_page(report.to_dict())
