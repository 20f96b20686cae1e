"""The quick checks, which read no tensor data.

The readers already refuse a checkpoint that cannot be read: a missing rank, mixed steps, a hole.
These checks also report problems that do not prevent a conversion.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from statistics import median

from reshard import units
from reshard.box import Index
from reshard.checks import names
from reshard.checks.result import Check, not_applicable
from reshard.containers.json_files import read_json_object
from reshard.errors import CorruptError
from reshard.formats import placeholders, registry, run
from reshard.identity import compare_claims
from reshard.identity.claims import mask_digits
from reshard.identity.counters import find_counter_conflicts
from reshard.location import Location
from reshard.manifest import BUFFER, PARAM, WEIGHT_KINDS, Entry, Manifest
from reshard.model import ModelShapes
from reshard.model.published import Published
from reshard.paths import as_path
from reshard.training import optimizers
from reshard.units import counted, some

_DIGITS = re.compile(r"\d+")
_SUGGESTED = 200  # names that are searched for a similar one
_LONG_APART = timedelta(days=1)
_UNFINISHED = re.compile(r"\.(tmp|temp|part|partial|incomplete)$|\.partial-[0-9a-f]+$")
_RATES = (
    "lr",
    "initial_lr",
    "weight_decay",
)  # settings that differ between groups of one optimizer


def check_headers(manifest: Manifest) -> Check:
    """Report the number and size of the files, all of which the readers have opened."""
    sizes = units.show_bytes(sum(file.nbytes for file in manifest.files.values()))
    return Check(names.HEADERS, f"{counted(len(manifest.files), 'file')}, {sizes}")


def check_safe(manifest: Manifest, allowed: Sequence[str]) -> Check:
    """Check that pickles name only known or allowed classes."""
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    check = Check(names.SAFE, "the classes that the files name", exit_code=5)
    if refused:
        allow = " ".join(f"--allow-pickle {name}" for name in refused)
        check.failures.append(
            f"{', '.join(refused)}: no known framework writes these classes; if one is your own,"
            f" pass {allow}"
        )
    return check


def check_complete(manifest: Manifest) -> Check:
    """Check that every listed tensor has a value; the readers have found every rank's files."""
    world = manifest.origin.world
    check = Check(
        names.COMPLETE,
        f"{counted(world, 'rank')}, {counted(len(manifest.entries), 'tensor')}",
    )
    check.failures += [f"{fqn} is listed, but no rank stores it" for fqn in manifest.absent]
    check.failures += [
        f"{fqn} has no elements: it is a placeholder of ZeRO 3"
        for fqn in placeholders.find(manifest)
    ]
    return check


def check_agreement(manifest: Manifest) -> Check:
    """Report what the files of all ranks agree on, which the readers have compared."""
    versions = ", ".join(f"{name} {number}" for name, number in manifest.origin.versions.items())
    step = "" if manifest.train.step is None else f"step {manifest.train.step}"
    what = ", ".join(filter(None, (step, versions, "names, shapes, groups")))
    if len(manifest.files) == 1:
        return not_applicable(names.AGREEMENT, "one file")
    return Check(names.AGREEMENT, what, exit_code=3)


def check_index(manifest: Manifest) -> Check:
    """Check the total size in an index; the readers have compared its files and tensors."""
    folders = {as_path(path).parent for path in manifest.files}
    is_model = registry.describe_source(manifest).weights_only
    indexes = [path for folder in folders for path in folder.glob("*.index.json") if is_model]
    metadata = [path for folder in folders for path in folder.glob("*.metadata")]
    if not indexes and not metadata:
        return not_applicable(names.INDEX, "no index")
    shown = some(sorted(path.name for path in (*indexes, *metadata)))
    check = Check(names.INDEX, f"{shown}: each file and tensor, both ways", exit_code=3)
    nbytes = sum(entry.nbytes for entry in manifest.of_kind(PARAM, BUFFER))
    for path in indexes:
        check.warnings += _check_total_size(path, nbytes)
    return check


def _check_total_size(path: Path, nbytes: int) -> Iterator[str]:
    try:
        stated = read_json_object(path).get("metadata", {}).get("total_size")
    except (CorruptError, AttributeError):
        return  # the reader used another file, or this one states no size
    if isinstance(stated, int) and stated != nbytes:
        yield f"{path.name} states that its files contain {stated} bytes; they contain {nbytes}"


def check_coverage(manifest: Manifest) -> Check:
    """Report the numbers of elements and blocks; `manifest.check` has proved their coverage."""
    numel = sum(entry.numel for entry in manifest.entries.values())
    chunks = sum(len(entry.chunks) for entry in manifest.entries.values())
    text = f"{units.show_count(numel)} elements in {counted(chunks, 'stored block')}"
    return Check(names.COVERAGE, text, exit_code=3)


def check_ranks(manifest: Manifest) -> Check:
    """Check that no file states another rank, step or save than its name and directory."""
    compared = compare_claims(manifest.files)
    if not compared.evidence:
        return not_applicable(names.RANKS, "no file states its rank or save")
    check = Check(names.RANKS, ", ".join(compared.evidence), exit_code=3)
    check.failures += [f"{each.file}: {each.problem}" for each in compared.conflicts]
    return check


def check_stale(manifest: Manifest, sources: Sequence[Path]) -> Check:
    """Check that no files of another save, or of an interrupted one, are beside the files."""
    if len(sources) == 1 and sources[0].is_file() and len(manifest.files) == 1:
        return not_applicable(names.STALE, "a single file")
    folders = sorted({as_path(path).parent for path in manifest.files})
    beside = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    check = Check(names.STALE, f"{counted(len(beside), 'file')} in its directories", exit_code=3)
    check.failures += _find_unread_siblings(manifest, beside)
    check.failures += _find_extra_random_states(manifest)
    check.warnings += [
        f"{path} is left over from an unfinished write"
        for path in beside
        if _UNFINISHED.search(path.name)
    ]
    check.warnings += _find_newer_checkpoint(manifest, sources)
    check.warnings += _find_distant_times(manifest)
    return check


def _find_unread_siblings(manifest: Manifest, beside: Iterable[Path]) -> Iterator[str]:
    """Yield files whose names differ from those read only in numbers, and that nothing refers to.

    Empty files are not reported: DCP opens a file for each rank, even if it has nothing to write.
    """
    read = {(str(as_path(p).parent), mask_digits(Path(p).name)) for p in manifest.files}
    known = {str(as_path(path)) for path in (*manifest.files, *manifest.train.rng_files)}
    for path in beside:
        numbered = _DIGITS.search(path.name) is not None
        is_sibling = numbered and (str(path.parent), mask_digits(path.name)) in read
        if is_sibling and str(path) not in known and path.stat().st_size:
            yield f"{path} belongs to another save: no file refers to it"


def _find_extra_random_states(manifest: Manifest) -> Iterator[str]:
    world, files = manifest.origin.world, manifest.train.rng_files
    if len(files) > max(world, 1):
        yield f"{files[-1]} belongs to a run with {len(files)} ranks; this run had {world}"


def _find_newer_checkpoint(manifest: Manifest, sources: Sequence[Path]) -> Iterator[str]:
    """Yield the newest checkpoint of the run, if an older one was read."""
    if len(sources) != 1 or not sources[0].is_dir():
        return
    numbers = run.list_numbered(Location([sources[0]]))
    read = {as_path(path).parent.resolve() for path in manifest.files}
    used = [n for n, each in numbers.items() if any(_is_inside(r, each.path) for r in read)]
    if used and max(numbers) > max(used):
        newest = numbers[max(numbers)].path
        yield f"{newest} is newer than checkpoint {max(used)}, which was read"


def _is_inside(path: Path, directory: Path) -> bool:
    return directory.resolve() in (path, *path.parents)


def _find_distant_times(manifest: Manifest) -> Iterator[str]:
    """Yield files that were written long before or after the others."""
    times = {path: as_path(path).stat().st_mtime for path in manifest.files}
    if len(times) < 3:
        return  # of two times, neither is the exception
    middle = median(times.values())
    for path, time in times.items():
        apart = timedelta(seconds=abs(time - middle))
        if apart > _LONG_APART:
            word = "after" if time > middle else "before"
            yield f"{path} was written {apart.days} d {word} the others"


def check_steps(manifest: Manifest) -> Check:
    """Check that the step counters of the run and of the optimizer are consistent."""
    train = manifest.train
    states = _collect_states(manifest)
    counted_steps = {fqn: train.optimizer_step.get(fqn) for fqn in states}
    applied = {step for step in counted_steps.values() if step is not None}
    if train.step is None and not applied:
        return not_applicable(names.STEPS, "no counter")
    shown = "/".join(f"{step:g}" for step in sorted(applied)[:4])
    what = [f"run: {train.step}" if train.step is not None else ""]
    what.append(f"skipped: {train.skipped_steps}" if train.skipped_steps else "")
    what.append(f"optimizer: {shown}" if applied else "")
    check = Check(names.STEPS, ", ".join(filter(None, what)))
    odd = [f"{step:g}" for step in applied if step < 0 or step != int(step)]
    if odd:
        check.failures.append(f"{odd[0]} is not a valid optimizer step count")
    lacking = [
        fqn
        for fqn, step in counted_steps.items()
        if step is None and optimizers.needs_count(states[fqn])
    ]
    if applied and lacking:
        check.failures.append(f"{some(lacking)}: optimizer state without a step")
    check.warnings += find_counter_conflicts(manifest)
    return check


def _collect_states(manifest: Manifest) -> dict[str, dict[str, Entry]]:
    """Return the slots of each parameter with optimizer state, by kind."""
    states: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS:
            states[entry.fqn][entry.kind] = entry
    return states


def check_slots(manifest: Manifest) -> Check:
    """Check that every trained parameter has each slot that the others of its group have.

    A parameter without slots was never updated. Some optimizers keep different slots for different
    shapes (Adafactor, 8-bit states): there a parameter lacks a slot only if it has none instead.
    """
    states = _collect_states(manifest)
    if not states:
        return not_applicable(names.SLOTS, "no optimizer")
    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(*WEIGHT_KINDS)}
    slot_names = list(dict.fromkeys(kind for kinds in states.values() for kind in kinds))
    check = Check(names.SLOTS, f"{', '.join(slot_names)} of {counted(len(states), 'parameter')}")
    for members in _group_by_settings(manifest, list(states)):
        slots = {fqn: _classify_slots(states[fqn], shapes.get(fqn)) for fqn in members}
        # Reversed, so that of parameters with the same slots the first one is named.
        first = {kinds: fqn for fqn, kinds in reversed(slots.items())}
        for fqn, (every, full) in slots.items():
            more = [kinds for kinds in first if every < kinds[0] and full < kinds[1]]
            if more:
                lacks = ", ".join(sorted(more[0][1] - full))
                check.failures.append(f"{fqn} has no {lacks}, but {first[more[0]]} has")
    return check


def _classify_slots(
    own: Mapping[str, Entry], shape: Index | None
) -> tuple[frozenset[str], frozenset[str]]:
    """Return all slots of a parameter, and those with one value per element.

    A matrix of a square parameter (Shampoo) has the parameter's shape by coincidence.
    """
    full = (k for k, entry in own.items() if entry.shape == shape and k not in optimizers.MATRICES)
    return frozenset(own), frozenset(full)


def _group_by_settings(manifest: Manifest, fqns: Sequence[str]) -> Iterator[list[str]]:
    """Yield lists of parameters whose groups have the same settings, apart from rates."""
    settings = {
        fqn: repr(sorted((k, repr(v)) for k, v in group.hyper.items() if k not in _RATES))
        for group in manifest.train.param_groups
        for fqn in group.fqns
    }
    by_settings: dict[str, list[str]] = defaultdict(list)
    for fqn in fqns:
        by_settings[settings.get(fqn, "")].append(fqn)
    yield from by_settings.values()


def check_model(manifest: Manifest, shapes: ModelShapes | None) -> Check:
    """Check that names and shapes match the model."""
    if shapes is None:
        return not_applicable(names.MODEL, "no --model")
    stored = {entry.fqn: entry.shape for entry in manifest.of_kind(*WEIGHT_KINDS)}
    expected, tied = {**shapes.parameters, **shapes.buffers}, shapes.tied
    published = shapes.find_published()
    if published is not None and _is_published(stored, published):
        stored = {published.spellings.get(fqn, fqn): shape for fqn, shape in stored.items()}
        expected, tied = published.written, published.list_aliases()
    aliases: dict[str, set[str]] = defaultdict(set)
    for alias, kept in (*tied.items(), *manifest.tied.items()):
        aliases[kept].add(alias)
        aliases[alias].add(kept)
    missing = [fqn for fqn in expected if not {fqn, *aliases[fqn]} & stored.keys()]
    known = expected.keys() | tied.keys()
    extra = [fqn for fqn in stored if not {fqn, *aliases[fqn]} & known]
    check = Check(names.MODEL, f"{shapes.source}: {counted(len(expected), 'tensor')}")
    check.failures += [f"missing: {fqn}{_suggest(fqn, extra)}" for fqn in missing]
    check.failures += [f"unexpected: {fqn}{_suggest(fqn, missing)}" for fqn in extra]
    check.failures += [
        f"{fqn}: shape {list(stored[fqn])}, {list(expected[fqn])} in the model"
        for fqn in expected
        if fqn in stored and stored[fqn] != expected[fqn]
    ]
    return check


def _is_published(stored: Container[str], published: Published) -> bool:
    """Return whether more of the published names are stored than of those in memory."""
    names = published.conversion.after.keys() | published.spellings.keys()
    in_files = sum(fqn in stored for fqn in names - published.conversion.before.keys())
    in_memory = sum(fqn in stored for fqn in published.conversion.before.keys() - names)
    return in_files > in_memory


def _suggest(fqn: str, others: Sequence[str]) -> str:
    close = get_close_matches(fqn, others[:_SUGGESTED], n=1)
    return f" (is it {close[0]}?)" if close else ""
