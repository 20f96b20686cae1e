"""What can be checked of a checkpoint without reading a tensor.

The readers have refused what cannot be read: a missing rank, mixed steps, a hole. Here is what they
let pass, because it is no reason not to convert.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from reshard.paths import as_path
from reshard.training import optimizers
from reshard.units import counted, some

_DIGITS = re.compile(r"\d+")
_NEAR = 200  # names among which the nearest is looked for
_LONG_APART = timedelta(days=1)
_UNFINISHED = re.compile(r"\.(tmp|temp|part|partial|incomplete)$|\.partial-[0-9a-f]+$")
_RATES = ("lr", "initial_lr", "weight_decay")  # in which groups of one optimizer differ


def headers(manifest: Manifest) -> Check:
    """The readers have opened every file."""
    sizes = units.show_bytes(sum(file.nbytes for file in manifest.files.values()))
    return Check(names.HEADERS, f"{counted(len(manifest.files), 'file')}, {sizes}")


def safe(manifest: Manifest, allowed: Sequence[str]) -> Check:
    """No pickle names a class that nobody knows."""
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    found = Check(names.SAFE, "the classes that the files name", exit_code=5)
    if refused:
        allow = " ".join(f"--allow-pickle {name}" for name in refused)
        found.failures.append(
            f"{', '.join(refused)}: no known framework writes that; if it is yours: {allow}"
        )
    return found


def complete(manifest: Manifest) -> Check:
    """Every rank's files were found; every announced tensor has a value."""
    world = manifest.origin.world
    found = Check(
        names.COMPLETE,
        f"{counted(world, 'rank')}, {counted(len(manifest.entries), 'tensor')}",
    )
    found.failures += [f"{fqn} is announced, and no rank holds it" for fqn in manifest.absent]
    found.failures += [
        f"{fqn} has no elements: a placeholder of ZeRO 3" for fqn in placeholders.find(manifest)
    ]
    return found


def agreement(manifest: Manifest) -> Check:
    """The files of all ranks say the same."""
    versions = ", ".join(f"{name} {number}" for name, number in manifest.origin.versions.items())
    step = "" if manifest.train.step is None else f"step {manifest.train.step}"
    what = ", ".join(filter(None, (step, versions, "names, shapes, groups")))
    if len(manifest.files) == 1:
        return not_applicable(names.AGREEMENT, "one file")
    return Check(names.AGREEMENT, what, exit_code=3)


def index(manifest: Manifest) -> Check:
    """An index lists what its files hold, both ways; and says how much that is."""
    places = {as_path(path).parent for path in manifest.files}
    is_model = registry.describe_source(manifest).weights_only
    found = [path for place in places for path in place.glob("*.index.json") if is_model]
    metadata = [path for place in places for path in place.glob("*.metadata")]
    if not found and not metadata:
        return not_applicable(names.INDEX, "no index")
    shown = some(sorted(path.name for path in (*found, *metadata)))
    check = Check(names.INDEX, f"{shown}: each file and tensor, both ways", exit_code=3)
    held = sum(entry.nbytes for entry in manifest.of_kind(PARAM, BUFFER))
    for path in found:
        check.warnings += _total(path, held)
    return check


def _total(path: Path, held: int) -> Iterator[str]:
    try:
        stated = read_json_object(path).get("metadata", {}).get("total_size")
    except (CorruptError, AttributeError):  # the reader took another file, or it says nothing
        return
    if isinstance(stated, int) and stated != held:
        yield f"{path.name} says that its files hold {stated} bytes; they hold {held}"


def coverage(manifest: Manifest) -> Check:
    """Proved by `manifest.check`, or there would be no manifest to look at."""
    numel = sum(entry.numel for entry in manifest.entries.values())
    chunks = sum(len(entry.chunks) for entry in manifest.entries.values())
    text = f"{units.show_count(numel)} elements in {counted(chunks, 'stored block')}"
    return Check(names.COVERAGE, text, exit_code=3)


def ranks(manifest: Manifest) -> Check:
    """Check that no file states another rank, step or save than the place where it lies."""
    compared = compare_claims(manifest.files)
    if not compared.evidence:
        return not_applicable(names.RANKS, "no files that say which rank or save they belong to")
    found = Check(names.RANKS, ", ".join(compared.evidence), exit_code=3)
    found.failures += [f"{each.file}: {each.problem}" for each in compared.conflicts]
    return found


def stale(manifest: Manifest, sources: Sequence[Path]) -> Check:
    """Nothing of another save, or of one that was interrupted, lies beside the files."""
    if len(sources) == 1 and sources[0].is_file() and len(manifest.files) == 1:
        return not_applicable(names.STALE, "one file by itself")
    places = sorted({as_path(path).parent for path in manifest.files})
    beside = [path for place in places for path in sorted(place.iterdir()) if path.is_file()]
    found = Check(names.STALE, f"{counted(len(beside), 'file')} in its directories", exit_code=3)
    found.failures += _unread_siblings(manifest, beside)
    found.failures += _extra_random_states(manifest)
    found.warnings += [
        f"{path} is left from a write that did not end"
        for path in beside
        if _UNFINISHED.search(path.name)
    ]
    found.warnings += _passed_over(manifest, sources)
    found.warnings += _ages(manifest)
    return found


def _unread_siblings(manifest: Manifest, beside: Iterable[Path]) -> Iterator[str]:
    """Files named as those that were read, with other numbers, to which nothing refers.

    An empty one is no trace of another save: DCP opens a file for each rank, also for one that has
    nothing to write.
    """
    read = {(str(as_path(p).parent), mask_digits(Path(p).name)) for p in manifest.files}
    known = {str(as_path(path)) for path in (*manifest.files, *manifest.train.rng_files)}
    for path in beside:
        numbered = _DIGITS.search(path.name) is not None
        alike = numbered and (str(path.parent), mask_digits(path.name)) in read
        if alike and str(path) not in known and path.stat().st_size:
            yield f"{path} is of another save: nothing refers to it"


def _extra_random_states(manifest: Manifest) -> Iterator[str]:
    world, files = manifest.origin.world, manifest.train.rng_files
    if len(files) > max(world, 1):
        yield f"{files[-1]} is of a run of {len(files)} ranks; this one had {world}"


def _passed_over(manifest: Manifest, sources: Sequence[Path]) -> Iterator[str]:
    """A pointer that names an older checkpoint than the newest one there is."""
    if len(sources) != 1 or not sources[0].is_dir():
        return
    numbers = run.numbered(Location([sources[0]]))
    read = {as_path(path).parent.resolve() for path in manifest.files}
    used = [n for n, place in numbers.items() if any(_is_in(r, place.path) for r in read)]
    if used and max(numbers) > max(used):
        newest = numbers[max(numbers)].path
        yield f"{newest} is newer than the checkpoint that is meant, number {max(used)}"


def _is_in(path: Path, directory: Path) -> bool:
    return directory.resolve() in (path, *path.parents)


def _ages(manifest: Manifest) -> Iterator[str]:
    """Files written long before or after the others."""
    times = {path: as_path(path).stat().st_mtime for path in manifest.files}
    if len(times) < 3:
        return
    middle = median(times.values())
    for path, time in times.items():
        apart = timedelta(seconds=abs(time - middle))
        if apart > _LONG_APART:
            word = "after" if time > middle else "before"
            yield f"{path} was written {apart.days} d {word} the others"


def steps(manifest: Manifest) -> Check:
    """The counters of the run and of the optimizer fit together."""
    train = manifest.train
    counted_steps = {fqn: train.optimizer_step.get(fqn) for fqn in _slots(manifest)}
    applied = {step for step in counted_steps.values() if step is not None}
    if train.step is None and not applied:
        return not_applicable(names.STEPS, "no counter")
    shown = "/".join(f"{step:g}" for step in sorted(applied)[:4])
    what = [f"run: {train.step}" if train.step is not None else ""]
    what.append(f"skipped: {train.skipped_steps}" if train.skipped_steps else "")
    what.append(f"optimizer: {shown}" if applied else "")
    found = Check(names.STEPS, ", ".join(filter(None, what)))
    odd = [f"{step:g}" for step in applied if step < 0 or step != int(step)]
    if odd:
        found.failures.append(f"an optimizer step of {odd[0]}")
    slots = _slots(manifest)
    lacking = [
        fqn
        for fqn, step in counted_steps.items()
        if step is None and optimizers.needs_count(slots[fqn])
    ]
    if applied and lacking:
        found.failures.append(f"{some(lacking)}: optimizer state without a step")
    found.warnings += find_counter_conflicts(manifest)
    return found


def _slots(manifest: Manifest) -> dict[str, list[str]]:
    """Return the slots of each parameter with optimizer state."""
    found: dict[str, list[str]] = {}
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS:
            found.setdefault(entry.fqn, []).append(entry.kind)
    return found


def slots(manifest: Manifest) -> Check:
    """Every trained parameter has each slot that the others of its group have.

    A parameter without any was never stepped. Where an optimizer keeps other slots for other
    shapes (Adafactor, 8-bit states), a parameter lacks one only if it has no other instead.
    """
    held: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS:
            held[entry.fqn][entry.kind] = entry
    if not held:
        return not_applicable(names.SLOTS, "no optimizer")
    shapes = {entry.fqn: entry.shape for entry in manifest.of_kind(*WEIGHT_KINDS)}
    slot_names = list(dict.fromkeys(kind for kinds in held.values() for kind in kinds))
    found = Check(names.SLOTS, f"{', '.join(slot_names)} of {counted(len(held), 'parameter')}")
    for members in _alike(manifest, list(held)):
        signs = {fqn: _sign(held[fqn], shapes.get(fqn)) for fqn in members}
        first = {sign: fqn for fqn, sign in reversed(signs.items())}
        for fqn, (every, full) in signs.items():
            more = [sign for sign in first if every < sign[0] and full < sign[1]]
            if more:
                lacks = ", ".join(sorted(more[0][1] - full))
                found.failures.append(f"{fqn} has no {lacks}, {first[more[0]]} has")
    return found


def _sign(own: Mapping[str, Entry], shape: Index | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return all slots of a parameter, and those that are per element.

    A matrix of a square parameter (Shampoo) has its shape by chance.
    """
    full = (k for k, entry in own.items() if entry.shape == shape and k not in optimizers.MATRICES)
    return frozenset(own), frozenset(full)


def _alike(manifest: Manifest, fqns: Sequence[str]) -> Iterator[list[str]]:
    """Parameters whose groups have one optimizer's settings, rates aside."""
    settings = {
        fqn: repr(sorted((k, repr(v)) for k, v in group.hyper.items() if k not in _RATES))
        for group in manifest.train.param_groups
        for fqn in group.fqns
    }
    alike: dict[str, list[str]] = defaultdict(list)
    for fqn in fqns:
        alike[settings.get(fqn, "")].append(fqn)
    yield from alike.values()


def model(manifest: Manifest, told: ModelShapes | None) -> Check:
    """Names and shapes are those of the model."""
    if told is None:
        return not_applicable(names.MODEL, "no --model")
    wanted = {**told.parameters, **told.buffers}
    held = {entry.fqn: entry.shape for entry in manifest.of_kind(*WEIGHT_KINDS)}
    aliases: dict[str, set[str]] = defaultdict(set)
    for alias, kept in (*told.tied.items(), *manifest.tied.items()):
        aliases[kept].add(alias)
        aliases[alias].add(kept)
    missing = [fqn for fqn in wanted if not {fqn, *aliases[fqn]} & held.keys()]
    known = wanted.keys() | told.tied.keys()
    extra = [fqn for fqn in held if not {fqn, *aliases[fqn]} & known]
    found = Check(names.MODEL, f"{told.source}: {counted(len(wanted), 'tensor')}")
    found.failures += [f"missing: {fqn}{_near(fqn, extra)}" for fqn in missing]
    found.failures += [f"unexpected: {fqn}{_near(fqn, missing)}" for fqn in extra]
    found.failures += [
        f"{fqn}: shape {list(held[fqn])}, {list(wanted[fqn])} in the model"
        for fqn in wanted
        if fqn in held and held[fqn] != wanted[fqn]
    ]
    return found


def _near(fqn: str, others: Sequence[str]) -> str:
    close = get_close_matches(fqn, others[:_NEAR], n=1)
    return f" (is it {close[0]}?)" if close else ""
