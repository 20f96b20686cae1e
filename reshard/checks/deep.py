"""The deep checks: which tensors the scan reads and compares, and what its results mean."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reshard import units
from reshard.checks import names
from reshard.checks.digests import Digest
from reshard.checks.element_facts import ElementFacts
from reshard.checks.gaps import count_unexpected, find_gaps
from reshard.checks.identity.crosscheck import are_comparable
from reshard.checks.result import Check, not_applicable
from reshard.checks.scan import (
    Counterpart,
    Mismatch,
    ScanResult,
    Task,
    cast_into,
    find_chunk,
    split_replicas,
)
from reshard.core.box import index_of
from reshard.core.dtypes import FLOAT32, DType
from reshard.core.manifest import BUFFER, MASTER, PARAM, WEIGHT_KINDS, Entry, Key, Manifest
from reshard.model import ModelShapes
from reshard.quantised.packed import find_packed
from reshard.quantised.remainders import is_computed
from reshard.system.derived import list_files
from reshard.system.files import SourceFiles
from reshard.system.paths import as_path, find_rank
from reshard.tensors import weights
from reshard.training.optimizers import NEVER_NEGATIVE, name_slots
from reshard.units import abridge, counted

# torch 2.13 ``distributed/fsdp/_flat_param.py`` (``_FLAT_PARAM_PADDING_VALUE``) fills the padding
# between parameters with this number. The padding of shards, also of FSDP 2's rows, is zero.
_FSDP_PADDING = 42.0

Ignored = Callable[[str], bool]


def plan_tasks(
    manifest: Manifest,
    *,
    config: Mapping[str, Any] | None,
    shapes: ModelShapes | None,
    digests: Mapping[Key, tuple[Digest, ...]],
) -> list[Task]:
    """Return a task for every tensor, with the counterparts that must be equal to it.

    Args:
        config: the transformers config beside the checkpoint, which may declare tied weights.
        shapes: the model given by ``--model``.
        digests: the digests to compute of tensors, by key.
    """
    # A master that is computed from its weight cannot disagree with it.
    masters = {entry.fqn for entry in manifest.of_kind(MASTER) if not is_computed(entry)}
    copies = {e.fqn: e for e in manifest.of_kind(PARAM) if e.fqn in masters}
    ties = list(_find_ties(manifest, config, shapes))
    planned = []
    for entry in manifest.entries.values():
        if entry.kind == PARAM and entry.fqn in copies and _is_comparable(entry, manifest):
            continue  # it is read as the counterpart of its master weight
        counterparts = [Counterpart(names.REPLICAS, other) for other in split_replicas(entry)]
        copy = copies.get(entry.fqn) if entry.kind == MASTER else None
        if copy is not None and _is_comparable(copy, manifest):
            counterparts.append(Counterpart(names.MASTERS, copy, examine=True))
            counterparts += [Counterpart(names.REPLICAS, other) for other in split_replicas(copy)]
        counterparts += [
            Counterpart(names.TIED, other) for kept, other in ties if kept == entry.key
        ]
        signs = entry.kind in NEVER_NEGATIVE
        planned.append(Task(entry, tuple(counterparts), digests.get(entry.key, ()), signs))
    return planned


def _is_comparable(copy: Entry, manifest: Manifest) -> bool:
    return are_comparable(manifest.entries[MASTER, copy.fqn], copy)


def _find_ties(
    manifest: Manifest, config: Mapping[str, Any] | None, shapes: ModelShapes | None
) -> Iterator[tuple[Key, Entry]]:
    best = manifest.select_weights()
    for copy in manifest.tied_copies:
        yield from _pair_tied(best.get(manifest.kept_name(copy.fqn)), copy)
    for head, kept in _list_declared_ties(manifest, config, shapes):
        yield from _pair_tied(best.get(kept), best.get(head))


def _pair_tied(kept: Entry | None, other: Entry | None) -> Iterator[tuple[Key, Entry]]:
    if kept is not None and other is not None and are_comparable(kept, other):
        yield kept.key, other


def _list_declared_ties(
    manifest: Manifest, config: Mapping[str, Any] | None, shapes: ModelShapes | None
) -> Iterator[tuple[str, str]]:
    best = manifest.select_weights()
    pairs = dict(shapes.tied) if shapes else {}
    declared = config.get("tie_word_embeddings") if config else None
    for head, embedding in weights.find_heads(best):
        if declared is True or (
            declared is not False and weights.is_untrained(manifest, head, embedding)
        ):
            pairs.setdefault(head, embedding)
    yield from pairs.items()


# The checks


def check_crc(manifest: Manifest, scan: ScanResult) -> Check:
    """Check that stored checksums match the bytes."""
    if not scan.records:
        return not_applicable(names.CRC, "the files store no checksums")
    check = Check(names.CRC, counted(scan.records, "stored checksum"), exit_code=3)
    for path, record in scan.altered:
        stop = record.byte_offset + record.nbytes
        tensors = [
            f"{entry.kind} {entry.fqn}"
            for entry in manifest.entries.values()
            if any(
                chunk.file == path
                and chunk.box.volume
                and record.byte_offset <= chunk.byte_offset < stop
                for chunk in entry.chunks
            )
        ]
        content = f", {abridge(tensors)}" if tensors else ""
        check.failures.append(
            f"{path}: {record.name} (bytes {record.byte_offset} to {stop}{content}) does not match"
            " its CRC-32"
        )
    return check


def check_replicas(tasks: Sequence[Task], scan: ScanResult) -> Check:
    """Check that blocks stored by several ranks are equal; unequal buffers are only a warning."""
    replicated = [
        task for task in tasks if any(r.check == names.REPLICAS for r in task.counterparts)
    ]
    if not replicated:
        return not_applicable(names.REPLICAS, "nothing is stored twice")
    check = Check(names.REPLICAS, f"{counted(len(replicated), 'tensor')} that several ranks store")
    for mismatch in _select_mismatches(scan, names.REPLICAS):
        to = check.warnings if mismatch.entry.kind == BUFFER else check.failures
        to.append(
            _describe_mismatch(
                mismatch,
                "another value"
                f" {_describe_location(mismatch.counterpart.entry, mismatch.difference.first)}",
            )
        )
    return check


def check_masters(manifest: Manifest, tasks: Sequence[Task], scan: ScanResult) -> Check:
    """Check that the module's weights are the cast of their master weights, bit for bit."""
    copies = [r.entry for task in tasks for r in task.counterparts if r.check == names.MASTERS]
    others = [
        entry
        for entry in manifest.of_kind(PARAM)
        if (MASTER, entry.fqn) in manifest.entries
        and not is_computed(manifest.entries[MASTER, entry.fqn])
        and not _is_comparable(entry, manifest)
    ]
    if not copies and not others:
        return not_applicable(names.MASTERS, "no weight is stored beside its master weight")
    dtypes = abridge(sorted({str(entry.dtype) for entry in (*copies, *others)}))
    count = counted(len(copies) + len(others), "weight")
    check = Check(names.MASTERS, f"{count} in {dtypes}")
    for mismatch in _select_mismatches(scan, names.MASTERS):
        where = _describe_location(mismatch.counterpart.entry, mismatch.difference.first)
        check.failures.append(_describe_mismatch(mismatch, f"not the cast of its master, {where}"))
    for entry in others:
        master = manifest.entries[MASTER, entry.fqn]
        check.failures.append(
            f"{entry.fqn}: {entry.dtype} of shape {list(entry.shape)} cannot be the cast of its"
            f" master, {master.dtype} of shape {list(master.shape)}"
        )
    return check


def check_tied(
    manifest: Manifest,
    tasks: Sequence[Task],
    scan: ScanResult,
    *,
    config: Mapping[str, Any] | None,
    shapes: ModelShapes | None,
) -> Check:
    """Check that tied names have equal values."""
    compared = sum(r.check == names.TIED for task in tasks for r in task.counterparts)
    if not compared and not manifest.tied:
        return not_applicable(names.TIED, "no tied names")
    shared = len(manifest.tied) - len(manifest.tied_copies)
    what = [f"{counted(shared, 'tied name')}, stored once"] if shared else []
    what += [f"{counted(compared, 'tied name')}, stored more than once"] if compared else []
    check = Check(names.TIED, ", ".join(what))
    for mismatch in _select_mismatches(scan, names.TIED):
        name = mismatch.counterpart.entry.fqn
        is_declared = name in manifest.tied or (shapes is not None and name in shapes.tied)
        is_declared = is_declared or bool(config and config.get("tie_word_embeddings") is True)
        if is_declared:
            check.failures.append(
                _describe_mismatch(mismatch, f"{name}, which is tied to it, differs")
            )
        else:
            check.warnings.append(
                _describe_mismatch(
                    mismatch, f"{name} has other values, so training did not tie the two"
                )
            )
    return check


def _select_mismatches(scan: ScanResult, name: str) -> list[Mismatch]:
    return [mismatch for mismatch in scan.unequal if mismatch.counterpart.check == name]


def _describe_mismatch(mismatch: Mismatch, what: str) -> str:
    difference, entry = mismatch.difference, mismatch.entry
    left, right = (f"{value:.9g}" for value in difference.first_values)
    at = list(index_of(difference.first, entry.shape))
    # It is 0 if the values differ in NaN, infinities or the sign of 0 alone.
    apart = f", up to {difference.max_abs:.3g} apart" if difference.max_abs else ""
    return (
        f"{entry.fqn}: {what}: {difference.count} of {entry.numel} elements, first at {at}:"
        f" {left} and {right}{apart}"
    )


def _describe_location(entry: Entry, flat: int) -> str:
    path = as_path(list_files(find_chunk(entry, index_of(flat, entry.shape)).file)[0])
    rank = find_rank(path.name)
    if rank is None:
        rank = find_rank(path.parent.name)
    return f"in {path}" + ("" if rank is None else f" (rank {rank})")


def check_padding(manifest: Manifest, block_bytes: int) -> Check:
    """Check that the padding of flat partitions is zero, if the format zeroes it."""
    # The bytes of copies that the model does not use are not padding either.
    stored = (*manifest.entries.values(), *manifest.tied_copies, *manifest.unused_copies)
    gaps = find_gaps(stored, manifest.files)
    if not gaps:
        return not_applicable(names.PADDING, "no padding")
    nbytes = sum(gap.nbytes for gap in gaps)
    check = Check(names.PADDING, f"{units.show_bytes(nbytes)} in {counted(len(gaps), 'place')}")
    expected, has_zero_stage = manifest.origin.padding, manifest.origin.zero_stage is not None
    with SourceFiles(manifest.files) as pool:
        counts = [
            (
                gap,
                count_unexpected(
                    pool, gap, _list_padding_values(gap.dtype, fsdp=not has_zero_stage), block_bytes
                ),
            )
            for gap in gaps
        ]
    nonzero = [(gap, count) for gap, count in counts if count]
    if expected == "uninitialized":
        total = sum(count for _, count in nonzero)
        found = f"{counted(total, 'element')} not zero: the framework does not initialize padding"
        return not_applicable(names.PADDING, f"{check.looked_at}; {found}")
    lines = [
        f"{gap.file}: the padding near {gap.fqn} (byte {gap.byte_offset}) has"
        f" {counted(count, 'element')} that should be zero"
        for gap, count in nonzero
    ]
    if expected == "zero":
        check.failures = lines
    else:  # a tensor may be saved as a view of a larger one, whose other elements follow it
        check.warnings = lines
    return check


def _list_padding_values(dtype: DType, *, fsdp: bool) -> frozenset[bytes]:
    zero = bytes(dtype.itemsize)
    if dtype.family != "float":
        return frozenset((zero,))
    number = bytearray(dtype.itemsize)
    cast_into(number, bytearray(struct.pack("<f", _FSDP_PADDING)), FLOAT32, dtype)
    # Minus zero: the sign is the highest bit of the last byte.
    negative = zero[:-1] + b"\x80"
    return frozenset((zero, negative, *([bytes(number)] * fsdp)))


def check_finite(manifest: Manifest, scan: ScanResult, ignored: Ignored) -> Check:
    """Check for NaN and infinity; in a buffer, such as a mask, they are only a warning.

    Codes that are stored in a dtype of floats are no values.
    """
    codes = find_packed(manifest)
    floats = _select_floats(manifest, scan, ignored)
    examined = [pair for pair in floats if pair[0].fqn not in codes]
    check = Check(names.FINITE, counted(len(examined), "tensor"))
    if not examined:
        return not_applicable(names.FINITE, "no tensor has a floating-point dtype")
    for entry, facts in examined:
        if facts.first_nonfinite is None:
            continue
        what = " and ".join(
            f"{count} {name}"
            for count, name in ((facts.nan, "NaN"), (facts.infinite, "infinite"))
            if count
        )
        to = check.warnings if entry.kind == BUFFER else check.failures
        to.append(f"{_describe_element(entry, facts.first_nonfinite)}: {what} of {entry.numel}")
    return check


def check_moments(manifest: Manifest, scan: ScanResult, ignored: Ignored) -> Check:
    """Check that sums and means of squares are not negative."""
    examined = [
        pair for pair in _select_floats(manifest, scan, ignored) if pair[0].kind in NEVER_NEGATIVE
    ]
    if not examined:
        return not_applicable(names.MOMENTS, "no optimizer slot is a sum or mean of squares")
    kinds = list(dict.fromkeys(entry.kind for entry, _ in examined))
    shown = ", ".join(name_slots(kinds).values())
    check = Check(names.MOMENTS, f"{shown} of {counted(len(examined), 'tensor')}")
    check.failures = [
        f"{_describe_element(entry, facts.first_negative)}: {facts.negative} of"
        f" {entry.numel} values are negative"
        for entry, facts in examined
        if facts.first_negative is not None
    ]
    return check


def check_zeros(manifest: Manifest, scan: ScanResult, ignored: Ignored) -> Check:
    """Check for weights that are all zeros, and for moments that never received a gradient."""
    examined = _select_floats(manifest, scan, ignored)
    if not examined:
        return not_applicable(names.ZEROS, "no tensor has a floating-point dtype")
    check = Check(names.ZEROS, counted(len(examined), "tensor"))
    empty: dict[str, list[str]] = {}
    for entry, facts in examined:
        if not facts.is_zero or not entry.numel:
            continue
        if entry.kind not in WEIGHT_KINDS:
            if manifest.train.optimizer_step.get(entry.fqn, 0) > 0:
                empty.setdefault(entry.fqn, []).append(entry.kind)
        # Vectors are left out: biases, for example, often start at zero.
        elif entry.kind != BUFFER and len(entry.shape) > 1 and entry.numel > 1:
            check.warnings.append(f"{entry.kind} {entry.fqn}: all {entry.numel} elements are zero")
    for fqn, kinds in empty.items():
        steps = manifest.train.optimizer_step[fqn]
        check.warnings.append(f"{', '.join(kinds)} of {fqn}: zero after {steps:g} steps")
    return check


def _select_floats(
    manifest: Manifest, scan: ScanResult, ignored: Ignored
) -> list[tuple[Entry, ElementFacts]]:
    return [
        (entry, scan.facts[key])
        for key, entry in manifest.entries.items()
        if key in scan.facts
        and entry.dtype.family in ("float", "float8", "complex")
        and not ignored(entry.fqn)
    ]


def _describe_element(entry: Entry, flat: int) -> str:
    at = list(index_of(flat, entry.shape))
    return f"{entry.kind} {entry.fqn} {at} {_describe_location(entry, flat)}"
