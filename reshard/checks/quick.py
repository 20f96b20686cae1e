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
from typing import Any

from reshard import units
from reshard.checks import names
from reshard.checks.identity import compare_claims
from reshard.checks.identity.claims import mask_digits
from reshard.checks.identity.counters import find_counter_conflicts
from reshard.checks.identity.crosscheck import compare_masters, find_negative
from reshard.checks.result import Check, not_applicable
from reshard.containers.json_files import read_json_object
from reshard.core.box import Box, Index
from reshard.core.location import Location
from reshard.core.manifest import BUFFER, PARAM, WEIGHT_KINDS, Entry, Manifest
from reshard.errors import CorruptError, DifferentError, UnsupportedError, UsageError
from reshard.formats import placeholders, run_directory
from reshard.model import ModelHint, ModelShapes
from reshard.model.model_order import list_missing_in_layers
from reshard.model.published import Published
from reshard.state_dict.assemble import ANOTHER
from reshard.state_dict.global_tensor import GlobalTensor
from reshard.state_dict.memory_form import restore_adapter_form
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path
from reshard.tensors import replicas
from reshard.tensors.lazy import read_block
from reshard.tensors.weights import find_heads
from reshard.training import optimizers
from reshard.training.companion_files import find_config
from reshard.training.completeness import find_impossible_settings, find_lost_state
from reshard.units import abridge, counted

_DIGITS = re.compile(r"\d+")
_LAYER = re.compile(r"\.(\d+)\.")
_SUGGESTED = 200  # names that are searched for a similar one
_LONG_APART = timedelta(days=1)  # longer than the save of one checkpoint takes
_UNFINISHED = re.compile(r"\.(tmp|temp|part|partial|incomplete)$|\.partial-[0-9a-f]+$")
_MOST_READ = 1 << 18  # bytes of a replica; biases and norms are smaller
# Settings in which groups with the same slots can differ.
_RATES = ("lr", "initial_lr", "weight_decay")


def check_headers(manifest: Manifest) -> Check:
    """Report the number and the size of the files; the readers have opened all of them."""
    sizes = units.show_bytes(sum(file.nbytes for file in manifest.files.values()))
    return Check(names.HEADERS, f"{counted(len(manifest.files), 'file')}, {sizes}")


def check_safe(manifest: Manifest, allowed: Sequence[str]) -> Check:
    """Check that pickles name only known or allowed classes."""
    refused = [name for name in manifest.unknown_globals if name not in allowed]
    check = Check(names.SAFE, "the classes that pickles name", exit_code=5)
    if refused:
        allow = " ".join(f"--allow-pickle {name}" for name in refused)
        check.failures.append(
            f"{', '.join(refused)}: no known framework writes these classes; if they are your own,"
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
    """Report the facts on which the files of all ranks agree; the readers have compared them.

    Replicas are compared by the checksums that the files store, and small ones by their values.
    """
    failures = []
    try:
        with SourceFiles(manifest.files) as pool:
            replicas.check(manifest.entries.values(), manifest.files, pool, most_read=_MOST_READ)
    except DifferentError as error:
        failures.append(f"{error.where} {error.problem}")
    versions = ", ".join(f"{name} {number}" for name, number in manifest.origin.versions.items())
    step = "" if manifest.train.step is None else f"step {manifest.train.step}"
    what = ", ".join(filter(None, (step, versions, "names, shapes, groups")))
    if len(manifest.files) == 1 and not failures:
        return not_applicable(names.AGREEMENT, "there is only one file")
    return Check(names.AGREEMENT, what, failures, exit_code=3)


def check_index(manifest: Manifest) -> Check:
    """Check the indexes; the readers have compared the files and tensors of the one they used."""
    folders = {as_path(path).parent for path in manifest.files}
    is_model = manifest.origin.weights_only
    indexes = [path for folder in folders for path in folder.glob("*.index.json") if is_model]
    metadata = [path for folder in folders for path in folder.glob("*.metadata")]
    if not indexes and not metadata:
        return not_applicable(names.INDEX, "there is no index")
    shown = abridge(sorted(path.name for path in (*indexes, *metadata)))
    check = Check(
        names.INDEX, f"{shown}: the listed files and tensors are those that exist", exit_code=3
    )
    nbytes = sum(entry.nbytes for entry in manifest.of_kind(PARAM, BUFFER))
    for path in indexes:
        check.warnings += _list_index_faults(path, manifest, nbytes)
    return check


def _list_index_faults(path: Path, manifest: Manifest, nbytes: int) -> Iterator[str]:
    try:
        index = read_json_object(path)
    except CorruptError as error:  # the reader used another file
        index = {}
        yield f"{path.name} {error.problem}"
    listed, metadata = (
        value if isinstance(value, dict) else {}
        for value in map(index.get, ("weight_map", "metadata"))
    )
    # By name: the files of one index may be on several nodes.
    others = {str(name) for name in listed.values()} - {as_path(at).name for at in manifest.files}
    if missing := [name for name in sorted(others) if not (path.parent / name).exists()]:
        yield f"{path.name} lists files that do not exist: {abridge(missing)}"
    stated = metadata.get("total_size")
    if isinstance(stated, int) and stated != nbytes:
        yield f"{path.name} states that its files contain {stated} bytes; they contain {nbytes}"


def check_coverage(manifest: Manifest) -> Check:
    """Report the numbers of elements and blocks; `manifest.check` has proved their coverage."""
    numel = sum(entry.numel for entry in manifest.entries.values())
    chunks = sum(len(entry.chunks) for entry in manifest.entries.values())
    text = f"{units.show_count(numel)} elements in {counted(chunks, 'stored block')}"
    return Check(names.COVERAGE, text, exit_code=3)


def check_ranks(manifest: Manifest) -> Check:
    """Check that no file contradicts its name, its directory or another file.

    The claims are about ranks, steps and saves.
    """
    compared = compare_claims(manifest.files)
    sample = compare_masters(manifest, every_element=False)
    if not compared.evidence and not sample.elements:
        return not_applicable(names.RANKS, "no file states its rank or save")
    masters = f"{counted(sample.elements, 'element')} of weights equal those of their masters"
    text = ", ".join([*compared.evidence, *[masters] * bool(sample.elements)])
    check = Check(names.RANKS, text, exit_code=3)
    check.failures += [f"{conflict.file}: {conflict.problem}" for conflict in compared.conflicts]
    if not compared.conflicts:  # files of other ranks have other values, too
        check.failures += [f"{conflict.file}: {conflict.problem}" for conflict in sample.unequal]
    return check


def check_stale(manifest: Manifest, sources: Sequence[Path]) -> Check:
    """Check that no files of another or an interrupted save lie beside those of the checkpoint."""
    if len(sources) == 1 and sources[0].is_file() and len(manifest.files) == 1:
        return not_applicable(names.STALE, "the checkpoint is a single file")
    folders = sorted({as_path(path).parent for path in manifest.files})
    beside = [path for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    where = "the directories of the checkpoint"
    check = Check(names.STALE, f"{counted(len(beside), 'file')} in {where}", exit_code=3)
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
    # Its name differs from that of a file that was read only in its numbers. DCP opens a file for
    # each rank, even if it has nothing to write: empty files do not count.
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
    if len(sources) != 1 or not sources[0].is_dir():
        return
    numbers = run_directory.list_numbered(Location([sources[0]]))
    read = {as_path(path).parent.resolve() for path in manifest.files}
    used = [n for n, place in numbers.items() if any(_is_inside(r, place.path) for r in read)]
    if used and max(numbers) > max(used):
        newest = numbers[max(numbers)].path
        yield f"{newest} is newer than checkpoint {max(used)}, which was read"


def _is_inside(path: Path, directory: Path) -> bool:
    return directory.resolve() in (path, *path.parents)


def _find_distant_times(manifest: Manifest) -> Iterator[str]:
    times = {path: as_path(path).stat().st_mtime for path in manifest.files}
    if len(times) < 3:
        return  # with two files, the times do not show which of them is the stale one
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
        return not_applicable(names.STEPS, "no file states a step")
    shown = "/".join(f"{step:g}" for step in sorted(applied)[:4])
    what = [f"run: {train.step}" if train.step is not None else ""]
    what.append(f"skipped: {train.skipped_steps}" if train.skipped_steps else "")
    what.append(f"optimizer: {shown}" if applied else "")
    check = Check(names.STEPS, ", ".join(filter(None, what)))
    odd = [f"{step:g}" for step in applied if step < 0 or step % 1]  # `inf % 1` is NaN
    if odd:
        check.failures.append(f"{odd[0]} is not a valid optimizer step count")
    lacking = [
        fqn
        for fqn, step in counted_steps.items()
        if step is None and optimizers.needs_count(states[fqn])
    ]
    if applied and lacking:
        check.failures.append(f"{abridge(lacking)}: optimizer state without a step")
    check.warnings += find_counter_conflicts(manifest)
    return check


def _collect_states(manifest: Manifest) -> dict[str, dict[str, Entry]]:
    states: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in manifest.entries.values():
        if entry.kind not in WEIGHT_KINDS:
            states[entry.fqn][entry.kind] = entry
    return states


def check_slots(manifest: Manifest) -> Check:
    """Check that an optimizer's state is whole: each slot that the others of the group have.

    A parameter without slots was never updated, and is not reported. Some optimizers keep other
    slots for parameters of other shapes (Adafactor, 8-bit states): a parameter lacks a slot only if
    its slots are a proper subset of those of another parameter.
    """
    states = _collect_states(manifest)
    unassigned = _list_unassigned(manifest)
    why = f": {manifest.unnamed.reason}" if manifest.unnamed else ""
    wrong = [*find_impossible_settings(manifest), *find_negative(manifest)]
    failures = [
        *wrong,
        *(f"the optimizer has {lost}" for lost in find_lost_state(manifest)),
        *(f"optimizer {name!r} is not assigned to parameters{why}" for name in unassigned),
    ]
    if not states and not failures:
        is_stored = manifest.unnamed_optimizers or manifest.unnamed
        reason = "the states of the optimizer are not assigned to parameters"
        return not_applicable(
            names.SLOTS, reason if is_stored else "the checkpoint has no optimizer state"
        )
    shapes = manifest.weight_shapes
    slot_names = list(dict.fromkeys(kind for kinds in states.values() for kind in kinds))
    slot_text = ", ".join(optimizers.name_slots(slot_names).values()) or "no slots"
    text = f"{slot_text} of {counted(len(states), 'parameter')}"
    check = Check(names.SLOTS, text, failures, exit_code=3 if wrong else 1)
    for members in _group_by_settings(manifest, list(states)):
        slots = {fqn: _classify_slots(states[fqn], shapes.get(fqn)) for fqn in members}
        # Reversed, so that the message names the first of several parameters with the same slots.
        first = {kinds: fqn for fqn, kinds in reversed(slots.items())}
        for fqn, (every, full) in slots.items():
            more = [kinds for kinds in first if every < kinds[0] and full < kinds[1]]
            if more:
                lacks = ", ".join(sorted(more[0][1] - full))
                check.failures.append(f"{fqn} has no {lacks}, but {first[more[0]]} has")
    return check


def _list_unassigned(manifest: Manifest) -> tuple[str, ...]:
    # A single one may need --model, and one of several may be that of another model.
    lost = manifest.unnamed_optimizers
    is_one_of_several = manifest.has_optimizer or len(lost) > 1
    return lost if is_one_of_several and ANOTHER not in manifest.unread.values() else ()


def _classify_slots(
    own: Mapping[str, Entry], shape: Index | None
) -> tuple[frozenset[str], frozenset[str]]:
    """Shampoo's matrices do not count as full, even if the parameter is square, like them."""
    full = (k for k, entry in own.items() if entry.shape == shape and k not in optimizers.MATRICES)
    return frozenset(own), frozenset(full)


def _group_by_settings(manifest: Manifest, fqns: Sequence[str]) -> Iterator[list[str]]:
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
    """Check that names and shapes match the model.

    Without a model, the config beside the checkpoint must be one that a conversion accepts. The
    model is built only if its layers are more than those that are stored, because that takes
    seconds.
    """
    if shapes is None:
        return _check_config(manifest)
    source, compared = shapes.source, _compare_names(manifest, shapes)
    stored, expected, missing, extra = compared
    check = Check(names.MODEL, f"{source}: {counted(len(expected), 'tensor')}")
    for fqn in missing:
        alike = [other for other in extra if stored[other] == expected[fqn]]
        check.failures.append(f"missing: {fqn}{_suggest(fqn, alike)}")
    for fqn in extra:
        alike = [other for other in missing if stored[fqn] == expected[other]]
        check.failures.append(f"unexpected: {fqn}{_suggest(fqn, alike)}")
    check.failures += [
        f"{fqn} has shape {list(stored[fqn])}, but {list(expected[fqn])} in the model"
        for fqn in expected
        if fqn in stored and stored[fqn] != expected[fqn]
    ]
    return check


def _compare_names(
    manifest: Manifest, shapes: ModelShapes
) -> tuple[dict[str, Index], Mapping[str, Index], list[str], list[str]]:
    """Return the shapes that are stored and expected, and the missing and unexpected names."""
    weights = {
        entry.fqn: GlobalTensor(entry.dtype, entry.shape, tuple(entry.chunks))
        for entry in manifest.of_kind(*WEIGHT_KINDS)
    }
    weights, shapes = restore_adapter_form(weights, shapes)  # an adapter lacks its base's weights
    stored = {fqn: weight.shape for fqn, weight in weights.items()}
    expected, tied = {**shapes.parameters, **shapes.buffers}, shapes.tied
    published = shapes.find_published(stored)
    if published is not None:
        for fqn in published.list_ignored(stored):
            del stored[fqn]
        if _is_published(stored, published):
            stored = {published.spellings.get(fqn, fqn): shape for fqn, shape in stored.items()}
            expected, tied = published.written, published.list_aliases()
    aliases: dict[str, set[str]] = defaultdict(set)
    for alias, kept in (*tied.items(), *manifest.tied.items()):
        aliases[kept].add(alias)
        aliases[alias].add(kept)
    missing = [fqn for fqn in expected if not {fqn, *aliases[fqn]} & stored.keys()]
    known = expected.keys() | tied.keys()
    extra = [fqn for fqn in stored if not {fqn, *aliases[fqn]} & known]
    return stored, expected, missing, extra


def _check_config(manifest: Manifest) -> Check:
    none = not_applicable(names.MODEL, "--model is not given")
    try:
        file = find_config(manifest)
        config = read_json_object(file) if file else {}
    except CorruptError as error:
        found = [f"{error.where} {error.problem}"]
        return Check(names.MODEL, "the config beside the checkpoint", found, exit_code=3)
    if differing := _find_untied(manifest, config):
        return Check(names.MODEL, f"the config beside the checkpoint: {file}", differing)
    numbers = (int(n) for fqn in manifest.weight_shapes for n in _LAYER.findall(fqn))
    depth, layers = max(numbers, default=None), config.get("num_hidden_layers")
    if file is None or depth is None or not isinstance(layers, int) or depth + 1 >= layers:
        return none
    try:
        shapes = ModelHint(str(file)).shapes()
    except (UsageError, UnsupportedError):
        return none
    stored, expected, missing, _ = _compare_names(manifest, shapes)
    lacking = list_missing_in_layers(missing, stored, expected)
    found = [f"no file contains {abridge(lacking)}, which are in the layers of {file}"]
    return Check(names.MODEL, shapes.source, found) if lacking else none


def _find_untied(manifest: Manifest, config: Mapping[str, Any]) -> list[str]:
    best, found = manifest.select_weights(), []
    is_tied = config.get("tie_word_embeddings") is True
    with SourceFiles(manifest.files) as pool:
        for head, embedding in find_heads(best) if is_tied else ():
            one, other = best[head], best[embedding]
            if (one.dtype, one.shape[1:]) != (other.dtype, other.shape[1:]) or not one.numel:
                continue
            row = Box((0,) * len(one.shape), (1, *one.shape[1:]))
            if read_block(pool, one, row) != read_block(pool, other, row):
                found.append(f"{head} differs from {embedding}, to which the config ties it")
    return found


def _is_published(stored: Container[str], published: Published) -> bool:
    """Return whether more names are only of the form in files than only of the form in memory."""
    before = published.conversion.before.keys()
    after = published.conversion.after.keys() | published.spellings.keys()
    in_files = sum(fqn in stored for fqn in after - before)
    in_memory = sum(fqn in stored for fqn in before - after)
    return in_files > in_memory


def _suggest(fqn: str, others: Sequence[str]) -> str:
    close = get_close_matches(fqn, others[:_SUGGESTED], n=1)
    return f" (is it {close[0]}?)" if close else ""
