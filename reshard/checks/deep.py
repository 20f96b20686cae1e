"""What is read of each tensor, and the checks that follow from what was seen."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reshard import escaped, units, weights
from reshard.box import index_of
from reshard.checks import names
from reshard.checks.gaps import count_other, gaps
from reshard.checks.result import Check, not_applicable
from reshard.checks.scan import Rival, Scan, Task, Unequal, cast_into, chunk_at, replicas
from reshard.checks.values import Facts
from reshard.dtypes import FLOAT32, DType
from reshard.files import SourceFiles
from reshard.identity.crosscheck import are_comparable
from reshard.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Key, Manifest
from reshard.model import ModelShapes
from reshard.paths import as_path
from reshard.training.optimizers import NEVER_NEGATIVE
from reshard.units import counted, some

_RANK = re.compile(r"(?<!mp_)(?<!expp_)rank[-_]?(\d+)|^__(\d+)_\d+\.distcp$|^shard-(\d+)-")
# torch 2.13 ``distributed/fsdp/_flat_param.py`` (``_FLAT_PARAM_PADDING_VALUE``) aligns parameters
# with this number; it cuts flat parameters, and FSDP 2 its rows, with zeros.
_FSDP_PADDING = 42.0

Ignored = Callable[[str], bool]


def tasks(
    manifest: Manifest,
    *,
    config: Mapping[str, Any] | None,
    told: ModelShapes | None,
    digests: Mapping[Key, tuple[DType, ...]],
) -> list[Task]:
    """Every tensor with what must be equal to it.

    Args:
        config: a transformers config beside the checkpoint, for what it says of tied weights.
        told: the model that the user named.
        digests: in which dtypes tensors are hashed.
    """
    masters = {entry.fqn for entry in manifest.of_kind(MASTER)}
    copies = {e.fqn: e for e in manifest.of_kind(PARAM) if e.fqn in masters}
    ties = list(_ties(manifest, config, told))
    made = []
    for entry in manifest.entries.values():
        if entry.kind == PARAM and entry.fqn in copies and _fits(entry, manifest):
            continue  # read beside its master
        rivals = [Rival(names.REPLICAS, other) for other in replicas(entry)]
        copy = copies.get(entry.fqn) if entry.kind == MASTER else None
        if copy is not None and _fits(copy, manifest):
            rivals.append(Rival(names.MASTERS, copy, looked_at=True))
            rivals += [Rival(names.REPLICAS, other) for other in replicas(copy)]
        rivals += [Rival(names.TIED, other) for kept, other in ties if kept == entry.key]
        signs = entry.kind in NEVER_NEGATIVE
        made.append(Task(entry, tuple(rivals), digests.get(entry.key, ()), signs))
    return made


def _fits(copy: Entry, manifest: Manifest) -> bool:
    """Whether a weight can be compared with the cast of its master."""
    return are_comparable(manifest.entries[MASTER, copy.fqn], copy)


def _ties(
    manifest: Manifest, config: Mapping[str, Any] | None, told: ModelShapes | None
) -> Iterator[tuple[Key, Entry]]:
    """(kept, other) of every two stored tensors that are said to be one weight."""
    best = weights_of(manifest)
    for again in manifest.tied_copies:
        yield from _tie(best.get(manifest.kept_name(again.fqn)), again)
    for head, kept in _declared(manifest, config, told):
        yield from _tie(best.get(kept), best.get(head))


def _tie(kept: Entry | None, other: Entry | None) -> Iterator[tuple[Key, Entry]]:
    if kept is not None and other is not None and are_comparable(kept, other):
        yield kept.key, other


def _declared(
    manifest: Manifest, config: Mapping[str, Any] | None, told: ModelShapes | None
) -> Iterator[tuple[str, str]]:
    """Names of which a config, the model or the optimizer says that they are one weight."""
    best = weights_of(manifest)
    pairs = dict(told.tied) if told else {}
    declared = config.get("tie_word_embeddings") if config else None
    for head, embedding in weights.find_heads(best):
        if declared is True or (
            declared is not False and weights.is_untrained(manifest, head, embedding)
        ):
            pairs.setdefault(head, embedding)
    yield from pairs.items()


def weights_of(manifest: Manifest) -> dict[str, Entry]:
    """The most precise value of each weight: its fp32 master, else the module's."""
    found = {entry.fqn: entry for entry in manifest.of_kind(PARAM, BUFFER)}
    found.update((entry.fqn, entry) for entry in manifest.of_kind(MASTER))
    return found


# The checks


def crc(manifest: Manifest, scan: Scan) -> Check:
    """Stored checksums are those of the bytes."""
    if not scan.records:
        return not_applicable(names.CRC, "the files store no checksums")
    found = Check(names.CRC, counted(scan.records, "stored checksum"), exit_code=3)
    for path, record in scan.altered:
        stop = record.byte_offset + record.nbytes
        held = [
            f"{entry.kind} {entry.fqn}"
            for entry in manifest.entries.values()
            if any(
                chunk.file == path
                and chunk.box.volume
                and record.byte_offset <= chunk.byte_offset < stop
                for chunk in entry.chunks
            )
        ]
        holds = f", which holds {some(held)}" if held else ""
        found.failures.append(
            f"{path}: {record.name} (bytes {record.byte_offset} to {stop}){holds}: not its CRC-32"
        )
    return found


def replicas_equal(tasks: Sequence[Task], scan: Scan) -> Check:
    """Blocks that several ranks store are the same on all of them."""
    held = [task for task in tasks if any(r.check == names.REPLICAS for r in task.rivals)]
    if not held:
        return not_applicable(names.REPLICAS, "nothing is stored twice")
    found = Check(names.REPLICAS, f"{counted(len(held), 'tensor')} that several ranks store")
    for each in _of(scan, names.REPLICAS):
        to = found.warnings if each.entry.kind == BUFFER else found.failures
        to.append(_unequal(each, f"other values {_where(each.rival.entry, each.difference.first)}"))
    return found


def masters(manifest: Manifest, tasks: Sequence[Task], scan: Scan) -> Check:
    """The weights of the module are the cast of their masters, bit for bit."""
    held = [r.entry for task in tasks for r in task.rivals if r.check == names.MASTERS]
    if not held:
        return not_applicable(names.MASTERS, "no weight beside a master")
    dtypes = some(sorted({str(entry.dtype) for entry in held}))
    found = Check(names.MASTERS, f"{counted(len(held), 'weight')} in {dtypes}")
    for each in _of(scan, names.MASTERS):
        place = _where(each.rival.entry, each.difference.first)
        found.failures.append(_unequal(each, f"not the cast of its master, {place}"))
    strange = [
        entry.fqn
        for entry in manifest.of_kind(PARAM)
        if (MASTER, entry.fqn) in manifest.entries and not _fits(entry, manifest)
    ]
    found.failures += [f"{fqn} has another shape than its master" for fqn in strange]
    return found


def tied(
    manifest: Manifest,
    tasks: Sequence[Task],
    scan: Scan,
    *,
    config: Mapping[str, Any] | None,
    told: ModelShapes | None,
) -> Check:
    """Names of one weight hold one value."""
    compared = sum(r.check == names.TIED for task in tasks for r in task.rivals)
    if not compared and not manifest.tied:
        return not_applicable(names.TIED, "no tied names")
    shared = len(manifest.tied) - len(manifest.tied_copies)
    what = [f"{counted(shared, 'name')} of a shared storage"] if shared else []
    what += [f"{counted(compared, 'name')} stored again"] if compared else []
    found = Check(names.TIED, ", ".join(what))
    for each in _of(scan, names.TIED):
        name = each.rival.entry.fqn
        said = name in manifest.tied or (told is not None and name in told.tied)
        said = said or bool(config and config.get("tie_word_embeddings") is True)
        if said:
            found.failures.append(_unequal(each, f"{name} is tied to it and differs"))
        else:
            found.warnings.append(
                _unequal(each, f"{name} is not trained as if tied to it, and differs")
            )
    return found


def _of(scan: Scan, name: str) -> list[Unequal]:
    return [each for each in scan.unequal if each.rival.check == name]


def _unequal(each: Unequal, what: str) -> str:
    found, entry = each.difference, each.entry
    left, right = (f"{value:.9g}" for value in found.first_values)
    at = list(index_of(found.first, entry.shape))
    return (
        f"{entry.fqn}: {what}: {found.count} of {entry.numel} elements, first at {at}: {left} and"
        f" {right}, up to {found.max_abs:.3g} apart"
    )


def _where(entry: Entry, flat: int) -> str:
    """The file and rank that hold an element."""
    path = as_path(escaped.real(chunk_at(entry, index_of(flat, entry.shape)).file))
    match = _RANK.search(path.name) or _RANK.search(path.parent.name)
    rank = next((number for number in match.groups() if number), "") if match else ""
    return f"in {path}" + (f" (rank {int(rank)})" if rank else "")


def padding(manifest: Manifest, block_bytes: int) -> Check:
    """What lies between the tensors of a flat partition is zero, where the format keeps it so."""
    stored = (*manifest.entries.values(), *manifest.tied_copies, *manifest.unused_copies)
    found = gaps(stored, manifest.files)
    if not found:
        return not_applicable(names.PADDING, "no padding")
    nbytes = sum(gap.nbytes for gap in found)
    check = Check(names.PADDING, f"{units.show_bytes(nbytes)} in {counted(len(found), 'place')}")
    expected, is_zero = manifest.origin.padding, manifest.origin.zero_stage is not None
    with SourceFiles() as pool:
        counts = [
            (gap, count_other(pool, gap, _padding(gap.dtype, fsdp=not is_zero), block_bytes))
            for gap in found
        ]
    held = [(gap, count) for gap, count in counts if count]
    if expected == "uninitialized":
        total = sum(count for _, count in held)
        not_zero = f"{counted(total, 'element')} not zero, as the framework allocated them"
        return not_applicable(names.PADDING, f"{check.looked_at}; {not_zero}")
    lines = [
        f"{gap.file}: {counted(count, 'element')} of padding by {gap.fqn} not zero (byte"
        f" {gap.byte_offset})"
        for gap, count in held
    ]
    if expected == "zero":
        check.failures = lines
    else:  # a tensor may be saved as a view of a larger one
        check.warnings = lines
    return check


def _padding(dtype: DType, *, fsdp: bool) -> frozenset[bytes]:
    """The bytes of an element of padding."""
    zero = bytes(dtype.itemsize)
    if dtype.family != "float":
        return frozenset((zero,))
    number = bytearray(dtype.itemsize)
    cast_into(number, bytearray(struct.pack("<f", _FSDP_PADDING)), FLOAT32, dtype)
    negative = zero[:-1] + b"\x80"
    return frozenset((zero, negative, *([bytes(number)] * fsdp)))


def finite(manifest: Manifest, scan: Scan, ignored: Ignored) -> Check:
    """No NaN and no infinity; in a buffer they may be meant (masks)."""
    looked = _floats(manifest, scan, ignored)
    found = Check(names.FINITE, counted(len(looked), "tensor"))
    if not looked:
        return not_applicable(names.FINITE, "no floats")
    for entry, facts in looked:
        if facts.first_strange is None:
            continue
        what = " and ".join(
            f"{count} {name}"
            for count, name in ((facts.nan, "NaN"), (facts.infinite, "infinite"))
            if count
        )
        to = found.warnings if entry.kind == BUFFER else found.failures
        to.append(f"{_first(entry, facts.first_strange)}: {what} of {entry.numel}")
    return found


def moments(manifest: Manifest, scan: Scan, ignored: Ignored) -> Check:
    """Sums and means of squares are not negative."""
    looked = [each for each in _floats(manifest, scan, ignored) if each[0].kind in NEVER_NEGATIVE]
    if not looked:
        return not_applicable(names.MOMENTS, "no slot that cannot be negative")
    kinds = list(dict.fromkeys(entry.kind for entry, _ in looked))
    found = Check(names.MOMENTS, f"{', '.join(kinds)} of {counted(len(looked), 'tensor')}")
    found.failures = [
        f"{_first(entry, facts.first_negative)}: {facts.negative} negative of {entry.numel}"
        for entry, facts in looked
        if facts.first_negative is not None
    ]
    return found


def zeros(manifest: Manifest, scan: Scan, ignored: Ignored) -> Check:
    """Matrices of nothing but zeros, and moments that never saw a gradient."""
    looked = _floats(manifest, scan, ignored)
    if not looked:
        return not_applicable(names.ZEROS, "no floats")
    found = Check(names.ZEROS, counted(len(looked), "tensor"))
    empty: dict[str, list[str]] = {}
    for entry, facts in looked:
        if not facts.is_zero or not entry.numel:
            continue
        if entry.kind not in WEIGHT_KINDS:
            if manifest.train.optimizer_step.get(entry.fqn, 0) > 0:
                empty.setdefault(entry.fqn, []).append(entry.kind)
        elif entry.kind != BUFFER and len(entry.shape) > 1 and entry.numel > 1:
            found.warnings.append(f"{entry.kind} {entry.fqn}: all {entry.numel} elements are zero")
    for fqn, kinds in empty.items():
        steps = manifest.train.optimizer_step[fqn]
        found.warnings.append(f"{', '.join(kinds)} of {fqn}: zero after {steps:g} steps")
    return found


def _floats(manifest: Manifest, scan: Scan, ignored: Ignored) -> list[tuple[Entry, Facts]]:
    """Tensors of floats that have elements, with what was seen of them."""
    return [
        (entry, scan.facts[key])
        for key, entry in manifest.entries.items()
        if key in scan.facts
        and entry.dtype.family in ("float", "float8", "complex")
        and not ignored(entry.fqn)
    ]


def _first(entry: Entry, flat: int) -> str:
    at = list(index_of(flat, entry.shape))
    return f"{entry.kind} {entry.fqn} {at} {_where(entry, flat)}"
