"""The averaged weights of a schedule-free optimizer, computed from those that it trains.

In train mode, a parameter is y, the point at which gradients are computed. The model to evaluate
is the average x, which ``optimizer.eval()`` computes in place: ``y.lerp_(z, 1 - 1 / beta1)``.

Sources: schedulefree 1.4 ``adamw_schedulefree.py``, ``radam_schedulefree.py`` and
``sgd_schedulefree.py`` (whose beta1 is the momentum); its ``*_reference.py`` keep x as a slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from reshard.core.box import Index
from reshard.core.computed import ComputedValues
from reshard.core.dtypes import FLOAT32, FLOAT64, DType
from reshard.core.manifest import Entry, Manifest
from reshard.engine.move.tiles import find_reader
from reshard.errors import IncompleteError
from reshard.system.derived import Reader
from reshard.system.files import SourceFiles
from reshard.tensors import replicas
from reshard.tensors.lazy import find_first_difference
from reshard.tensors.replicas import Replicas
from reshard.tensors.weights import Tied, check_tied_copies

ScheduleFree = Literal["x", "y"]
OPTION = "--schedule-free"

_Z, _X = "z", "x"  # slots
_BLOCK = 1 << 17  # elements; what is computed at a time stays in a core's cache
WORKER_NBYTES = _BLOCK * (FLOAT32.itemsize + 3 * FLOAT64.itemsize)  # a thread's z, and the sums


@dataclass(frozen=True, eq=False)
class AveragedWeight(ComputedValues):
    """The average x of one weight.

    Args:
        sources: y, and the slot z.
        weight: the weight of z in ``lerp``, which is negative.
    """

    weight: float

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return FLOAT64 if self.sources[0].dtype == FLOAT64 else FLOAT32

    @property
    def detail(self) -> str:
        """The weight and its factor."""
        trained = self.sources[0]
        return f"average of {trained.kind} {trained.fqn} by {self.weight}"

    def read_into(self, pool: Reader, byte_offset: int, target: memoryview) -> None:
        """Fill ``target`` with the averages from a byte offset on.

        Raises:
            ReshardError: a file cannot be read.
        """
        import numpy as np

        reader, size = find_reader(pool), self.dtype.itemsize
        first, numel = byte_offset // size, len(target) // size
        kind = np.dtype(f"<f{size}")
        memory = memoryview(reader.keep("z", size, lambda: bytearray(_BLOCK * size)))
        # As `torch.lerp` (ATen/native/Lerp.h): weight and difference are rounded to the dtype, and
        # their product is added to the nearer end without a rounding between.
        weight = kind.type(self.weight)
        is_near = abs(weight) < 0.5
        factor = np.float64(weight if is_near else weight - kind.type(1))
        for start in range(0, numel, _BLOCK):
            part = target[start * size : (start + _BLOCK) * size]
            run = first + start, first + start + len(part) // size
            reader.read_elements(self.sources[0], *run, self.dtype, part)
            reader.read_elements(self.sources[1], *run, self.dtype, memory[: len(part)])
            y, z = np.frombuffer(part, kind), np.frombuffer(memory[: len(part)], kind)
            with np.errstate(over="ignore", invalid="ignore"):  # `verify --deep` finds infinities
                product = np.subtract(z, y).astype(np.float64) * factor
                product += y if is_near else z
                np.copyto(y, product, casting="same_kind")


def average(
    manifest: Manifest, choice: ScheduleFree, tied: Tied, policy: Replicas
) -> tuple[Manifest, str]:
    """Return the manifest with the averaged weights of a run that saved in train mode, and a note.

    The note is empty if no schedule-free optimizer saved in train mode.

    Args:
        choice: y leaves the weights as they are stored.
        tied: the option --tied.
        policy: the option --replicas.

    Raises:
        IncompleteError: the parameters of such an optimizer have no names.
        DifferentError: copies of a weight, or of its slot z, differ.
    """
    betas = _read_betas(manifest)
    if not betas:
        return manifest, ""
    if choice == "y":
        return manifest, f"weights: y of the schedule-free optimizer, as stored ({OPTION} y)"
    if manifest.unnamed is not None or manifest.unnamed_optimizers:
        reason = manifest.unnamed.reason if manifest.unnamed else "its states have no names"
        raise IncompleteError(
            manifest.origin.path,
            "was saved by a schedule-free optimizer in train mode: it has the weights y, and the"
            f" averaged weights x, which are to be written, cannot be computed: {reason}",
            f"pass --model config.json|DIR|module:factory, or {OPTION} y to write y",
        )
    weights = manifest.select_weights()
    averaged: dict[str, Entry] = {}
    slots: list[Entry] = []
    for fqn, beta in betas.items():
        weight, z = weights.get(fqn), manifest.entries.get((_Z, fqn))
        stored = manifest.entries.get((_X, fqn))
        if weight is None or z is None:
            continue  # never stepped: x, y and z are equal
        slots += (weight, stored or z)
        source = stored or AveragedWeight((weight, z), 1 - 1 / beta)
        averaged[fqn] = replace(weight, chunks=source.chunks)  # the dtype stays the stored one
    count = len(averaged)
    with SourceFiles() as pool:
        replicas.check(slots, manifest.files, pool, policy)
        if tied != "drop":
            check_tied_copies(manifest, pool)
        averaged |= dict(_find_untrained_copies(manifest, weights, averaged, pool))
    if not count:
        return manifest, ""
    entries = (
        averaged.get(entry.fqn, entry) if entry is weights.get(entry.fqn) else entry
        for entry in manifest.entries.values()
    )
    copies = (
        entry for entry in manifest.tied_copies if manifest.kept_name(entry.fqn) not in averaged
    )
    note = (
        f"weights: {count} of {len(weights)} are the averages x of the schedule-free optimizer, not"
        f" y, which was saved in train mode (x = lerp(y, z, 1 - 1/beta1); {OPTION} y writes y)"
    )
    return replace(manifest.with_entries(entries), tied_copies=tuple(copies)), note


def _read_betas(manifest: Manifest) -> dict[str, float]:
    # A group whose parameters have no names has the name of none.
    betas: dict[str, float] = {}
    for group in manifest.train.param_groups:
        hyper = group.hyper
        if hyper.get("train_mode") is not True:
            continue
        pair = hyper.get("betas")
        beta = pair[0] if isinstance(pair, (list, tuple)) and pair else hyper.get("momentum")
        if isinstance(beta, (int, float)) and beta:
            betas |= dict.fromkeys(map(manifest.kept_name, group.fqns or [""]), float(beta))
    return betas


def _find_untrained_copies(
    manifest: Manifest,
    weights: Mapping[str, Entry],
    averaged: Mapping[str, Entry],
    pool: SourceFiles,
) -> Iterator[tuple[str, Entry]]:
    """DCP and safetensors store a tied weight under each of its names."""
    listed = manifest.train.group_of
    by_form: dict[tuple[DType, Index], list[str]] = defaultdict(list)
    for fqn in averaged:
        by_form[weights[fqn].dtype, weights[fqn].shape].append(fqn)
    for fqn, entry in weights.items():
        if fqn in listed or fqn in averaged:
            continue
        for kept in by_form[entry.dtype, entry.shape]:
            if find_first_difference(pool, entry, weights[kept]) is None:
                yield fqn, replace(entry, chunks=averaged[kept].chunks)
                break
